"""FedAvg and its two bounds: all samples in one place, and every client alone.

FedAvg is the base class with nothing changed: cross-entropy at the clients, a weighted mean at the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from .base import Client, Method, Net, Tensors


@dataclass(frozen=True)
class FedAvg(Method):
    """Communication-Efficient Learning of Deep Networks from Decentralized Data (FedAvg, AISTATS 2017)."""

    name = "fedavg"
    exchanges: ClassVar[tuple[str, ...]] = ("model", "classifier")

    balanced: bool = False  # for label skew: cross-entropy knows how frequent each class is at the client

    def prepare(self, client: Client) -> Tensors:
        prior = (client.counts / client.counts.sum()).log()  # -inf for a class that it lacks, which softmax takes as 0
        return super().prepare(client) | ({"prior": prior} if self.balanced else {})

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        return {"ce": F.cross_entropy(net(x) + context["prior"] if self.balanced else net(x), y)}


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
