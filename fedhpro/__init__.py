"""Federated learning with hyper-prototypes: the FedHPro paper's method, its rivals and its scenarios."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .equations import (
    class_gradients,
    class_means,
    client_margin,
    global_prototypes,
    hpal,
    hpcl,
    hyper_gradients,
    match,
    matching_loss,
    mean_gradients,
    similarity,
)
from .version import __version__

if TYPE_CHECKING:
    from .config import Config, configure
    from .errors import ConfigError
    from .runs import Result, resume, run

__all__ = [
    "Config",
    "ConfigError",
    "Result",
    "__version__",
    "class_gradients",
    "class_means",
    "client_margin",
    "configure",
    "global_prototypes",
    "hpal",
    "hpcl",
    "hyper_gradients",
    "match",
    "matching_loss",
    "mean_gradients",
    "resume",
    "run",
    "similarity",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """What needs more than torch is imported when it is first used: a federation's client needs none of it."""
    if name in ("Config", "ConfigError", "configure"):
        from . import config

        return getattr(config, name)
    if name in ("Result", "resume", "run"):
        from . import runs

        return getattr(runs, name)
    raise AttributeError(f"module 'fedhpro' has no attribute {name!r}")
