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

from fedhpro.methods.base import Client, Net, NonNegative, Tensors
from fedhpro.methods.fedhpro_variants import FedHProVariants
from fedhpro.methods.fedrcl import FedRCL
from fedhpro.methods.fedsa import enlarged
from fedhpro.methods.mixture import mixture


@dataclass(frozen=True)
class Frames(FedHProVariants):
    name = "frames"

    classifier: Literal["trained", "anchors"] = "trained"  # "anchors": h* is the unit vectors H, and nobody trains it
    scale: NonNegative = 0.0  # of the cosines to the anchors, which are then the logits; 0: the length of z counts too
    relaxed: NonNegative = 0.0  # weight of FedRCL's contrast and penalty
    hpal_weight: NonNegative = 1.0
    mixed: bool = False  # HPAL of a client weighs as much as its labels are mixed: 1 if evenly, 0 for a single class
    mixed_contrast: bool = False  # and so does FedRCL's contrast
    margin: NonNegative = 0.0  # weight of FedSA's contrast of distances to the anchors, balanced as cross-entropy is
    gap: NonNegative = 1.0  # how much nearer than the others the own anchor is to be, in distances between two of them
    apart: NonNegative = 0.0  # what the distance of two anchors counts as in that contrast; 0: as it is
    pull: NonNegative = 0.0  # of FedSA's mean squared distance to the own anchor
    gated: bool = False  # HPAL and contrast only for clients that hold half of the classes or more

    def prepare(self, client: Client) -> Tensors:
        own, always = mixture(client.counts), torch.ones_like(client.counts[0], dtype=torch.float)
        gate = (own > 0.5).float() if self.gated else always
        return super().prepare(client) | {
            "hpal": gate * (own if self.mixed else always),
            "relaxed": gate * (own if self.mixed_contrast else always),
        }

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        stages, z = net.stages_and_features(x) if self.relaxed else ([], net.features(x))
        directions, fixed = F.normalize(context["S"].mean(1), dim=1), self.classifier == "anchors"
        seen = self.scale * F.normalize(z, dim=1) if self.scale else z
        terms = {"ce": F.cross_entropy(net.balanced(F.linear(seen, directions)) if fixed else net.classify(z), y)}
        if self.hpcl != "off":
            terms["hpcl"] = self.contrast(z, y, context)
        if self.hpal != "off":
            terms["hpal"] = context["hpal"] * self.hpal_weight * self.align(z, y, context)
        if self.margin or self.pull:
            A = context["S"].mean(1)
            between = (A[0] - A[1]).norm()
            distances = enlarged(z, y, A, self.gap * between) * (self.apart / between if self.apart else 1)
            terms["margin"] = self.margin * F.cross_entropy(net.balanced(-distances), y)
            terms["pull"] = self.pull * F.mse_loss(z, A[y])
        contrasts = FedRCL().contrasts(stages, y) if self.relaxed else {}
        return terms | {name: context["relaxed"] * self.relaxed * term for name, term in contrasts.items()}

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        state, override = super().aggregate(state, model, reports, rng)
        if self.classifier == "anchors":
            W = F.normalize(state["S"].mean(1), dim=1)
            override = override | {"classifier.weight": W, "classifier.bias": torch.zeros(len(W))}
        return state, override
