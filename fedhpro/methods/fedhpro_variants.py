"""FedHPro with every switch: the paper's Table 6, other starts of S, and what the authors' released code computes.

With the defaults this is FedHPro as printed, through the same lines of fedhpro.py. Preset `released` turns on what the
code does (fedhpro_released.py has the pieces); presets/released.toml lists it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .. import equations as eq
from . import fedhpro_released as released
from .base import Client, Count, Net, NonNegative, Tensors
from .fedhpro import FedHPro


@dataclass(frozen=True)
class FedHProVariants(FedHPro):
    """FedHPro: Federated Hyper-Prototype Learning via Gradient Matching (ICML 2026)."""

    name = "fedhpro"
    hyper_init: Literal["randn", "prototypes"] = "randn"  # "prototypes": the first round's P + hyper_scale * randn
    hyper_scale: NonNegative = 1.0  # standard deviation of the random start
    gradients: Literal["after", "before"] = "after"  # when Eq 5 is taken: after (paper) or before local training (code)
    gradient_samples: Count = 0  # at most so many augmented samples per class for Eq 5 (code: 100); 0: all, as they are
    gradient_scale: Literal["mean", "mean/n"] = "mean"  # "mean/n": divided by the number of samples twice (code)
    matching: Literal["cosine", "sign"] = "cosine"  # Eq 8 (paper), or agreement of signs per coordinate (code)
    hpcl_scale: Literal["mean", "mean/n"] = "mean"  # "mean/n": divided by the batch size twice (code)
    hpal_form: Literal["sum", "unit-mean"] = "sum"  # Eq 13 (paper), or of unit vectors and as a mean over d (code)
    hpal_warmup: Count = 0  # rounds over which the weight of HPAL grows to 1
    retrain_classifier: bool = False  # h* re-trained at the server on synthetic features (code; not in the paper)

    @property
    def uses_P(self) -> bool:
        return "global" in (self.hpcl, self.hpal) or self.hyper_init == "prototypes"

    @property
    def matches(self) -> bool:
        return super().matches or self.retrain_classifier  # which needs the clients' gradients too

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        state = super().server_state(net, rng)
        state["S"] *= self.hyper_scale
        if self.uses_P:
            state["P"] = torch.zeros(net.num_classes, net.dim)
            state["present"] = torch.zeros(net.num_classes, dtype=torch.bool)
        if self.hpal_warmup:
            state["round"] = torch.tensor(1.0)
        return state | (released.retraining_state(net, rng) if self.retrain_classifier else {})

    def broadcast(self, state: Tensors) -> Tensors:
        sent = super().broadcast(state) | {k: state[k] for k in ("P", "present") if k in state}
        if self.hpal_warmup:
            sent["hpal_weight"] = torch.clamp(state["round"] / self.hpal_warmup, max=1.0)
        return sent

    def prepare(self, client: Client) -> Tensors:
        context = super().prepare(client)
        return context | (super().report(client, context) if self.gradients == "before" else {})

    def report(self, client: Client, context: Tensors) -> Tensors:
        early = ("gradients", "counts", "weight_gradients")
        sent = {k: context[k] for k in early if k in context} or super().report(client, context)
        if self.uses_P:
            z, y = client.features()
            sent["means"], sent["mean_counts"] = eq.class_means(z, y, client.net.num_classes)  # Eq 2
        return sent

    def class_gradients(self, client: Client) -> Tensors:
        z, y = client.features(limit=self.gradient_samples or None, augment=self.gradient_samples > 0)
        h = client.net.classifier.weight.detach(), client.net.classifier.bias.detach()
        gradients, counts = eq.class_gradients(z, y, *h)  # Eq 5
        if self.gradient_scale == "mean/n":
            gradients = gradients / counts.clamp_min(1)[:, None]
        extra = {"weight_gradients": released.weight_gradients(z, y, *h)} if self.retrain_classifier else {}
        return {"gradients": gradients, "counts": counts} | extra

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        override: Tensors = {}
        if self.uses_P:
            P, present = eq.global_prototypes(reports["means"], reports["mean_counts"])  # Eq 4
            if self.hyper_init == "prototypes":
                first = (present & ~state["present"])[:, None, None]
                state = state | {"S": state["S"] + torch.where(first, P[:, None], 0.0)}
            state = state | {"P": torch.where(present[:, None], P, state["P"]), "present": state["present"] | present}
        if self.hpal_warmup:
            state = state | {"round": state["round"] + 1}
        if self.retrain_classifier:
            state, override = released.retrain(state, reports, rng)
        return super().aggregate(state, model | override, reports, rng)[0], override

    def anchors(self, which: str, context: Tensors) -> tuple[Tensor, Tensor | None]:
        """[C, I, d] and which classes have any: S, or P as a single vector per class."""
        if which == "global":
            return context["P"][:, None], context["present"]
        return context["S"], context["present"] if self.hyper_init == "prototypes" else None

    def margin_of(self, means: Tensor, counts: Tensor) -> Tensor:
        return released.inner_margin(means) if self.margin == "denominator" else super().margin_of(means, counts)

    def contrast(self, z: Tensor, y: Tensor, context: Tensors) -> Tensor:
        S, present = self.anchors(self.hpcl, context)
        form = released.hpcl if self.margin == "denominator" else eq.hpcl
        loss = form(z, y, S, context["margin"], self.tau, present)
        return loss / len(y) if self.hpcl_scale == "mean/n" else loss

    def align(self, z: Tensor, y: Tensor, context: Tensors) -> Tensor:
        form = released.hpal if self.hpal_form == "unit-mean" else eq.hpal
        return form(z, y, *self.anchors(self.hpal, context)) * context.get("hpal_weight", 1.0)

    def match(self, S: Tensor, target: Tensor, present: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.matching == "cosine":
            return super().match(S, target, present, weight, bias)
        return released.sign_match(S, target, present, weight, bias, self.M, self.match_lr)
