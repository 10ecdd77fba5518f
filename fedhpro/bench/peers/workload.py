"""What every engine of the comparison trains, and how its rounds are timed.

Peers import this with interpreters of their own: torch, and nothing of fedhpro.
"""

from __future__ import annotations

import argparse
import functools
import json
import time

import torch
from torch import Tensor, nn

CLIENTS, SAMPLES, CLASSES, DIM = 10, 600, 10, 128
EPOCHS, BATCH, LR, MOMENTUM = 2, 64, 0.01, 0.9


@functools.cache
def samples(client: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(client)
    x = torch.randn(SAMPLES, 1, 28, 28, generator=rng)
    return x, torch.randint(0, CLASSES, (SAMPLES,), generator=rng)


def encoder(model: str) -> nn.Sequential:
    """From an image to its features: a small CNN, or next to nothing, which leaves the time of the engine itself."""
    if model == "tiny":
        return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, DIM), nn.ReLU())
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, DIM), nn.ReLU(),
    )  # fmt: skip


def head() -> nn.Linear:
    return nn.Linear(DIM, CLASSES)


def arguments(models: tuple[str, ...] = ("cnn", "tiny")) -> argparse.Namespace:
    """What a run is asked for; sets torch's threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=("fedavg", "fedproto"))
    parser.add_argument("model", choices=models)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch in a process")
    parser.add_argument("--processes", type=int, default=1, help="that share the clients, where the engine has them")
    parser.add_argument("--started", type=float, default=time.monotonic(), help="time.monotonic() at the start")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    return asked


class Stopwatch:
    """`lap` at the end of every round; the first one contains everything since the process was started."""

    def __init__(self, started: float) -> None:
        self.times = [started]

    def lap(self) -> None:
        self.times.append(time.monotonic())

    def report(self) -> None:
        """One line of JSON, for who started this process."""
        laps = [end - start for start, end in zip(self.times[:-1], self.times[1:], strict=True)]
        print("\n" + json.dumps({"first": laps[0], "rounds": laps[1:]}), flush=True)


def import_torchvision() -> None:
    """Two peers import torchvision without using it, and beside a CPU build of torch its wheel lacks two operators."""
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401
