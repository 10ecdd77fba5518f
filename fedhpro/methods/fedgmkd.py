"""FedGMKD: An Efficient Prototype Federated Learning Framework through Knowledge Distillation and
Discrepancy-Aware Aggregation (NeurIPS 2024).

Clients send, per class, a prototype feature and a mean soft prediction. The paper's mixture-model prototype, component
means weighted by their shares, is the class mean exactly, so no mixture is fitted. The original has lambda = gamma =
0.6, T = 0.6, a = b = 0.2, Adam with lr 1e-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import equations as eq
from .base import Net, NonNegative, Positive, Tensors
from .prototypes import PrototypeMethod, pull


@dataclass(frozen=True)
class FedGMKD(PrototypeMethod):
    """FedGMKD: Knowledge Distillation and Discrepancy-Aware Aggregation (NeurIPS 2024)."""

    name = "fedgmkd"
    needs_means_only = False  # each client's discrepancy weighs what it sent

    lam: NonNegative = 0.6  # weight of the pull to the global prototype (original: 0.6)
    gamma: NonNegative = 0.5  # weight of the match of soft predictions (original: 0.6)
    temperature: Positive = 0.6  # of the soft predictions (original: 0.6)
    a: NonNegative = 0.2  # how much a client's discrepancy lowers its weight (original: 0.2)
    b: NonNegative = 0.2  # what is added to every weight (original: 0.2)

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        """Q's rows are distributions, or 0 as long as nobody has sent one: hyper-prototypes are there before Q is."""
        return super().server_state(net, rng) | {"Q": torch.zeros(net.num_classes, net.num_classes)}

    def broadcast(self, state: Tensors) -> Tensors:
        return super().broadcast(state) | {"Q": state["Q"]}

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        z, P, present = net.features(x), context["P"], context["present"]
        h = net.classifier
        soft = torch.softmax((P @ h.weight.T + h.bias) / self.temperature, dim=1)
        known = context["Q"].any(1)
        distances = ((soft - context["Q"]) ** 2).sum(1) * known  # only the classifier learns from this
        return {
            "ce": F.cross_entropy(net.classify(z), y),
            "proto": self.lam * pull(z, y, P, present),
            "soft": self.gamma * distances.sum() / known.sum().clamp_min(1),
        }

    def summary(self, z: Tensor, y: Tensor, net: Net) -> Tensors:
        soft = torch.softmax((z @ net.classifier.weight.T + net.classifier.bias) / self.temperature, dim=1)
        return super().summary(z, y, net) | {"soft": eq.class_means(soft, y, net.num_classes)[0]}

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        new, _ = super().aggregate(state, model, reports, rng)
        Q = torch.einsum("kc,kcj->cj", self.weights(state, reports), reports["soft"])
        held = (reports["counts"] > 0).any(0)
        return new | {"Q": torch.where(held[:, None], Q, state["Q"])}, {}

    def prototypes(self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator) -> Tensors:
        P = torch.einsum("kc,kcd->cd", self.weights(state, reports), reports["means"])
        held = (reports["counts"] > 0).any(0)
        return {"P": torch.where(held[:, None], P, state["P"]), "present": held | state["present"]}

    def weights(self, state: Tensors, reports: Tensors) -> Tensor:
        """[K, C]: share of samples minus a times the divergence from the last Q plus b, cut at 0, summing to 1."""
        counts, soft = reports["counts"].to(reports["soft"].dtype), reports["soft"]
        share = counts / counts.sum(0).clamp_min(1)
        tiny = torch.finfo(soft.dtype).tiny
        log_ratio = torch.log(soft.clamp_min(tiny)) - torch.log(state["Q"].clamp_min(tiny))
        divergence = (soft * log_ratio).sum(2) * state["Q"].any(1)  # KL(q_k^c || Q^c); 0 before there is a Q
        raw = F.relu(share - self.a * divergence + self.b) * (counts > 0)
        return torch.where(raw.sum(0) > 0, raw / raw.sum(0).clamp_min(tiny), share)
