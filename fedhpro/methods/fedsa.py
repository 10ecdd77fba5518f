"""FedSA: A Unified Representation Learning via Semantic Anchors for Prototype-based Federated Learning (AAAI 2025).

Random anchors take the place of averaged prototypes; they drift to the averages by a moving mean that hardly moves. The
original has l_R = 10, l_M = 1, l_C = 1, lr 0.01, batch 10, E = 1, and a decay of 0.9999 that is not a setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor

from .base import Client, Net, NonNegative, Tensors
from .prototypes import PrototypeMethod


@dataclass(frozen=True)
class FedSA(PrototypeMethod):
    """FedSA: Unified Representation Learning via Semantic Anchors (AAAI 2025)."""

    name = "fedsa"

    lam_pull: NonNegative = 0.1  # lambda_1: features to their anchor (original: 10)
    lam_margin: NonNegative = 0.9  # lambda_2: margin-enhanced contrast with all anchors (original: 1)
    lam_classifier: NonNegative = 1.0  # lambda_3: the classifier on the anchors (original: 1)
    decay: Annotated[float, Interval(ge=0, le=1)] = 0.9999  # of the anchors' moving mean (original: 0.9999)

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        """Gaussian vectors through a random network that is then thrown away: non-negative, about half of them zero."""
        C, d = net.num_classes, net.dim
        A = torch.randn(C, d, generator=rng)
        for _ in range(2):
            weight = (2 * torch.rand(d, d, generator=rng) - 1) * d**-0.5
            bias = (2 * torch.rand(d, generator=rng) - 1) * d**-0.5
            A = F.relu(F.batch_norm(F.linear(A, weight, bias), None, None, training=True))
        return super().server_state(net, rng) | {"A": A}

    def broadcast(self, state: Tensors) -> Tensors:
        return super().broadcast(state) | {"A": state["A"]}

    def prepare(self, client: Client) -> Tensors:
        A = client.received["A"]
        gap = mean_nearest(A, torch.ones(len(A), dtype=torch.bool, device=A.device))
        if client.memory:  # its own prototypes of the last time it took part
            gap = torch.maximum(gap, mean_nearest(client.memory["means"], client.memory["counts"] > 0))
        return client.received | {"gap": gap}

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        z, A = net.features(x), context["A"]
        classes = torch.arange(len(A), device=y.device)
        return {
            "ce": F.cross_entropy(net.classify(z), y),
            "pull": self.lam_pull * F.mse_loss(z, A[y]),
            "margin": self.lam_margin * F.cross_entropy(-enlarged(z, y, A, context["gap"]), y),
            "classifier": self.lam_classifier * F.cross_entropy(net.classifier(A), classes),
        }

    def remember(self, client: Client, report: Tensors) -> Tensors:
        return {"means": report["means"], "counts": report["counts"]}

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        new, _ = super().aggregate(state, model, reports, rng)
        return new | {"A": self.anchors(state["A"], new["P"], (reports["counts"] > 0).any(0))}, {}

    def anchors(self, A: Tensor, P: Tensor, held: Tensor) -> Tensor:
        return torch.where(held[:, None], self.decay * A + (1 - self.decay) * P, A)


def enlarged(z: Tensor, y: Tensor, A: Tensor, gap: Tensor | float) -> Tensor:
    """Distances [n, C] to all anchors, the own one further by the gap, so that it has to be nearer by as much."""
    return ((z[:, None] - A) ** 2).sum(2).clamp_min(1e-12).sqrt() + gap * F.one_hot(y, len(A))


def mean_nearest(vectors: Tensor, present: Tensor) -> Tensor:
    """The mean, over the present classes, of the distance to the nearest other one; 0 where there is no other."""
    distances = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")
    other = present & ~torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
    nearest = distances.masked_fill(~other, torch.inf).amin(1)
    counted = present & nearest.isfinite()
    return torch.where(counted, nearest, 0.0).sum() / counted.sum().clamp_min(1)
