"""FedHPro: Federated Hyper-Prototype Learning via Gradient Matching (ICML 2026). Algorithm 1, from top to bottom.

The defaults are the method as printed. M=0 freezes the hyper-prototypes S at their random start: the control that
shows what gradient matching adds. The paper's ablations are the switches here; every other departure from the paper
(global prototypes as anchors, the authors' released code, other starts) is in fedhpro_variants.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import equations as eq
from .base import AtLeastOne, Client, Count, Net, Positive, Tensors
from .uplink import Features, ReportsGradients


@dataclass(frozen=True)
class FedHPro(ReportsGradients):
    exchanges = ("model", "classifier")  # Eq 7 needs the averaged classifier at least

    I: AtLeastOne = 5  # hyper-prototypes per class
    M: Count = 30  # steps of gradient matching per round; 0: S stays at its random start
    match_lr: Positive = 0.1  # step size of gradient matching (the paper gives none; the authors' code has 0.1)
    tau: Positive = 0.05  # temperature of HPCL
    hpcl: Literal["hyper", "global", "off"] = "hyper"  # its anchors: S, global prototypes P (Table 6), or no HPCL
    hpal: Literal["hyper", "global", "off"] = "hyper"  # its anchors: S, global prototypes P (Table 6), or no HPAL
    margin: Literal["inside", "denominator", "off"] = "inside"  # d_k in the exponents; beside them in the code
    margin_per: Literal["round", "epoch"] = "round"  # how often d_k is measured

    @property
    def matches(self) -> bool:
        """Whether clients send gradients for hyper-prototypes that are the anchors of a loss."""
        return "hyper" in (self.hpcl, self.hpal) and self.uplink != "off"

    # Server, before round 1

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        return {"S": torch.randn(net.num_classes, self.I, net.dim, generator=rng)}

    def broadcast(self, state: Tensors) -> Tensors:
        return {"S": state["S"]} if "hyper" in (self.hpcl, self.hpal) else {}

    # Client

    def prepare(self, client: Client) -> Tensors:
        """What the loss needs of the anchors and of d_k, which is the same in every step."""
        context = dict(client.received)
        if self.hpcl != "off":
            context["directions"] = eq.mean_directions(self.anchors(self.hpcl, context)[0])  # of Eq 11
            context |= self.client_margin(client)
        if self.hpal != "off":
            context["H"] = self.anchors(self.hpal, context)[0].mean(1)  # of Eq 13
        return context

    def refresh(self, client: Client, context: Tensors) -> Tensors:
        return context | self.client_margin(client) if "margin" in context and self.margin_per == "epoch" else context

    def client_margin(self, client: Client) -> Tensors:
        margin = torch.zeros((), device=client.counts.device)
        if self.margin != "off":
            z, y = client.features()
            margin = self.margin_of(*eq.class_means(z, y, client.net.num_classes))  # Eq 2, then Eq 10
        return {"margin": margin, "margins": eq.margins(margin, *self.anchors(self.hpcl, client.received))}

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        z = net.features(x)
        terms = {"ce": F.cross_entropy(net.classify(z), y)}  # Eq 14
        if self.hpcl != "off":
            terms["hpcl"] = self.contrast(z, y, context)  # Eq 12
        if self.hpal != "off":
            terms["hpal"] = self.align(z, y, context)  # Eq 13
        return terms  # Eq 15 is their sum

    def report(self, client: Client, context: Tensors) -> Tensors:
        return self.report_gradients(client.features, client.net, context) if self.matches else {}

    def report_gradients(self, features: Features, net: Net, context: Tensors) -> Tensors:
        return self.class_gradients(*features(), net)  # Eq 5

    # Server, after the models were averaged

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        if "gradients" not in reports:
            return state, {}
        S, h = state["S"], (model["classifier.weight"], model["classifier.bias"])
        target, present = eq.mean_gradients(reports["gradients"], reports["counts"])  # Eq 6
        before = eq.matching_loss(target, eq.hyper_gradients(S, *h))  # Eq 7, 8
        S = self.match(S, target, present, *h)  # Eq 9
        after = eq.matching_loss(target, eq.hyper_gradients(S, *h))
        log = {"log/L_GM_start": before[present].mean(), "log/L_GM": after[present].mean()}
        return state | {"S": S} | log, {}

    # The equations with this method's settings

    def margin_of(self, means: Tensor, counts: Tensor) -> Tensor:
        return eq.client_margin(means, counts)

    def anchors(self, which: str, received: Tensors) -> tuple[Tensor, Tensor | None]:
        """Those of a loss [C, I, d], and which classes have any; None: all."""
        return received["S"], None

    def contrast(self, z: Tensor, y: Tensor, context: Tensors) -> Tensor:
        return eq.contrast(z, y, context["directions"], context["margins"], self.tau)

    def align(self, z: Tensor, y: Tensor, context: Tensors) -> Tensor:
        return eq.align(z, y, context["H"])

    def match(self, S: Tensor, target: Tensor, present: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return eq.match(S, target, present, weight, bias, self.M, self.match_lr)[0]
