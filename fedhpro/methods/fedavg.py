"""FedAvg and its two bounds: all samples in one place, and every client alone.

FedAvg is the base class with nothing changed: cross-entropy at the clients, a weighted mean at the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Communication-Efficient Learning of Deep Networks from Decentralized Data (FedAvg, AISTATS 2017)."""

    name = "fedavg"
    exchanges: ClassVar[tuple[str, ...]] = ("model", "classifier")


@dataclass(frozen=True)
class Centralised(Method):
    """The upper reference: one model trained on the samples of all clients together."""

    name = "centralised"
    exchanges = ("model",)
    pools_data = True


@dataclass(frozen=True)
class Local(Method):
    """The lower reference: every client trains alone, and its model is tested on its own domain."""

    name = "local"
    exchanges = ("nothing",)
