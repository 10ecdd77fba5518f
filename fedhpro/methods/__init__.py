"""The methods by name. A new method is one new file here: a frozen dataclass that extends Method and has a name."""

from __future__ import annotations

import importlib
import pkgutil

from .base import METHODS, Method, Tensors

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["METHODS", "Method", "Tensors"]
