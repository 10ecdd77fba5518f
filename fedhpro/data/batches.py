"""From stored samples to batches: the schedule of a client's round, augmentation per sample, normalisation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .autoaugment import PolicyName, autoaugment


@dataclass(frozen=True)
class Transform:
    """uint8 images to normalised floats; anything else (token ids) passes through."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: int = 0  # padding of the random crop
    flip: bool = False
    augment: Literal["sample", "batch", "auto", "off"] = "sample"  # "batch": one crop and flip for a whole batch
    policy: PolicyName = "imagenet"  # of AutoAugment, which "auto" adds to crop and flip

    def plain(self, x: Tensor) -> Tensor:
        if x.dtype != torch.uint8:
            return x
        offset, scale = _normalisation(self.mean, self.std, x.device)
        return torch.addcmul(offset, x.float(), scale)

    def batch(self, x: Tensor, index: Tensor, rng: torch.Generator) -> Tensor:
        """Samples `index` of x, augmented and normalised. x may be larger than memory: only these are read."""
        images = x[index]  # a copy, on the device of x
        if images.dtype == torch.uint8 and self.augment != "off":
            if self.crop or self.flip:
                images = self._moved(images, rng)
            if self.augment == "auto":
                images = autoaugment(images, self.policy, rng)
        return self.plain(images).contiguous()

    def _moved(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Cropped at random from a padded copy, and flipped, in one gather. `rng` is on the CPU, whatever the device."""
        (n, channels, height, width), device = images.shape, images.device
        draws = 1 if self.augment == "batch" else n
        rows, columns = torch.arange(height).expand(draws, -1), torch.arange(width).expand(draws, -1)
        if self.crop:
            top, left = torch.randint(0, 2 * self.crop + 1, (2, draws, 1), generator=rng)
            rows, columns = rows + top, columns + left
            images = F.pad(images, [self.crop] * 4)
        if self.flip:
            flipped = torch.rand(draws, generator=rng) < 0.5
            columns = torch.where(flipped[:, None], columns.flip(1), columns)
        rows, columns = rows.to(device), columns.to(device)
        source = (rows[:, :, None] * images.shape[3] + columns[:, None]).view(draws, 1, -1)
        return images.flatten(2).gather(2, source.expand(n, channels, -1)).view(n, channels, height, width)


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
