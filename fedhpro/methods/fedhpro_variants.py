"""FedHPro with every switch: global prototypes, a warm-up of HPAL, and what the authors' released code computes.

With the defaults this is FedHPro as printed, through the same lines of fedhpro.py. Preset `released` turns on what the
code does (fedhpro_released.py has the pieces); presets/released.toml lists it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import equations as eq
from . import fedhpro_released as released
from .base import Client, Count, Net, Tensors
from .refit import FedHProRefit
from .uplink import Features


@dataclass(frozen=True)
class FedHProVariants(FedHProRefit):
    """FedHPro: Federated Hyper-Prototype Learning via Gradient Matching (ICML 2026)."""

    name = "fedhpro"
    gradients: Literal["after", "before"] = "after"  # when Eq 5 is taken: after (paper) or before local training (code)
    gradient_samples: Count = 0  # at most so many augmented samples per class for Eq 5 (code: 100); 0: all, as they are
    gradient_scale: Literal["mean", "mean/n"] = "mean"  # "mean/n": divided by the number of samples twice (code)
    matching: Literal["cosine", "sign"] = "cosine"  # Eq 8 (paper), or agreement of signs per coordinate (code)
    hpcl_scale: Literal["mean", "mean/n"] = "mean"  # "mean/n": divided by the batch size twice (code)
    hpal_form: Literal["sum", "unit-mean"] = "sum"  # Eq 13 (paper), or of unit vectors and as a mean over d (code)
    hpal_warmup: Count = 0  # rounds over which the weight of HPAL grows to 1
    retrain_classifier: bool = False  # h* re-trained at the server on synthetic features (code; not in the paper)

    def __post_init__(self) -> None:
        if self.uplink == "off" and (self.M or self.retrain_classifier):
            raise ValueError("uplink=off needs M=0, and a classifier that is not re-trained: both use the gradients")
        if self.uplink == "probabilities" and self.gradients == "before":
            raise ValueError("uplink=probabilities needs gradients=after: they are decoded with the trained classifier")

    @property
    def matches(self) -> bool:
        return super().matches or self.retrain_classifier  # which needs the clients' gradients too

    @property
    def counts_all(self) -> bool:
        return not self.gradient_samples

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        state = super().server_state(net, rng)
        if self.hpal_warmup:
            state["round"] = torch.tensor(1.0)
        return state | (released.retraining_state(net, rng) if self.retrain_classifier else {})

    def broadcast(self, state: Tensors) -> Tensors:
        sent = super().broadcast(state)
        if self.hpal_warmup:
            sent["hpal_weight"] = torch.clamp(state["round"] / self.hpal_warmup, max=1.0)
        return sent

    def prepare(self, client: Client) -> Tensors:
        context = super().prepare(client)
        if self.hpal != "off" and self.hpal_form == "unit-mean":
            context["H"] = F.normalize(context["H"], dim=1)
        if self.gradients == "before" and self.matches:
            context |= self.class_gradients(*client.features(**self.gradient_pass), client.net)
        return context

    def report_gradients(self, features: Features, net: Net, context: Tensors) -> Tensors:
        if self.gradients == "before":
            return {name: context[name] for name in context if name in ("gradients", "counts", "weight_gradients")}
        return self.class_gradients(*features(**self.gradient_pass), net)

    @property
    def gradient_pass(self) -> dict[str, Any]:
        return {"limit": self.gradient_samples, "augment": True} if self.gradient_samples else {}

    def class_gradients(self, z: Tensor, y: Tensor, net: Net) -> Tensors:
        sent = super().class_gradients(z, y, net)  # Eq 5
        if self.gradient_scale == "mean/n":
            name = "gradients" if self.uplink == "gradients" else "residuals"
            sent[name] = sent[name] / sent["counts"].clamp_min(1)[:, None]
        if self.retrain_classifier:
            sent["weight_gradients"] = released.weight_gradients(z, y, net.classifier)
        return sent

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        override: Tensors = {}
        if self.hpal_warmup:
            state = state | {"round": state["round"] + 1}
        if self.retrain_classifier:
            state, override = released.retrain(state, reports, rng)
        state, refitted = super().aggregate(state, model | override, reports, rng)
        return state, override | refitted

    def margin_of(self, means: Tensor, counts: Tensor) -> Tensor:
        return released.inner_margin(means) if self.margin == "denominator" else super().margin_of(means, counts)

    def contrast(self, z: Tensor, y: Tensor, context: Tensors) -> Tensor:
        if self.margin == "denominator":
            S, present = self.anchors(self.hpcl, context)
            loss = released.hpcl(z, y, S, context["margin"], self.tau, present)
        else:
            loss = super().contrast(z, y, context)
        return loss / len(y) if self.hpcl_scale == "mean/n" else loss

    def align(self, z: Tensor, y: Tensor, context: Tensors) -> Tensor:
        form = released.align if self.hpal_form == "unit-mean" else eq.align
        return form(z, y, context["H"], self.anchors(self.hpal, context)[1]) * context.get("hpal_weight", 1.0)

    def match(self, S: Tensor, target: Tensor, present: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.matching == "cosine":
            return super().match(S, target, present, weight, bias)
        return released.sign_match(S, target, present, weight, bias, self.M, self.match_lr)
