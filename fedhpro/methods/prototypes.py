"""What the prototype methods share: clients send class means, the server makes global prototypes of them.

A method overrides `prototypes`, the server's step, `loss`, and adds to `summary`. With model exchange a model is judged
by its classifier; where models stay with the clients (`exchange=prototypes`), by the nearest global prototype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import equations as eq
from .base import Client, Method, Net, Tensors


@dataclass(frozen=True)
class PrototypeMethod(Method):
    exchanges: ClassVar[tuple[str, ...]] = ("model", "classifier", "prototypes")

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        C, d = net.num_classes, net.dim
        return {"P": torch.zeros(C, d), "present": torch.zeros(C, dtype=torch.bool)}

    def broadcast(self, state: Tensors) -> Tensors:
        return {"P": state["P"], "present": state["present"]}

    def report(self, client: Client, context: Tensors) -> Tensors:
        return self.summary(*client.features(), client.net)

    def summary(self, z: Tensor, y: Tensor, net: Net) -> Tensors:
        """What is reported of the features after training: one pass for everything."""
        means, counts = eq.class_means(z, y, net.num_classes)  # Eq 2
        return {"means": means, "counts": counts}

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        return state | self.prototypes(state, model, reports, rng), {}

    def prototypes(self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator) -> Tensors:
        """The new P and present. Here, the plain mean over the holders; a class that nobody held keeps what it had."""
        P, present = eq.global_prototypes(reports["means"], reports["counts"], "uniform")
        return {"P": torch.where(present[:, None], P, state["P"]), "present": present | state["present"]}

    def predict(self, net: Net, x: Tensor, received: Tensors) -> Tensors:
        z = net.features(x)
        return {"head": net.classify(z), "nearest_prototype": nearest(z, received["P"], received["present"])}


def pull(z: Tensor, y: Tensor, P: Tensor, present: Tensor) -> Tensor:
    """Mean over batch and d of (z - P^y)^2; a sample whose class has no prototype counts 0 and stays in the mean."""
    return F.mse_loss(z, torch.where(present[y][:, None], P[y], z.detach()))


def nearest(z: Tensor, P: Tensor, present: Tensor) -> Tensor:
    """Logits whose largest is the class of the nearest prototype."""
    distances = torch.cdist(z, P, compute_mode="donot_use_mm_for_euclid_dist")
    return (-distances).masked_fill(~present, -torch.inf)
