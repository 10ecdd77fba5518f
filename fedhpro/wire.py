"""What crosses between server and client: named tensors. Their schema, the check of an upload, bytes, and the mean."""

from __future__ import annotations

import torch
from torch import Tensor

from .methods.base import Tensors

Schema = dict[str, tuple[tuple[int, ...], torch.dtype]]


def schema_of(tensors: Tensors) -> Schema:
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def num_bytes(tensors: Tensors) -> int:
    return sum(value.numel() * value.element_size() for value in tensors.values())


def problem(upload: Tensors, schema: Schema) -> str | None:
    """Why an upload cannot be used, in one sentence, or None. Hostile until checked: nothing is assumed of it."""
    if (reason := misfit(upload, schema)) is not None:
        return reason
    for name, value in upload.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            return f"{name} has values that are not finite"
        if (not value.is_floating_point() or name.endswith("running_var")) and bool((value < 0).any()):
            return f"{name} has negative values"
    return "it has no samples" if int(upload["samples"]) < 1 else None


def misfit(upload: Tensors, schema: Schema) -> str | None:
    """What is wrong with names, shapes and types, or None."""
    if not isinstance(upload, dict):
        return f"it is a {type(upload).__name__}, not named tensors"
    if missing := sorted(schema.keys() - upload.keys()):
        return f"{missing[0]} is missing" + _and_more(missing)
    if unknown := sorted(upload.keys() - schema.keys(), key=str):
        return f"{unknown[0]!r} is not expected" + _and_more(unknown)
    for name, (shape, dtype) in schema.items():
        value = upload[name]
        if not isinstance(value, Tensor):
            return f"{name} is a {type(value).__name__}, not a tensor"
        if value.layout != torch.strided or value.is_nested or value.device.type != "cpu":
            return f"{name} is not a dense tensor in main memory"
        if tuple(value.shape) != shape:
            return f"{name} has shape {list(value.shape)} instead of {list(shape)}"
        if value.dtype != dtype:
            return f"{name} has type {_short(value.dtype)} instead of {_short(dtype)}"
    return None


class Mean:
    """The weighted mean of uploads (Eq 1), folded in one at a time, in float64 so that their number does not matter."""

    def __init__(self) -> None:
        self.total: Tensors = {}
        self.weight = 0.0

    def add(self, tensors: Tensors, weight: float) -> None:
        for name, value in tensors.items():
            if name not in self.total:
                self.total[name] = torch.zeros(value.shape, dtype=torch.float64)
            self.total[name].add_(value, alpha=weight)
        self.weight += weight

    def result(self) -> Tensors:
        return {name: (value / self.weight).to(torch.float32) for name, value in self.total.items()}


class Stack:
    """Named tensors of several uploads side by side [K, ...], copied once, each into its row."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.rows: Tensors = {}
        self.count = 0

    def add(self, tensors: Tensors) -> None:
        for name, value in tensors.items():
            if name not in self.rows:
                self.rows[name] = value.new_empty((self.most, *value.shape))
            self.rows[name][self.count] = value
        self.count += 1

    def result(self) -> Tensors:
        return {name: rows[: self.count] for name, rows in self.rows.items()}


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
