"""Data that stays with the sites of a deployment: what the server knows of it, and how a site reads its own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, DataError
from .clients import ClientData
from .sources import SITES, Domain, Source, Split

if TYPE_CHECKING:
    from ..config import Config


class SiteError(DataError):
    """What is wrong at a site, in words that may leave it: no path, no sample."""


def outline(config: Config) -> Source:
    """The common form of the sites' samples, as the config has it; there are none in it."""
    classes = _names(config.classes)
    if len(classes) < 2 or len(set(classes)) < len(classes):
        raise ConfigError("data=sites: name all classes, each once, as in classes=benign,malignant")
    shape = config.channels, config.image_size, config.image_size
    nothing = Split(torch.empty(0, *shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    domain = Domain(SITES, nothing, nothing, nothing, real=True, about="each site's own")
    usual = Source(SITES, (domain,), classes, {}, crop=config.image_size // 8)
    mean = _numbers("pixel_mean", config.pixel_mean, config.channels, usual.mean)
    std = _numbers("pixel_std", config.pixel_std, config.channels, usual.std)
    if min(std) <= 0:
        raise ConfigError(f"pixel_std={config.pixel_std}: must be above 0")
    return Source(SITES, (domain,), classes, {}, mean, std, crop=usual.crop)


def unknown(config: Config, source: Source) -> list[ClientData]:
    """The clients as the server knows them before they have joined."""
    nothing = source.domains[0].train
    return [ClientData(SITES, nothing, nothing) for _ in range(config.clients)]


def site_data(node_config: Mapping[str, Any], config: Config) -> ClientData:
    """This site's samples, from what its own node config names: data="folder:PATH", "csv:PATH" or
    "python:package.module:function", whose result is (x, y), as for `from_tensors`, or a Source.

    A part for testing, given or cut off, is the site's held-out set.
    """
    from . import own

    spec, classes = str(node_config.get("data", "")), _names(config.classes)
    kind, _, rest = spec.partition(":")
    if kind in ("folder", "csv"):
        found = own.open_own(spec, size=config.image_size, partial=True)
    elif kind == "python":
        found = _call(rest)
        if not isinstance(found, Source):
            found = own.from_tensors(*found, classes=classes, partial=True)
    else:
        raise SiteError("this site names no data: start its SuperNode with --node-config 'data=\"folder:PATH\"'")
    assert found is not None
    wanted = config.channels, config.image_size, config.image_size
    if found.shape != wanted:
        raise SiteError(f"its images are {list(found.shape)} and those of this federation {list(wanted)}")
    if strange := [name for name in found.classes if name not in classes]:
        raise SiteError(f"it has a class {strange[0]!r} that this federation has not: {', '.join(classes)}")
    number = torch.tensor([classes.index(name) for name in found.classes])
    parts = {
        part: Split(
            torch.cat([getattr(domain, part).x for domain in found.domains]),
            number[torch.cat([getattr(domain, part).y for domain in found.domains])],
        )
        for part in ("train", "validation", "test")
    }
    train = Split(*(torch.cat([getattr(parts[p], xy) for p in ("train", "validation")]) for xy in ("x", "y")))
    return ClientData(SITES, train, parts["test"])


def _call(entry: str) -> Any:
    module, colon, function = entry.partition(":")
    if not colon:
        raise SiteError(f'data="python:{entry}" must name a module and a function: python:package.module:function')
    return getattr(importlib.import_module(module), function)()


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _numbers(key: str, text: str | None, count: int, usual: tuple[float, ...]) -> tuple[float, ...]:
    try:
        numbers = usual if text is None else tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"{key}={text}: must be numbers with commas between them") from None
    if len(numbers) != count:
        raise ConfigError(f"{key}={text or 'none'}: {len(numbers)} numbers for {count} channels")
    return numbers
