"""Samples per second of augmented batches, beside a torch DataLoader that does the same work on the same arrays.

The work: random crop (padding an eighth of the side), random flip, normalisation, batches of 64, one torch thread. The
data set of the DataLoader does it sample by sample, as data sets do; its workers live on from epoch to epoch. Where
there is a GPU, batches end up on it: ours from bytes that are there, the DataLoader's by a copy from pinned memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data.batches import Transform, epoch

BATCH = 64
SIZES = {32: 10_000, 64: 4_000}  # side of the images: how many
BASE = "DataLoader, 0 workers"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Batches = Iterable[tuple[Tensor, Tensor]]


class Samples(Dataset[tuple[Tensor, int]]):
    def __init__(self, x: Tensor, y: Tensor, crop: int) -> None:
        self.x, self.y, self.crop = x, y.tolist(), crop
        self.mean, self.std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image, (height, width) = F.pad(self.x[i], [self.crop] * 4), self.x.shape[2:]
        top, left = torch.randint(0, 2 * self.crop + 1, (2,)).tolist()
        image = image[:, top : top + height, left : left + width]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return (image.float() / 255 - self.mean) / self.std, self.y[i]


def ours(x: Tensor, y: Tensor, transform: Transform) -> Callable[[], Batches]:
    rng = torch.Generator().manual_seed(0)
    x, y = x.to(DEVICE), y.to(DEVICE)

    def one_epoch() -> Batches:
        for rows in epoch(len(y), BATCH, rng):
            rows = rows.to(DEVICE)
            yield transform.batch(x, rows, rng), y[rows]

    return one_epoch


def loader(x: Tensor, y: Tensor, crop: int, workers: int) -> Callable[[], Batches]:
    batches = DataLoader(
        Samples(x, y, crop),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=DEVICE.type == "cuda",
    )
    return lambda: ((images.to(DEVICE, non_blocking=True), labels.to(DEVICE)) for images, labels in batches)


def samples_per_second(one_epoch: Callable[[], Batches], count: int, epochs: int) -> float:
    times = []
    for _ in range(epochs):
        started, seen = time.perf_counter(), 0
        for _, labels in one_epoch():
            seen += len(labels)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        assert seen == count
    return count / min(times[1:])


def batches(quick: bool = False) -> dict[str, Any]:
    threads, epochs = torch.get_num_threads(), 2 if quick else 4  # the first warms up and is left out
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for side, count in SIZES.items():
        rng = torch.Generator().manual_seed(side)
        x = torch.randint(0, 256, (count, 3, side, side), generator=rng, dtype=torch.uint8)
        y, crop = torch.arange(count) % 10, side // 8
        cases = {
            "fedhpro": ours(x, y, Transform(MEAN, STD, crop, flip=True)),
            "fedhpro, and AutoAugment": ours(x, y, Transform(MEAN, STD, crop, flip=True, augment="auto")),
            BASE: loader(x, y, crop, 0),
            "DataLoader, 2 workers": loader(x, y, crop, 2),
        }
        speeds = {name: round(samples_per_second(case, count, epochs)) for name, case in cases.items()}
        found[f"{side}x{side}"] = dict(speeds)
    torch.set_num_threads(threads)
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    return {"device": device, "samples_per_second": found}


def show(found: dict[str, Any], console: Console) -> None:
    console.print(f"samples per second on {found['device']}; 1.0 is the DataLoader without workers", highlight=False)
    for size, speeds in found["samples_per_second"].items():
        for name, speed in speeds.items():
            ratio = "-" if "AutoAugment" in name else f"{speed / speeds[BASE]:.1f}"  # that is more work
            console.print(f"  {size}  {name:26} {speed:10,.0f}  {ratio:>6}", highlight=False)
