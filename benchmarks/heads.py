"""What the features of a finished run are worth with other classifiers, and where its hyper-prototypes are.

    python benchmarks/heads.py RUN [RUN ...] [--out heads.jsonl]

For each run folder with a global model: test accuracy (mean over the domains) of its own classifier h*; of h* fitted
again, by 100 steps of Adam, on the class means of all samples, on the means of each client, on gradient prototypes
(methods/refit.py), on as many random convex mixtures, on all features, where samples or clients weigh the same; and of
the nearest mean. Then of the hyper-prototypes: how far they moved, and their distance and angle to the class means.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import awake  # noqa: F401 - a method of its own, which a run may name
import torch
import torch.nn.functional as F
from torch import Tensor

from fedhpro import config as configuration
from fedhpro import equations as eq
from fedhpro.federation import Federation
from fedhpro.methods.refit import fit, hard_means, refitted
from fedhpro.probe import features
from fedhpro.runs import RunFolder
from fedhpro.training import copy_into, model_tensors, section

DRAWS = 3  # of random mixtures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for run in options.runs:
        found = {"run": run.name, "data": configuration.load(run).data} | examine(run)
        print(json.dumps(found), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")


def examine(run: Path) -> dict[str, Any]:
    config = configuration.load(run)
    cuda = torch.cuda.is_available()
    config = config.replace(engine="cuda" if cuda else "cpu", precision="fp32" if cuda else "auto", workers=0)
    federation = Federation(config)
    start = federation.state.get("S")
    tensors, _ = RunFolder.open(run).newest_checkpoint()
    net, transform, device = federation.net, federation.trainer.transform, federation.trainer.device
    with torch.no_grad():
        copy_into(model_tensors(net), {name: value.to(device) for name, value in section(tensors, "model").items()})
    held = [client.train.to(device) for client in federation.clients]
    parts = [(features(net, split, transform), split.y) for split in held]
    tests = {
        name.removeprefix("server/"): (features(net, split, transform), split.y)
        for name, split in ((name, samples.to(device)) for name, samples in federation.trainer.tests.items())
    }
    found: dict[str, Any] = {"heads": heads(parts, tests, net.classifier.weight.detach(), net.classifier.bias.detach())}
    if "state/S" in tensors and start is not None:
        S, start = tensors["state/S"].to(device), start.to(device)
        found["hyper"] = hyper(S, start, parts, net.classifier.weight.detach(), net.classifier.bias.detach())
        found["hyper"] |= {name: float(value) for name, value in section(tensors, "state/log").items()}
    return found


Part = tuple[Tensor, Tensor]


def heads(parts: list[Part], tests: dict[str, Part], weight: Tensor, bias: Tensor) -> dict[str, float]:
    C = len(weight)
    z, y = torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts])
    by_client = torch.cat([torch.full((len(own),), 1 / len(own), device=z.device) for _, own in parts])
    means, counts = (torch.stack(each) for each in zip(*(eq.class_means(*part, C) for part in parts), strict=True))
    hard, _ = (torch.stack(each) for each in zip(*(hard_means(*part, weight, bias) for part in parts), strict=True))
    pooled = eq.class_means(z, y, C)[0]
    there = counts > 0
    h = weight, bias

    def score(W: Tensor, b: Tensor) -> float:
        return accuracy(tests, lambda features: F.linear(features, W, b).argmax(1))

    mixtures = []
    for draw in range(DRAWS):
        rng = torch.Generator().manual_seed(draw)
        mixed = torch.stack([mixture(*part, C, rng) for part in parts])
        mixtures.append(score(*refitted(mixed, there, *h)))
    near, labels = means[there], torch.arange(C, device=z.device).expand(there.shape)[there]
    return {
        "h*": score(*h),
        "pooled means": score(*fit(pooled, torch.arange(C, device=z.device), None, *h)),
        "client means": score(*refitted(means, there, *h)),
        "gradient prototypes": score(*refitted(hard, there, *h)),
        "random mixtures": sum(mixtures) / DRAWS,
        "all features": score(*fit(z, y, None, *h)),
        "all features, clients equal": score(*fit(z, y, by_client, *h)),
        "nearest client mean": accuracy(tests, lambda features: labels[torch.cdist(features, near).argmin(1)]),
        "nearest pooled mean": accuracy(tests, lambda features: torch.cdist(features, pooled).argmin(1)),
        "train accuracy of h*": 100 * float((F.linear(z, *h).argmax(1) == y).float().mean()),
    }


def mixture(z: Tensor, y: Tensor, C: int, rng: torch.Generator) -> Tensor:
    """A random convex combination of the samples of each class [C, d]."""
    drawn = -torch.log(torch.rand(len(y), 1, generator=rng).clamp_min(1e-12)).to(z.device)
    sums = eq.class_means(torch.cat([drawn * z, drawn], 1), y, C)[0]
    return sums[:, :-1] / sums[:, -1:].clamp_min(1e-12)


def accuracy(tests: dict[str, Part], predict: Any) -> float:
    """Per cent, the mean over the domains."""
    return sum(100 * float((predict(z) == y).float().mean()) for z, y in tests.values()) / len(tests)


def hyper(S: Tensor, start: Tensor, parts: list[Part], weight: Tensor, bias: Tensor) -> dict[str, float]:
    C, I, _ = S.shape
    z, y = torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts])
    means, H = eq.class_means(z, y, C)[0], S.mean(1)
    units = F.normalize(S, dim=2)
    right = F.linear(H, weight, bias).argmax(1) == torch.arange(C, device=H.device)
    cosines = (units @ units.mT).flatten(1).sum(1) - I
    of_classes = F.normalize(H, dim=1) @ F.normalize(H, dim=1).T
    return {
        "moved, % of |S|": 100 * float((S - start).norm() / start.norm()),
        "cosine of H to class means": float(F.cosine_similarity(H, means).mean()),
        "distance of H to class means": float((H - means).norm(dim=1).mean()),
        "length of class means": float(means.norm(dim=1).mean()),
        "accuracy of H under h*": 100 * float(right.float().mean()),
        "cosine within a class": float(cosines.mean() / max(1, I * (I - 1))),
        "cosine between the classes' H": float((of_classes.sum() - C) / max(1, C * (C - 1))),
    }


if __name__ == "__main__":
    main()
