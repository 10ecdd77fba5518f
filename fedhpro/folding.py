"""From the valid uploads of a round to what a method aggregates: the mean model, and the reports side by side.

The mean of Eq 1 takes uploads one at a time and keeps none of them. Other ways to fold (robust, private) have the
same three members; they may hand on one report that stands for all, [1, ...], which every method takes as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from . import wire
from .methods.base import Tensors


class Fold(Protocol):
    @property
    def count(self) -> int:
        """Uploads so far."""
        ...

    def add(self, client: int, model: Tensors, report: Tensors) -> None:
        """An upload that was checked. The report is decoded, and has "samples" in it."""
        ...

    @property
    def note(self) -> Mapping[str, Any]:
        """After the result: what the round's record has to say of it."""
        ...

    def result(self) -> tuple[Tensors, Tensors]:
        """The model, and the reports stacked over uploads [K, ...]."""
        ...


class WeightedMean:
    """Eq 1."""

    note: Mapping[str, Any] = {}

    def __init__(self, most: int, by_samples: bool = True) -> None:
        self.by_samples = by_samples
        self.average, self.reports = wire.Mean(), wire.Stack(most)

    @property
    def count(self) -> int:
        return self.reports.count

    def add(self, client: int, model: Tensors, report: Tensors) -> None:
        self.average.add(model, float(report["samples"]) if self.by_samples else 1.0)
        self.reports.add(report)

    def result(self) -> tuple[Tensors, Tensors]:
        return self.average.result(), self.reports.result()
