"""Where samples come from: a source is a few named domains, each cut once into train, validation and test."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import DataError
from ..randomness import numpy_generator
from . import splits
from .catalog import CATALOG, IMAGENET_MEAN, IMAGENET_STD, RENDERED, TEXTS, Dataset, Part, canonical

if TYPE_CHECKING:
    from .ingest import Track
    from .store import Stored
    from .text import Tokenizer


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
    groups: Tensor | None = None  # of the training samples: those of one number (of one lesion) belong together


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
    # share of train that `with_validation` holds apart; 0: the source has a validation part of its own
    validation_share: float = 0.0

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.domains[0].train.x.shape[1:])


def load(name: str) -> Source:
    """The source of that name: built, or read from what FEDHPRO_DATA or the cache holds, or your own files."""
    from .own import open_own

    if name.startswith("python:"):
        raise DataError(f"{name} was handed over in Python: hand it over again, as in resume(folder, source=source)")
    if name == SITES:
        raise DataError("data=sites: the samples are at the sites of a deployment, and not here")
    return open_own(name) or SOURCES[canonical(name)]()


def with_validation(source: Source) -> Source:
    """The source with a part of train held apart to choose settings on: always the same one, the same share of each
    class, no group in both. What clients train on shrinks by it.
    """
    if not source.validation_share:
        return source
    return dataclasses.replace(source, domains=tuple(_hold_apart(domain, source) for domain in source.domains))


def _hold_apart(domain: Domain, source: Source) -> Domain:
    count = round(source.validation_share * len(domain.train))
    rng = numpy_generator(0, "validation", source.name, domain.name)
    groups = None if domain.groups is None else domain.groups.numpy()
    kept, held = map(torch.from_numpy, splits.carve(domain.train.y.numpy(), count, rng, groups))
    train, validation = (Split(domain.train.x[rows], domain.train.y[rows]) for rows in (kept, held))
    return dataclasses.replace(
        domain, train=train, validation=validation, groups=None if domain.groups is None else domain.groups[kept]
    )


# --- embedded ---


def _digits_lite() -> Source:
    from . import digits_lite

    return digits_lite.load()


def _docs_lite() -> Source:
    from . import text

    return text.load_docs_lite()


# --- of the catalog ---


def stored(dataset: Dataset, track: Track | None = None) -> Stored | None:
    """The dataset where it is at hand: what FEDHPRO_DATA holds comes first, then what was fetched or imported."""
    from . import ingest, store

    found = ingest.mirror(dataset, track or ingest.silently)
    folder = store.folder_of(dataset.name)
    return found if found is not None or not store.is_there(folder) else store.read(folder)


def how_to_get(dataset: Dataset) -> str:
    get = f"`fedhpro data get {dataset.name}`, or " if dataset.fetched else ""
    return f"{dataset.title} is not in the cache: run {get}`fedhpro data import {dataset.name} PATH` with your files"


def _of_catalog(name: str) -> Source:
    dataset = CATALOG[name]
    found = stored(dataset)
    if found is None:
        raise DataError(how_to_get(dataset))
    tokenizer = _tokenizer(found) if dataset.kind == "text" else None
    domains = tuple(_domain(found, part) if part.name in found.domains else _rendered() for part in dataset.parts)
    return Source(
        name,
        domains,
        found.classes,
        {domain.name: _share(part, domain) for part, domain in zip(dataset.parts, domains, strict=True)},
        mean=dataset.mean,
        std=dataset.std,
        crop=dataset.crop,
        flip=dataset.flip,
        complete=dataset.complete,
        vocab=None if tokenizer is None else len(tokenizer),
        tokenizer=tokenizer,
        validation_share=dataset.validation_share,
    )


def _domain(found: Stored, part: Part) -> Domain:
    train, test = (_split(found, f"{part.name}.{split}") for split in ("train", "test"))
    groups = f"{part.name}.train.groups"
    return Domain(
        part.name,
        train,
        Split(train.x[:0], train.y[:0]),
        test,
        real=part.name != "syn",
        about=part.about,
        groups=torch.from_numpy(found.array(groups)) if found.has(groups) else None,
    )


def _split(found: Stored, name: str) -> Split:
    x = torch.from_numpy(found.array(f"{name}.x"))
    return Split(x if x.dtype == torch.uint8 else x.to(torch.int64), torch.from_numpy(found.array(f"{name}.y")))


def _rendered() -> Domain:
    """SYN where no copy is given, as digits-lite renders it."""
    syn = next(domain for domain in _digits_lite().domains if domain.name == "syn")
    nothing = Split(syn.train.x[:0], syn.train.y[:0])
    about = "SYN*: rendered here, a substitute for Synthetic Digits"
    return dataclasses.replace(syn, name=RENDERED, validation=nothing, about=about)


def _share(part: Part, domain: Domain) -> tuple[int, int]:
    if domain.name == RENDERED:
        return part.clients, len(domain.train) // 10  # 100: 1 % of the 10,000 that it stands for
    return part.clients, part.samples if isinstance(part.samples, int) else int(part.samples * len(domain.train))


def _tokenizer(found: Stored) -> Tokenizer:
    from .text import Tokenizer

    return Tokenizer.from_json(found.text("tokenizer.json"))


SITES = "sites"  # data that nobody here has: each site of a deployment has its own (data/sites.py)
SOURCES: dict[str, Callable[[], Source]] = {"digits-lite": _digits_lite, "docs-lite": _docs_lite}
SOURCES |= {name: functools.partial(_of_catalog, name) for name in CATALOG}
# keys whose defaults are made for digits-lite and do not fit other data
DEFAULTS: dict[str, dict[str, Any]] = {"docs-lite": dict(TEXTS)}
DEFAULTS |= {name: dict(dataset.defaults) for name, dataset in CATALOG.items()}
DEFAULTS[SITES] = {"engine": "flower", "evaluation": "federated"}
