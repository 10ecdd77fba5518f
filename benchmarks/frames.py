"""What else fixed anchors could do: be the classifier, and stand beside the contrast of FedRCL. One switch each.

    python benchmarks/matrix.py results/frames.json OUT --parallel 2

knows the method `frames`. With the defaults it is FedHPro as printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhpro.methods.base import Client, Net, NonNegative, Positive, Tensors
from fedhpro.methods.fedhpro_variants import FedHProVariants
from fedhpro.methods.fedrcl import FedRCL


@dataclass(frozen=True)
class Frames(FedHProVariants):
    name = "frames"

    classifier: Literal["trained", "anchors"] = "trained"  # "anchors": h* is the unit vectors H, and nobody trains it
    relaxed: NonNegative = 0.0  # weight of FedRCL's contrast and penalty
    hpal_weight: NonNegative = 1.0
    mixed: bool = False  # HPAL of a client weighs as much as its labels are mixed: 1 if evenly, 0 for a single class
    mixed_contrast: bool = False  # FedRCL's terms too
    mixed_power: Positive = 1.0
    hpcl_weight: NonNegative = 1.0

    def prepare(self, client: Client) -> Tensors:
        p = client.counts / client.counts.sum()
        effective = torch.special.entr(p).sum().exp()
        return super().prepare(client) | {"mixed": ((effective - 1) / (len(p) - 1)) ** self.mixed_power}

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        if self.relaxed:
            stages, z = net.stages_and_features(x)
        else:
            z = net.features(x)
        logits = (
            F.linear(z, F.normalize(context["S"].mean(1), dim=1)) if self.classifier == "anchors" else net.classify(z)
        )
        terms = {"ce": F.cross_entropy(logits, y)}
        if self.hpcl != "off":
            terms["hpcl"] = self.hpcl_weight * self.contrast(z, y, context)
        if self.hpal != "off":
            terms["hpal"] = self.hpal_weight * self.align(z, y, context)
            if self.mixed:
                terms["hpal"] = context["mixed"] * terms["hpal"]
        if self.relaxed:
            rcl = FedRCL()
            contrasts, penalties = zip(*(rcl.contrast(stage, y) for stage in stages), strict=True)
            terms["relaxed"] = self.relaxed * (torch.stack(contrasts).mean() + torch.stack(penalties).mean())
            if self.mixed_contrast:
                terms["relaxed"] = context["mixed"] * terms["relaxed"]
        return terms

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        state, override = super().aggregate(state, model, reports, rng)
        if self.classifier == "anchors":
            W = F.normalize(state["S"].mean(1), dim=1)
            override = override | {"classifier.weight": W, "classifier.bias": torch.zeros(len(W))}
        return state, override
