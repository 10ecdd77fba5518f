"""What the features of a finished run are worth with other classifiers: is it they that limit it, or its own one?

Each is made of the training features of the run's global model, without looking at a test set: h* fitted again by 100
steps of Adam, on points that clients could send (C x d numbers each) or, as a ceiling, on all features; or the nearest
of such points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from . import equations as eq
from . import nearest
from .data.sources import Source
from .errors import RunError
from .evaluation import mean
from .federation import Federation
from .methods.base import Tensors
from .methods.refit import fit, hard_means, refitted
from .probe import features, restored

Part = tuple[Tensor, Tensor]  # features z [n, d] and labels y [n]
DRAWS = 3  # of random mixtures
NAMES = {
    "h*": "h*, its own classifier",
    "pooled means": "h* fitted again on the class means of all samples",
    "client means": "... on each client's class means",
    "gradient prototypes": "... on the means of what each client gets wrong",  # methods/refit.py
    "random mixtures": "... on as many random mixtures of its samples",
    "all features": "... on all features (a ceiling: they do not travel)",
    "all features, clients equal": "... the same, each client weighing alike",
    "nearest client mean": "the nearest of the clients' class means",
    "nearest pooled mean": "the nearest class mean of all samples",
    "train accuracy of h*": "h* on the training samples",
}


def heads(run: str | Path, source: Source | None = None) -> dict[str, float]:
    """Accuracy of each in per cent, the last of h* on all training samples. The others are means over the test sets:
    those of the domains, or where there are none what each client holds out.
    """
    federation, _, parts, tests = final_features(run, source)
    h = federation.net.classifier
    return compared(parts, tests, h.weight.detach(), h.bias.detach())


def final_features(
    run: str | Path, source: Source | None = None
) -> tuple[Federation, Tensors, list[Part], dict[str, Part]]:
    """A run's federation and last checkpoint, and the features of its global model: each client's, each test set's."""
    federation, tensors = restored(Path(run), source)
    there = {name: samples for name, samples in federation.trainer.tests.items() if len(samples)}
    tests = {name: samples for name, samples in there.items() if name.startswith("server/")} or there
    if not tests or not federation.clients:
        raise RunError(f"{run} has no samples here to test a classifier on")

    net, transform = federation.net, federation.trainer.transform
    parts = [features(net, client.train, transform) for client in federation.clients]
    return federation, tensors, parts, {name: features(net, samples, transform) for name, samples in tests.items()}


def compared(parts: Sequence[Part], tests: dict[str, Part], weight: Tensor, bias: Tensor) -> dict[str, float]:
    C, h = len(weight), (weight, bias)
    classes = torch.arange(C, device=weight.device)
    z, y = torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts])
    each_alike = torch.cat([torch.full_like(own, 1 / len(own), dtype=z.dtype) for _, own in parts])
    means, counts = _stacked([eq.class_means(*part, C) for part in parts])
    hard, _ = _stacked([hard_means(*part, *h) for part in parts])
    held, (pooled, samples) = counts > 0, eq.class_means(z, y, C)

    def score(W: Tensor, b: Tensor) -> float:
        return _accuracy(tests, lambda features: F.linear(features, W, b))

    rng = [torch.Generator().manual_seed(draw) for draw in range(DRAWS)]
    mixed = [torch.stack([mixture(*part, C, each) for part in parts]) for each in rng]
    found = (
        score(*h),
        score(*fit(pooled[samples > 0], classes[samples > 0], None, *h)),
        score(*refitted(means, held, *h)),
        score(*refitted(hard, held, *h)),
        mean([score(*refitted(points, held, *h)) for points in mixed]),
        score(*fit(z, y, None, *h)),
        score(*fit(z, y, each_alike, *h)),
        _accuracy(tests, lambda features: nearest.logits(features, means, counts)),
        _accuracy(tests, lambda features: nearest.logits(features, pooled[None], samples[None])),
        100 * float((F.linear(z, *h).argmax(1) == y).float().mean()),
    )
    return dict(zip(NAMES, found, strict=True))


def mixture(z: Tensor, y: Tensor, C: int, rng: torch.Generator) -> Tensor:
    """A random convex combination of the samples of each class [C, d]."""
    drawn = -torch.log(torch.rand(len(y), 1, generator=rng).clamp_min(1e-12)).to(z.device)
    sums = eq.class_means(torch.cat([drawn * z, drawn], 1), y, C)[0]
    return sums[:, :-1] / sums[:, -1:].clamp_min(1e-12)


def _stacked(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    points, counts = zip(*pairs, strict=True)
    return torch.stack(points), torch.stack(counts)


def _accuracy(tests: dict[str, Part], logits: Callable[[Tensor], Tensor]) -> float:
    return mean([100 * float((logits(z).argmax(1) == y).float().mean()) for z, y in tests.values()])
