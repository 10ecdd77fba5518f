"""Federated Optimization in Heterogeneous Networks (FedProx, MLSys 2020): cross-entropy, and a pull to the start.

The original tunes mu per dataset in {0.001, 0.01, 0.1, 1} and trains without momentum; its random partial work of slow
clients is not part of this comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Method, Net, NonNegative, Tensors


@dataclass(frozen=True)
class FedProx(Method):
    """Federated Optimization in Heterogeneous Networks (FedProx, MLSys 2020)."""

    name = "fedprox"
    frozen = ("received",)

    mu: NonNegative = 0.01  # weight of the proximal term, mu / 2 |w - w_received|^2 (original: 0.001 to 1 by dataset)

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        terms = super().loss(net, frozen, x, y, context)
        # parameters only: BatchNorm's running statistics are not trained
        pairs = zip(net.parameters(), frozen["received"].parameters(), strict=True)
        distances = [((w - start) ** 2).sum() for w, start in pairs]
        return terms | {"prox": self.mu / 2 * torch.stack(distances).sum()}
