"""AutoAugment (Cubuk et al., CVPR 2019): each image gets one of 25 pairs of operations, at random.

Images are batches of bytes on any device, and every operation counts in whole numbers: what comes out is the same on
CPU and GPU. Pixels that come in from outside are black, as in the random crop.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

PolicyName = Literal["cifar", "imagenet"]
Step = tuple[str, float, int]  # operation, probability, level 0..9

# The paper's appendix. Ten levels span an operation's range; some operations have none and ignore it.
POLICIES: dict[PolicyName, tuple[tuple[Step, Step], ...]] = {
    "cifar": (
        (("invert", 0.1, 7), ("contrast", 0.2, 6)),
        (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
        (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
        (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
        (("autocontrast", 0.5, 8), ("equalize", 0.9, 2)),
        (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
        (("color", 0.4, 3), ("brightness", 0.6, 7)),
        (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
        (("equalize", 0.6, 5), ("equalize", 0.5, 1)),
        (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
        (("color", 0.7, 7), ("translate_x", 0.5, 8)),
        (("equalize", 0.3, 7), ("autocontrast", 0.4, 8)),
        (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
        (("brightness", 0.9, 6), ("color", 0.2, 8)),
        (("solarize", 0.5, 2), ("invert", 0.0, 3)),
        (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
        (("equalize", 0.2, 8), ("equalize", 0.6, 4)),
        (("color", 0.9, 9), ("equalize", 0.6, 6)),
        (("autocontrast", 0.8, 4), ("solarize", 0.2, 8)),
        (("brightness", 0.1, 3), ("color", 0.7, 0)),
        (("solarize", 0.4, 5), ("autocontrast", 0.9, 3)),
        (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
        (("autocontrast", 0.9, 2), ("solarize", 0.8, 3)),
        (("equalize", 0.8, 8), ("invert", 0.1, 3)),
        (("translate_y", 0.7, 9), ("autocontrast", 0.9, 1)),
    ),
    "imagenet": (
        (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
        (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
        (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
        (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
        (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
        (("equalize", 0.4, 4), ("rotate", 0.8, 8)),
        (("solarize", 0.6, 3), ("equalize", 0.6, 7)),
        (("posterize", 0.8, 5), ("equalize", 1.0, 2)),
        (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
        (("equalize", 0.6, 8), ("posterize", 0.4, 6)),
        (("rotate", 0.8, 8), ("color", 0.4, 0)),
        (("rotate", 0.4, 9), ("equalize", 0.6, 2)),
        (("equalize", 0.0, 7), ("equalize", 0.8, 8)),
        (("invert", 0.6, 4), ("equalize", 1.0, 8)),
        (("color", 0.6, 4), ("contrast", 1.0, 8)),
        (("rotate", 0.8, 8), ("color", 1.0, 2)),
        (("color", 0.8, 8), ("solarize", 0.8, 7)),
        (("sharpness", 0.4, 7), ("invert", 0.6, 8)),
        (("shear_x", 0.6, 5), ("equalize", 1.0, 9)),
        (("color", 0.4, 0), ("equalize", 0.6, 3)),
        (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
        (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
        (("invert", 0.6, 4), ("equalize", 1.0, 8)),
        (("color", 0.6, 4), ("contrast", 1.0, 8)),
        (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
    ),
}


def autoaugment(images: Tensor, policy: PolicyName, rng: torch.Generator) -> Tensor:
    """uint8 [n, channels, h, w] -> the same, new; what happens to an image depends on `rng`, which lives on the CPU."""
    chosen = torch.randint(len(POLICIES[policy]), (len(images),), generator=rng).tolist()
    chances = torch.rand(2, len(images), generator=rng).tolist()
    signs = (2 * torch.randint(2, (2, len(images)), generator=rng) - 1).tolist()
    images = images.clone()
    for step in range(2):
        groups: dict[str, list[tuple[int, int]]] = defaultdict(list)  # operation -> (image, level with its sign)
        for i, pair in enumerate(chosen):
            name, probability, level = POLICIES[policy][pair][step]
            if chances[step][i] < probability:
                groups[name].append((i, signs[step][i] * level))
        for name, members in groups.items():
            rows = torch.tensor([i for i, _ in members], device=images.device)
            chosen_images = images.index_select(0, rows)
            images.index_copy_(0, rows, OPERATIONS[name](chosen_images, [level for _, level in members]))
    return images


# --- operations: bytes [n, c, h, w] and n levels from -9 to 9 -> bytes [n, c, h, w] ------------------------------

Operation = Callable[[Tensor, list[int]], Tensor]


def _each(levels: list[int], x: Tensor) -> Tensor:
    return torch.tensor(levels, dtype=torch.int32, device=x.device)[:, None, None, None]


def _bytes(x: Tensor) -> Tensor:
    return x.clamp(0, 255).to(torch.uint8)


def _blend(plain: Tensor, x: Tensor, levels: list[int]) -> Tensor:
    """From `plain` (factor 0) through x (1) and beyond; the factor is 1 + level / 10."""
    return _bytes((10 * plain + (10 + _each(levels, x)) * (x.int() - plain)).div(10, rounding_mode="floor"))


def _brightness(x: Tensor, levels: list[int]) -> Tensor:
    return _blend(torch.zeros_like(x, dtype=torch.int32), x, levels)


def _color(x: Tensor, levels: list[int]) -> Tensor:
    return _blend(_grey(x), x, levels)


def _contrast(x: Tensor, levels: list[int]) -> Tensor:
    pixels = x.shape[2] * x.shape[3]
    mean = (2 * _grey(x).sum((2, 3), keepdim=True) + pixels) // (2 * pixels)
    return _blend(mean.int(), x, levels)


def _sharpness(x: Tensor, levels: list[int]) -> Tensor:
    smooth = x.int()
    if min(x.shape[2:]) > 2:  # the border has no neighbours and stays
        three = smooth[:, :, :-2] + smooth[:, :, 1:-1] + smooth[:, :, 2:]
        nine = three[..., :-2] + three[..., 1:-1] + three[..., 2:]
        smooth[:, :, 1:-1, 1:-1] = (2 * (nine + 4 * smooth[:, :, 1:-1, 1:-1]) + 13) // 26
    return _blend(smooth, x, levels)


def _grey(x: Tensor) -> Tensor:
    """Brightness [n, 1, h, w] by ITU-R 601-2; images with other than three channels have their mean."""
    if x.shape[1] != 3:
        return x.sum(1, keepdim=True, dtype=torch.int32) // x.shape[1]
    red, green, blue = x.int().split(1, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


def _invert(x: Tensor, levels: list[int]) -> Tensor:
    return 255 - x


def _solarize(x: Tensor, levels: list[int]) -> Tensor:
    """Inverts what is at least as bright as a threshold, from 255 (level 0) to 0 (level 9)."""
    return torch.where(9 * x.int() >= 255 * (9 - _each(levels, x).abs()), 255 - x, x)


def _posterize(x: Tensor, levels: list[int]) -> Tensor:
    """Keeps the upper 8 (level 0) to 4 (level 9) bits."""
    dropped = (8 * _each(levels, x).abs() + 9) // 18  # 4 / 9 of the level, rounded
    return (x.int() >> dropped << dropped).to(torch.uint8)


def _autocontrast(x: Tensor, levels: list[int]) -> Tensor:
    """Stretches each channel to the full range; one of a single value stays."""
    low, high = x.int().amin((2, 3), keepdim=True), x.int().amax((2, 3), keepdim=True)
    stretched = 255 * (x.int() - low) // (high - low).clamp(min=1)
    return torch.where(high > low, stretched.to(torch.uint8), x)


def _equalize(x: Tensor, levels: list[int]) -> Tensor:
    """Flattens the histogram of each channel."""
    flat = x.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=x.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    brightest = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - brightest) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)
    return torch.where(step[..., None] > 0, _bytes(table.gather(2, flat)).view_as(x), x)


Matrix = tuple[float, float, float, float, float, float]


def _warp(matrix: Callable[[int, int, int], Matrix]) -> Operation:
    """The operation that takes pixel (x, y) from (a x + b y + c, d x + e y + f), with (a, ..., f) by level and size."""

    def warped(x: Tensor, levels: list[int]) -> Tensor:
        height, width = x.shape[2:]
        fixed = [_fixed(*matrix(level, height, width)) for level in levels]
        a, b, c, d, e, f = torch.tensor(fixed, dtype=torch.int32, device=x.device).T[:, :, None, None]
        across, down = torch.arange(width, device=x.device), torch.arange(height, device=x.device)[:, None]
        column, row = (a * across + b * down + c) >> 16, (d * across + e * down + f) >> 16
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        source = torch.where(inside, row * width + column, 0).flatten(1)[:, None].expand(-1, x.shape[1], -1)
        return torch.where(inside[:, None], x.flatten(2).gather(2, source).view_as(x), 0)

    return warped


def _fixed(a: float, b: float, c: float, d: float, e: float, f: float) -> list[int]:
    """In 65536ths, for indices of pixels, whose middles are at halves."""
    return [math.floor(65536 * v + 0.5) for v in (a, b, c + (a + b) / 2, d, e, f + (d + e) / 2)]


def _rotation(level: int, height: int, width: int) -> Matrix:
    cos, sin = math.cos(math.radians(30 * level / 9)), math.sin(math.radians(30 * level / 9))
    x, y = width / 2, height / 2
    return cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y


def _shift(level: int, side: int) -> int:
    return int(150 / 331 * side * level / 9)  # the paper's 150 pixels are of 331


OPERATIONS: dict[str, Operation] = {
    "autocontrast": _autocontrast,
    "brightness": _brightness,
    "color": _color,
    "contrast": _contrast,
    "equalize": _equalize,
    "invert": _invert,
    "posterize": _posterize,
    "rotate": _warp(_rotation),
    "sharpness": _sharpness,
    "shear_x": _warp(lambda level, height, width: (1, 0.3 * level / 9, 0, 0, 1, 0)),
    "shear_y": _warp(lambda level, height, width: (1, 0, 0, 0.3 * level / 9, 1, 0)),
    "solarize": _solarize,
    "translate_x": _warp(lambda level, height, width: (1, 0, _shift(level, width), 0, 1, 0)),
    "translate_y": _warp(lambda level, height, width: (1, 0, 0, 0, 1, _shift(level, height))),
}
