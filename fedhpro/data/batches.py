"""From stored samples to batches: the schedule of a client's round, augmentation per sample, normalisation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Transform:
    """uint8 images to normalised floats; anything else (token ids) passes through."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: int = 0  # padding of the random crop
    flip: bool = False
    augment: Literal["sample", "batch", "off"] = "sample"  # "batch": one crop and flip for a whole batch

    def plain(self, x: Tensor) -> Tensor:
        if x.dtype != torch.uint8:
            return x
        offset, scale = _normalisation(self.mean, self.std, x.device)
        return torch.addcmul(offset, x.float(), scale)

    def padded(self, x: Tensor) -> Tensor:
        """Done once per client and round, so that a crop is only a window."""
        return F.pad(x, [self.crop] * 4) if self.augments(x) and self.crop else x

    def augments(self, x: Tensor) -> bool:
        return x.dtype == torch.uint8 and self.augment != "off"

    def batch(self, padded: Tensor, index: Tensor, rng: torch.Generator) -> Tensor:
        """Samples `index` of what `padded` gave, augmented and normalised."""
        if not self.augments(padded):
            return self.plain(padded[index])
        draws = len(index) if self.augment == "sample" else 1
        if self.crop:
            height, width = padded.shape[2] - 2 * self.crop, padded.shape[3] - 2 * self.crop
            top, left = torch.randint(0, 2 * self.crop + 1, (2, draws), generator=rng).to(padded.device)
            windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view [n, c, tops, lefts, h, w]
            images = windows[index, :, top.expand(len(index)), left.expand(len(index))]
        else:
            images = padded[index]
        if self.flip:
            flipped = (torch.rand(draws, generator=rng) < 0.5).to(padded.device)
            images = torch.where(flipped.expand(len(index))[:, None, None, None], images.flip(3), images)
        return self.plain(images).contiguous()


@functools.cache  # on a GPU, a copy of constants in every step would wait for it
def _normalisation(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    m, s = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]
    return (-m / s).to(device), (1 / (255 * s)).to(device)


def epoch(n: int, batch_size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """One pass over n samples in random order. A last batch of one sample would break BatchNorm: it joins the batch
    before; a client with a single sample sees it twice in its batch, which leaves the mean loss as it is.
    """
    order = torch.randperm(n, generator=rng)
    if n == 1:
        yield order.repeat(2)
        return
    start = 0
    while start < n:
        stop = start + batch_size
        if n - stop <= 1:
            stop = n
        yield order[start:stop]
        start = stop
