"""FedHPro plus: what our measurements left of FedHPro, and FedRCL's contrast beside it. In no paper: docs/plus.md.

Each class has one anchor that never moves, on features of its own. Clients align their features with it (HPAL), it is
the classifier as well, and batches are contrasted at five depths. Where clients lack classes alignment does harm, so
they vote on it; if not, FedSA's margin takes its place, narrow enough to come to an end. Besides the model nothing
travels but the vote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import equations as eq
from ..errors import ConfigError
from .base import Client, Net, NonNegative, Tensors
from .fedrcl import FedRCL
from .fedsa import enlarged
from .mixture import mixture

MAJORITY = 0.9  # of the samples: few clients that lack most classes do harm already
MANY = 25  # classes: with fewer, pacing does harm
NEARER = 1 / 8  # how much nearer than the others the own anchor is to be, in distances between two of them


def frame(classes: int, dim: int) -> Tensor:
    """Anchors [C, d] of length sqrt(d), at right angles, without negative coordinates: features are behind a ReLU."""
    own = torch.arange(dim) * classes // dim == torch.arange(classes)[:, None]
    return F.normalize(own.float(), dim=1) * dim**0.5


@dataclass(frozen=True)
class FedHProPlus(FedRCL):
    """FedHPro plus: fixed anchors that are the classifier as well, and FedRCL's contrast. In no paper."""

    name = "fedhpro-plus"

    classifier: Literal["anchors", "trained"] = "anchors"  # the unit vectors of the anchors, or as in all other methods
    aligned: bool = True  # HPAL (the FedHPro paper's Eq 13) with the anchors
    paced: bool | None = None  # align a sample as much as its class is probable already; none: from 25 classes on
    contrasted: bool = True  # FedRCL's contrast and penalty
    agreed: bool = True  # clients vote: all align and contrast, or all have a margin and balanced cross-entropy
    lam_margin: NonNegative = 0.9  # weight of that margin (as in FedSA)

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        if (C := net.num_classes) > net.dim:
            tries = f"try dim={2 * C}, or method=fedhpro"
            raise ConfigError(f"fedhpro-plus: {C} classes have no {net.dim} features to share out: {tries}")
        return {"votes": torch.zeros(2)} if self.agreed else {}  # samples of those for it, and of all who voted

    def broadcast(self, state: Tensors) -> Tensors:
        if not self.agreed:
            return {}
        pro, voted = state["votes"]
        return {"pro": pro / voted.clamp_min(1)}  # none until somebody has voted: a round of harm takes long to mend

    def prepare(self, client: Client) -> Tensors:
        anchors = frame(client.net.num_classes, client.net.dim).to(client.counts.device)
        if self.contrasted and client.net.no_stages:  # said before the vote is for contrast
            raise NotImplementedError(client.net.no_stages)
        found = {"anchors": anchors, "directions": F.normalize(anchors, dim=1)}
        if not self.agreed or client.received["pro"] >= MAJORITY:
            return found
        shares = client.counts / client.counts.sum()
        balanced = client.net.prior is not None  # with balanced=true they are balanced anyway
        return found | {"prior": torch.zeros_like(shares) if balanced else shares.log()}

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        wanted, nothing = "prior" not in context, torch.zeros((), device=y.device)
        contrasted = self.contrasted and wanted
        stages, z = net.stages_and_features(x) if contrasted else ([], net.features(x))  # TextCNN has no stages
        fixed = self.classifier == "anchors"
        logits = net.balanced(F.linear(z, context["directions"])) if fixed else net.classify(z)
        terms = {"ce": F.cross_entropy(logits if wanted else logits + context["prior"], y)}
        if self.aligned:
            terms["hpal"] = self.alignment(net, z, y, logits, context) if wanted else nothing
        if self.agreed:
            terms["margin"] = nothing if wanted else self.lam_margin * self.margin(net, z, y, context)
        if self.contrasted:
            terms |= self.contrasts(stages, y) if wanted else {"contrast": nothing, "penalty": nothing}
        return terms

    def alignment(self, net: Net, z: Tensor, y: Tensor, logits: Tensor, context: Tensors) -> Tensor:
        paced = net.num_classes >= MANY if self.paced is None else self.paced
        pace = logits.detach().softmax(1).gather(1, y[:, None])[:, 0] if paced else None
        return eq.align(z, y, context["anchors"], weights=pace)

    def margin(self, net: Net, z: Tensor, y: Tensor, context: Tensors) -> Tensor:
        gap = NEARER * (2 * net.dim) ** 0.5  # two anchors are sqrt(2d) apart
        nearness = net.balanced(-enlarged(z, y, context["anchors"], gap))
        return F.cross_entropy(nearness + context["prior"], y)

    def report(self, client: Client, context: Tensors) -> Tensors:
        return {"vote": (mixture(client.counts) >= 0.5).float()} if self.agreed else {}

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        if self.agreed:
            n = reports["samples"].float()
            votes = state["votes"] + torch.stack([(reports["vote"].clamp(0, 1) * n).sum(), n.sum()])
            state = {"votes": votes, "log/vote": votes[0] / votes[1].clamp_min(1)}
        if self.classifier == "trained":
            return state, {}
        W, b = model["classifier.weight"], model["classifier.bias"]
        return state, {"classifier.weight": F.normalize(frame(*W.shape), dim=1), "classifier.bias": torch.zeros_like(b)}
