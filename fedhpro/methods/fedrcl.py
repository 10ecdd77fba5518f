"""Relaxed Contrastive Learning for Federated Learning (FedRCL, CVPR 2024): contrast in the batch, at five depths.

Per anchor, as the authors' code runs it: the positive is the least similar sample of its class (itself when alone), the
negatives are the two most similar of other classes; and a same-class pair that is already too similar is pushed apart.
The original trains with SGD lr 0.1 x 0.998^round, momentum 0, weight decay 1e-3, clipping at 10, equal client weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Method, Net, NonNegative, Positive, Tensors


@dataclass(frozen=True)
class FedRCL(Method):
    """Relaxed Contrastive Learning for Federated Learning (FedRCL, CVPR 2024)."""

    name = "fedrcl"

    tau: Positive = 0.05  # temperature (original: 0.05)
    beta: NonNegative = 1.0  # weight of the divergence penalty (original: 1)
    threshold: float = 0.7  # similarity from which a same-class pair is pushed apart (original: 0.7)

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        stages, z = net.stages_and_features(x)
        return {"ce": F.cross_entropy(net.classify(z), y)} | self.contrasts(stages, y)

    def contrasts(self, stages: list[Tensor], y: Tensor) -> Tensors:
        """Supervised contrastive loss and divergence penalty, means over the depths and the batch."""
        units = [F.normalize(stage, dim=1) for stage in stages]
        s = torch.stack([unit @ unit.T for unit in units])  # [depths, n, n]
        same = y[:, None] == y
        others = same & ~torch.eye(len(y), dtype=torch.bool, device=y.device)

        positive = s.masked_fill(~same, torch.inf).amin(2)
        negatives = s.masked_fill(same, -torch.inf).topk(min(2, len(y) - 1)).values  # -inf: no such sample
        logits = torch.cat([positive[:, :, None], negatives], 2).flatten(0, 1) / self.tau
        contrast = F.cross_entropy(logits, torch.zeros_like(y).repeat(len(s)))

        closest = s.masked_fill(~others, torch.inf).amin(2)
        too_similar = (closest >= self.threshold) & closest.isfinite()
        closest = torch.where(too_similar, closest, -1.0)  # -1: as far as can be, a negligible term
        penalty = F.softplus((closest - 1) / self.tau).mean()  # the anchor itself, at similarity 1, is the positive
        return {"contrast": contrast, "penalty": self.beta * penalty}
