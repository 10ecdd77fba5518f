"""What crosses between server and client: named tensors. Their schema, the check of an upload, bytes, and the mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .methods.base import Tensors

Schema = dict[str, tuple[tuple[int, ...], torch.dtype]]
LARGEST = 1e12  # of an upload's numbers: squares of them, and sums of squares over a model, stay finite in float32


def schema_of(tensors: Tensors) -> Schema:
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def num_bytes(tensors: Tensors) -> int:
    return sum(value.numel() * value.element_size() for value in tensors.values())


def problem(upload: Tensors, schema: Schema, samples: int | None = None, counts_all: bool = True) -> str | None:
    """Why an upload cannot be used, in one sentence, or None. Hostile until checked: nothing is assumed of it.

    samples: how many the client is known to have. Its counts by class sum up to them, or, where a method counts only
    some, to no more.
    """
    if (reason := misfit(upload, schema)) is not None:
        return reason
    floats = {name: value for name, value in upload.items() if value.is_floating_point()}
    if (name := _first(floats, lambda value: ~(value.abs() <= LARGEST))) is not None:
        finite = bool(upload[name].isfinite().all())
        return f"{name} has values {f'beyond {LARGEST:g}' if finite else 'that are not finite'}"
    counts = {name: v for name, v in upload.items() if name not in floats or name.endswith("running_var")}
    if (name := _first(counts, lambda value: value < 0)) is not None:
        return f"{name} has negative values"
    held = int(upload["samples"])
    if held < 1:
        return "it has no samples"
    if samples is not None and held != samples:
        return f"it says that it has {held} samples, and is known to have {samples}"
    for name in (name for name in counts if name.endswith("counts")):
        total = int(upload[name].sum())
        if bool((upload[name] > held).any()):  # also where the sum of huge ones wrapped around
            return f"{name} has more than the {held} samples of the client"
        if total > held or (counts_all and total < held):
            return f"{name} sums up to {total}, and the client has {held} samples"
    return None


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
        if value.layout != torch.strided or value.is_nested or value.device.type not in ("cpu", "cuda"):
            return f"{name} is not a dense tensor in memory"
        if tuple(value.shape) != shape:
            return f"{name} has shape {list(value.shape)} instead of {list(shape)}"
        if value.dtype != dtype:
            return f"{name} has type {_short(value.dtype)} instead of {_short(dtype)}"
    return None


def non_negative(model: Tensors) -> Tensors:
    """With BatchNorm's variances cut at 0, where something added to them made them negative."""
    return {name: value.clamp_min(0) if name.endswith("running_var") else value for name, value in model.items()}


COMPRESSED = {"fp16": torch.float16, "bf16": torch.bfloat16}


def compress(upload: Tensors, kind: str | None) -> Tensors:
    """The model's numbers in half their bytes; what the method reports stays as it is."""
    if kind is None:
        return upload
    return {
        name: value.to(COMPRESSED[kind]) if name.startswith("model/") and value.is_floating_point() else value
        for name, value in upload.items()
    }


def expand(upload: Tensors, kind: str | None, schema: Schema) -> Tensors:
    """The upload as the schema has it. What is not compressed as agreed stays as it is, for `problem` to find."""
    if kind is None:
        return upload
    return {
        name: value.to(schema[name][1])
        if name.startswith("model/") and name in schema and value.dtype == COMPRESSED[kind]
        else value
        for name, value in upload.items()
    }


class Mean:
    """The weighted mean of uploads (Eq 1), folded in one at a time, in float64 so that their number does not matter."""

    def __init__(self) -> None:
        self.shapes: dict[str, torch.Size] = {}
        self.total = torch.zeros(0)
        self.weight = 0.0

    def add(self, tensors: Tensors, weight: float) -> None:
        if not self.shapes:
            self.shapes = {name: value.shape for name, value in tensors.items()}
        if self.shapes:
            flat = torch.cat([tensors[name].reshape(-1) for name in self.shapes])  # one operation instead of many
            if self.weight == 0:
                self.total = torch.zeros_like(flat, dtype=torch.float64)
            self.total.add_(flat, alpha=weight)
        self.weight += weight

    def result(self) -> Tensors:
        """In main memory."""
        mean = (self.total / self.weight).to("cpu", torch.float32)
        parts = mean.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


def _first(tensors: Tensors, bad: Callable[[Tensor], Tensor]) -> str | None:
    """The name of the first tensor with a bad value. All of a device and type are asked at once: usually none has."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in tensors.values():
        groups.setdefault((value.device, value.dtype), []).append(value.reshape(-1))
    if not any(bool(bad(torch.cat(group)).any()) for group in groups.values()):
        return None
    return next(name for name, value in tensors.items() if bool(bad(value).any()))


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
