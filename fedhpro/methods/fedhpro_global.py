"""FedHPro with global prototypes P (Eq 4): as anchors of a loss (the paper's Table 6), or as the start of S."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .. import equations as eq
from .base import Client, Net, NonNegative, Tensors
from .fedhpro import FedHPro


@dataclass(frozen=True)
class FedHProGlobal(FedHPro):
    hyper_init: Literal["randn", "prototypes"] = "randn"  # "prototypes": the first round's P + hyper_scale * randn
    hyper_scale: NonNegative = 1.0  # standard deviation of the random start

    @property
    def uses_P(self) -> bool:
        return "global" in (self.hpcl, self.hpal) or self.hyper_init == "prototypes"

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        state = super().server_state(net, rng)
        state["S"] *= self.hyper_scale
        if self.uses_P:
            state["P"] = torch.zeros(net.num_classes, net.dim)
            state["present"] = torch.zeros(net.num_classes, dtype=torch.bool)
        return state

    def broadcast(self, state: Tensors) -> Tensors:
        return super().broadcast(state) | {k: state[k] for k in ("P", "present") if k in state}

    def report(self, client: Client, context: Tensors) -> Tensors:
        features = functools.cache(client.features)  # one pass for Eq 5 and Eq 2
        sent = self.report_gradients(features, client.net, context) if self.matches else {}
        if self.uses_P:
            z, y = features()
            sent["means"], sent["mean_counts"] = eq.class_means(z, y, client.net.num_classes)  # Eq 2
        return sent

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        if self.uses_P:
            P, present = eq.global_prototypes(reports["means"], reports["mean_counts"])  # Eq 4
            if self.hyper_init == "prototypes":
                first = (present & ~state["present"])[:, None, None]
                state = state | {"S": state["S"] + torch.where(first, P[:, None], 0.0)}
            state = state | {"P": torch.where(present[:, None], P, state["P"]), "present": state["present"] | present}
        return super().aggregate(state, model, reports, rng)

    def anchors(self, which: str, received: Tensors) -> tuple[Tensor, Tensor | None]:
        if which == "global":
            return received["P"][:, None], received["present"]
        return received["S"], received["present"] if self.hyper_init == "prototypes" else None
