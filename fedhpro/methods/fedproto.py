"""FedProto: Federated Prototype Learning across Heterogeneous Clients (AAAI 2022): features near global class means.

The original has lambda = 1 with MSE averaged over d, momentum 0.5, batch 4, E = 1, and takes the means from the
augmented, training-mode features of the last epoch; here they come from one eval-mode pass after training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from .base import Net, NonNegative, Tensors
from .prototypes import PrototypeMethod, pull


@dataclass(frozen=True)
class FedProto(PrototypeMethod):
    """FedProto: Federated Prototype Learning across Heterogeneous Clients (AAAI 2022)."""

    name = "fedproto"

    lam: NonNegative = 1.0  # weight of the pull to the global prototype (original: 1)

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        z = net.features(x)
        proto = self.lam * pull(z, y, context["P"], context["present"])
        return {"ce": F.cross_entropy(net.classify(z), y), "proto": proto}
