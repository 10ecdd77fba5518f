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

WINDOW = 5  # tokens that a filter sees at most


@dataclass(frozen=True)
class Transform:
    """uint8 images to normalised floats; texts (token ids) without needless padding; anything else as it is."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: int = 0  # padding of the random crop
    flip: bool = False
    augment: Literal["sample", "batch", "auto", "off"] = "sample"  # "batch": one crop and flip for a whole batch
    policy: PolicyName = "imagenet"  # of AutoAugment, which "auto" adds to crop and flip

    def plain(self, x: Tensor) -> Tensor:
        if x.dtype != torch.uint8:
            tokens = x.dtype == torch.int64 and x.dim() == 2
            return trimmed(x) if tokens and not x.is_cuda else x  # a captured step has one shape
        offset, scale = self.normalisation(x)
        pixels = x.float()
        return torch.addcmul(offset, pixels, scale, out=pixels)

    def normalisation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Offset and scale of every pixel of images like x."""
        return _normalisation(self.mean, self.std, x.shape[-2:], x.device)

    def batch(self, x: Tensor, index: Tensor, rng: torch.Generator) -> Tensor:
        """Samples `index` of x, augmented and normalised. x may be larger than memory: only these are read."""
        images = x.index_select(0, index)  # a copy, on the device of x; several times faster than x[index]
        if self.moves(x):
            images = self._moved(images, rng)
        if self.augment == "auto" and images.dtype == torch.uint8:
            images = autoaugment(images, self.policy, rng)
        return self.plain(images).contiguous()

    def moves(self, x: Tensor) -> bool:
        """Whether such samples are cropped or flipped at random."""
        return x.dtype == torch.uint8 and self.augment != "off" and (self.crop > 0 or self.flip)

    def draw(self, n: int, rng: torch.Generator) -> Tensor:
        """Random moves [3, n] of a batch: top and left of the crop, and 1 where it is flipped. `rng` is on the CPU."""
        draws = 1 if self.augment == "batch" else n
        moves = torch.zeros(3, draws, dtype=torch.int64)
        if self.crop:
            moves[:2] = torch.randint(0, 2 * self.crop + 1, (2, draws), generator=rng)
        if self.flip:
            moves[2] = torch.rand(draws, generator=rng) < 0.5
        return moves.expand(3, n)

    def _moved(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Cropped at random from padded copies, and flipped."""
        (n, channels, height, width), device = images.shape, images.device
        top, left, flipped = self.draw(n, rng)
        if self.crop:
            images = F.pad(images, [self.crop] * 4)
        if self.flip:
            left = torch.where(flipped > 0, 2 * self.crop - left, left)
            images = torch.cat([images, images.flip(3)])
        # every row of a result is a run of pixels in the padded copies: where it starts
        image, top, left = torch.stack([torch.arange(n) + n * flipped, top, left]).to(device)
        plane = image[:, None] * channels + torch.arange(channels, device=device)
        row = (plane * images.shape[2] + top[:, None])[:, :, None] + torch.arange(height, device=device)
        start = row * images.shape[3] + left[:, None, None]
        runs = images.flatten().unfold(0, width, 1)  # a view of all of them
        return runs.index_select(0, start.flatten()).view(n, channels, height, width)

    def scheduled(self, x: Tensor, index: Tensor, moves: Tensor) -> Tensor:
        """`batch` with moves [3, n] that were drawn before, in operations that a CUDA graph can hold."""
        if not self.moves(x):
            return self.plain(x.index_select(0, index))
        (top, left, flipped), (channels, height, width) = moves[:, :, None], x.shape[1:]
        rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
        i = rows + top - self.crop
        j = torch.where(flipped > 0, width - 1 - columns, columns) + left - self.crop
        inside = ((i >= 0) & (i < height))[:, None, :, None] & ((j >= 0) & (j < width))[:, None, None, :]
        plane = index[:, None] * channels + torch.arange(channels, device=x.device)
        line = plane[:, :, None] * height + i.clamp(0, height - 1)[:, None]
        pixel = line[:, :, :, None] * width + j.clamp(0, width - 1)[:, None, None]
        return self.plain(torch.where(inside, x.flatten()[pixel], 0))


def trimmed(x: Tensor) -> Tensor:
    """Token ids without the columns in which all texts of the batch are over, but for as many as a filter sees at once:
    a window of padding alone has its say in a maximum over time, as it has with more of them.
    """
    words = (x != 0).any(0).nonzero()
    longest = int(words[-1]) + 1 if len(words) else 0
    return x[:, : longest + WINDOW]


@functools.cache  # on a GPU, a copy of constants in every step would wait for it
def _normalisation(
    mean: tuple[float, ...], std: tuple[float, ...], size: torch.Size, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Offset and scale of every pixel of an image: spreading a value per channel takes three times as long."""
    m, s = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]
    offset, scale = (value.expand(-1, *size).contiguous().to(device) for value in (-m / s, 1 / (255 * s)))
    return offset, scale


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
