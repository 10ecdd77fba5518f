"""What the features of a finished run are worth with other classifiers, and where its hyper-prototypes are.

    python benchmarks/heads.py RUN [RUN ...] [--out heads.jsonl]

For each run folder with a global model: what `fedhpro heads` gives, and of the hyper-prototypes how far they moved, and
their distance and angle to the class means.
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
from fedhpro.heads import Part, compared, final_features
from fedhpro.randomness import generator
from fedhpro.training import section


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
    federation, tensors, parts, tests = final_features(run)
    start = federation.method.server_state(federation.net, generator(federation.config.seed, "server")).get("S")
    h = federation.net.classifier
    found: dict[str, Any] = {"heads": compared(parts, tests, h.weight.detach(), h.bias.detach())}
    if "state/S" in tensors and start is not None:
        S, start = (each.to(h.weight.device) for each in (tensors["state/S"], start))
        found["hyper"] = hyper(S, start, parts, h.weight.detach(), h.bias.detach())
        found["hyper"] |= {name: float(value) for name, value in section(tensors, "state/log").items()}
    return found


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
