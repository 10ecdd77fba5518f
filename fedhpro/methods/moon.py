"""Model-Contrastive Federated Learning (MOON, CVPR 2021): features near the global model's, away from one's own last.

The original classifies on top of a projection head and has mu = 5 (CIFAR-10) or 1; here the representation is the
feature z itself, so that all methods share one architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Client, Method, Net, NonNegative, Positive, Tensors


@dataclass(frozen=True)
class Moon(Method):
    """Model-Contrastive Federated Learning (MOON, CVPR 2021)."""

    name = "moon"
    frozen = ("received", "previous")  # both in eval mode and without gradients

    mu: NonNegative = 1.0  # weight of the contrastive term (original: 5, 1, 1 for CIFAR-10, CIFAR-100, TinyImageNet)
    temperature: Positive = 0.5  # as the original; the FedHPro paper gives none

    def prepare(self, client: Client) -> Tensors:
        first = not client.memory
        return client.received | {"has_previous": torch.tensor(not first, device=client.counts.device)}

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        z = net.features(x)
        with torch.no_grad():
            z_global, z_previous = frozen["received"].features(x), frozen["previous"].features(x)
        positive = F.cosine_similarity(z, z_global)
        negative = F.cosine_similarity(z, z_previous)
        # a client that takes part for the first time has no negative: its term is log 1 = 0
        negative = torch.where(context["has_previous"], negative, -torch.inf)
        logits = torch.stack([positive, negative], dim=1) / self.temperature
        contrast = F.cross_entropy(logits, torch.zeros_like(y))
        return {"ce": F.cross_entropy(net.classify(z), y), "contrast": self.mu * contrast}

    def remember(self, client: Client, report: Tensors) -> Tensors:
        """The model after local training."""
        state = client.net.state_dict()
        return {f"previous/{name}": value for name, value in state.items() if value.is_floating_point()}
