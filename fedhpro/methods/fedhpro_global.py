"""FedHPro with other starts of S, and global prototypes P (Eq 4) as anchors (the paper's Table 6) or as a start."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import equations as eq
from ..errors import ConfigError
from .base import Client, Net, NonNegative, Tensors
from .fedhpro import FedHPro
from .fedhpro_plus import frame


def orthogonal(S: Tensor) -> Tensor:
    """The nearest vectors of length sqrt(d) that are all at right angles, if there are not more than d."""
    U, _, V = torch.linalg.svd(S.flatten(0, 1), full_matrices=False)
    return F.normalize(U @ V, dim=1).reshape(S.shape) * S.shape[2] ** 0.5


def blocks(S: Tensor) -> Tensor:
    """Vectors of length sqrt(d), without negative coordinates, at right angles to those of every other class."""
    return frame(S.shape[0], S.shape[2])[:, None].expand(S.shape).clone()


FRAMES = {"orthogonal": orthogonal, "blocks": blocks}


@dataclass(frozen=True)
class FedHProGlobal(FedHPro):
    # "prototypes": the first round's P + hyper_scale * randn; "orthogonal": a random frame; "blocks": each class has
    # coordinates of its own, which features behind a ReLU can reach
    hyper_init: Literal["randn", "prototypes", "orthogonal", "blocks"] = "randn"  # the start of S
    hyper_scale: NonNegative = 1.0  # root mean square of the start

    @property
    def uses_P(self) -> bool:
        return "global" in (self.hpcl, self.hpal) or self.hyper_init == "prototypes"

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        state = super().server_state(net, rng)
        if self.hyper_init == "blocks" and net.num_classes > net.dim:
            raise ConfigError(f"hyper_init=blocks: {net.num_classes} classes have no {net.dim} features to share out")
        if self.hyper_init in FRAMES:
            state["S"] = FRAMES[self.hyper_init](state["S"])
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
