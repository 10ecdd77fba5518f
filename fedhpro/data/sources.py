"""Where samples come from: a source is a few named domains, each cut once into train, validation and test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .text import Tokenizer

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Split:
    x: Tensor  # images: uint8 [n, channels, height, width]; texts: int64 token ids [n, length], padded with 0
    y: Tensor  # int64 [n], from 0

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device) -> Split:
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Domain:
    name: str
    train: Split
    validation: Split
    test: Split
    real: bool  # photographed, scanned or written by people, as opposed to rendered here
    about: str  # one line: what the samples are and where they come from


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
    complete: bool = False  # in scenario "domains", every client gets at least one sample of each class
    vocab: int | None = None  # texts: number of token ids; None: images
    tokenizer: Tokenizer | None = None  # texts: what turned words into ids

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.domains[0].train.x.shape[1:])


# keys whose defaults are made for digits-lite and do not fit other data
_TEXT = {"model": "textcnn", "optimizer": "adam", "lr": 0.01, "batch_size": 64, "scenario": "ag-nid", "clients": 10}
DEFAULTS: dict[str, dict[str, Any]] = {"docs-lite": _TEXT, "ag-news": _TEXT}


def load(name: str) -> Source:
    """The source of that name, built or read from the cache."""
    return SOURCES[name]()


def _digits_lite() -> Source:
    from . import digits_lite

    return digits_lite.load()


def _docs_lite() -> Source:
    from . import text

    return text.load_docs_lite()


def _ag_news() -> Source:
    from . import text

    return text.load_ag_news()


def _digits() -> Source:
    from . import archives

    return archives.digits()


def _office_caltech() -> Source:
    from . import archives

    return archives.office_caltech()


SOURCES: dict[str, Callable[[], Source]] = {
    "digits-lite": _digits_lite,
    "digits": _digits,
    "office-caltech": _office_caltech,
    "docs-lite": _docs_lite,
    "ag-news": _ag_news,
}
