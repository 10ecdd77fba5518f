"""FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning (AAAI 2024).

The server trains the prototypes: a small network makes them from one embedding per class, and they are taught to be
nearer to what the clients sent for their class than, by a margin, to anything else. The original has lambda = 10, 100
server epochs, lr 0.005 to 0.01, batch 10.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import equations as eq
from .base import AtLeastOne, Net, Positive, Tensors
from .fedproto import FedProto

GENERATOR = ("embedding", "weight1", "bias1", "weight2", "bias2")


@dataclass(frozen=True)
class FedTGP(FedProto):
    """FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning (AAAI 2024)."""

    name = "fedtgp"
    needs_means_only = False  # the prototypes are trained on each client's

    server_epochs: AtLeastOne = 100  # passes over the uploaded prototypes in a round (original: 100)
    server_lr: Positive = 0.01  # of plain SGD at the server (original: the clients' learning rate)
    server_batch: AtLeastOne = 64  # uploaded prototypes in a batch (original: the clients' batch size)
    max_margin: Positive = 100.0  # ceiling of the adaptive margin (original: 100)

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        C, d = net.num_classes, net.dim
        bound = d**-0.5  # torch's default for a linear layer
        start = {"embedding": torch.randn(C, d, generator=rng)}
        for layer in "12":
            start[f"weight{layer}"] = (2 * torch.rand(d, d, generator=rng) - 1) * bound
            start[f"bias{layer}"] = (2 * torch.rand(d, generator=rng) - 1) * bound
        return super().server_state(net, rng) | start

    def prototypes(self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator) -> Tensors:
        holders, classes = reports["counts"].nonzero(as_tuple=True)
        uploaded = reports["means"][holders, classes]
        margin = self.margin(reports["means"], reports["counts"])
        network = {name: state[name].clone().requires_grad_() for name in GENERATOR}
        optimizer = torch.optim.SGD(list(network.values()), lr=self.server_lr)
        with torch.enable_grad():
            for _ in range(self.server_epochs):
                for rows in torch.randperm(len(classes), generator=rng).split(self.server_batch):
                    optimizer.zero_grad()
                    self.server_loss(generate(network), uploaded[rows], classes[rows], margin).backward()
                    optimizer.step()
        trained = {name: value.detach() for name, value in network.items()}
        present = state["present"] | (reports["counts"] > 0).any(0)
        return trained | {"P": generate(trained), "present": present, "log/margin": margin}

    def server_loss(self, P: Tensor, uploaded: Tensor, classes: Tensor, margin: Tensor) -> Tensor:
        """Cross-entropy over minus the distances, that to the own class enlarged by the margin."""
        squared = ((uploaded[:, None] - P) ** 2).sum(2)
        distances = squared.clamp_min(1e-12).sqrt()  # the root's slope at 0 is infinite
        return F.cross_entropy(-(distances + margin * F.one_hot(classes, len(P))), classes)

    def margin(self, means: Tensor, counts: Tensor) -> Tensor:
        """The largest distance of a class's mean to its nearest other, at most max_margin; 0 for a single class."""
        centres, present = eq.global_prototypes(means, counts, "uniform")
        if int(present.sum()) < 2:
            return means.new_zeros(())
        distances = torch.cdist(centres[present], centres[present], compute_mode="donot_use_mm_for_euclid_dist")
        return distances.fill_diagonal_(torch.inf).amin(1).amax().clamp_max(self.max_margin)


def generate(network: Tensors) -> Tensor:
    hidden = F.relu(F.linear(network["embedding"], network["weight1"], network["bias1"]))
    return F.linear(hidden, network["weight2"], network["bias2"])
