"""Where samples come from: a source is a few named domains, each cut once into train, validation and test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Split:
    x: Tensor  # uint8 [n, channels, height, width]
    y: Tensor  # int64 [n], from 0

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Domain:
    name: str
    train: Split
    validation: Split
    test: Split
    real: bool  # photographed or scanned, as opposed to rendered here
    about: str  # one line: what the images are and where they come from


@dataclass(frozen=True)
class Source:
    name: str
    domains: tuple[Domain, ...]
    classes: tuple[str, ...]
    # the source's own federation for scenario "domains": domain -> (clients, training samples of each)
    allocation: dict[str, tuple[int, int]]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    crop: int = 4  # training images are padded by this much and cropped at random
    flip: bool = False  # digits are not flipped
    vocab: int | None = None  # texts: number of token ids; None: images

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.domains[0].train.x.shape[1:])


def load(name: str) -> Source:
    """The source of that name, built or read from the cache."""
    return SOURCES[name]()


def _digits_lite() -> Source:
    from . import digits_lite

    return digits_lite.load()


SOURCES: dict[str, Callable[[], Source]] = {"digits-lite": _digits_lite}
