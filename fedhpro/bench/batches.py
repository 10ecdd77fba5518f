"""Samples per second of augmented batches, beside a torch DataLoader that does the same work on the same arrays.

python benchmarks/batches.py        prints a table and writes benchmarks/results/batches.json; 15 seconds

The work: random crop (padding an eighth of the side), random flip, normalisation, batches of 64, one torch thread. The
data set of the DataLoader does it sample by sample, as data sets do; its workers live on from epoch to epoch. Where
there is a GPU, batches end up on it: ours from bytes that are there, the DataLoader's by a copy from pinned memory.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedhpro.config import available_cores
from fedhpro.data.batches import Transform, epoch

BATCH, EPOCHS = 64, 4  # the first epoch warms up and is left out
SIZES = {32: 10_000, 64: 4_000}  # side of the images: how many
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


def samples_per_second(one_epoch: Callable[[], Batches], count: int) -> float:
    times = []
    for _ in range(EPOCHS):
        started, seen = time.perf_counter(), 0
        for _, labels in one_epoch():
            seen += len(labels)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        assert seen == count
    return count / min(times[1:])


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    print(f"samples per second on {DEVICE.type}, best of {EPOCHS - 1} epochs; 1.0 is the DataLoader without workers")
    for side, count in SIZES.items():
        rng = torch.Generator().manual_seed(side)
        x = torch.randint(0, 256, (count, 3, side, side), generator=rng, dtype=torch.uint8)
        y, crop = torch.arange(count) % 10, side // 8
        cases = {
            "fedhpro": ours(x, y, Transform(MEAN, STD, crop, flip=True)),
            "fedhpro, and AutoAugment": ours(x, y, Transform(MEAN, STD, crop, flip=True, augment="auto")),
            "DataLoader, 0 workers": loader(x, y, crop, 0),
            "DataLoader, 2 workers": loader(x, y, crop, 2),
        }
        speeds = {name: samples_per_second(one_epoch, count) for name, one_epoch in cases.items()}
        for name, speed in speeds.items():
            same_work = name != "fedhpro, and AutoAugment"
            ratio = f"{speed / speeds['DataLoader, 0 workers']:6.1f}" if same_work else "     -"
            print(f"  {side}x{side}  {name:26} {speed:10,.0f}   {ratio}")
        found[f"{side}x{side}"] = speeds
    machine = {
        "cores": available_cores(),
        "cpu": platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    name = "batches.json" if DEVICE.type == "cpu" else "batches-cuda.json"
    out = Path(__file__).parent / "results" / name
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"machine": machine, "samples_per_second": found}, indent=2) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
