"""fedhpro-plus with anchors that follow from gradients: matching over anchors that are good ones, whatever it finds.

    python benchmarks/matrix.py results/awake.json OUT --parallel 2

knows the method `informed`. The first round is FedAvg's. Its step of the classifier, W after it minus W before, is the
sum of the clients' gradients with respect to W, and so tells which features go with which class. Of all ways to share
the features out to the classes evenly, the blocks of fedhpro-plus, the one that matches it best is taken: the largest
sum of cosines between the anchor of a class and its row of the step. From then on it is fedhpro-plus without its vote.
`by` has the controls; docs/matching.md has what came out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedhpro.methods.base import Client, Net, Tensors
from fedhpro.methods.fedhpro_plus import FedHProPlus, frame


def matched(step: Tensor) -> Tensor:
    """Blocks [C, d] whose anchors have the largest sum of cosines with the rows of the step."""
    anchors = frame(*step.shape)
    owner = anchors.argmax(0)  # of each feature, before
    gain = F.normalize(step, dim=1)[owner] * anchors.amax(1)[owner, None]  # of feature q at the place of another
    places, features = linear_sum_assignment(gain.numpy(), maximize=True)
    found = torch.zeros_like(anchors)
    found[:, features] = anchors[:, places]
    return found


@dataclass(frozen=True)
class Informed(FedHProPlus):
    name = "informed"

    # "nothing": the blocks of fedhpro-plus; "turned": those of "step", each given to the next class: as much structure,
    # and wrong
    by: Literal["step", "nothing", "turned"] = "step"
    agreed: bool = False

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        W = net.classifier.weight.detach().clone()
        return super().server_state(net, rng) | {"W": W, "anchors": frame(*W.shape), "known": torch.zeros(())}

    def broadcast(self, state: Tensors) -> Tensors:
        return {"anchors": state["anchors"], "known": state["known"]}

    def prepare(self, client: Client) -> Tensors:
        anchors = client.received["anchors"]
        found = {"anchors": anchors, "directions": F.normalize(anchors, dim=1)}
        return found if client.received["known"] else found | {"first": torch.zeros(())}

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        if "first" in context:
            nothing = dict.fromkeys(("hpal", "contrast", "penalty"), torch.zeros(()))
            return {"ce": F.cross_entropy(net.classify(net.features(x)), y)} | nothing
        return super().loss(net, frozen, x, y, context)

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        if not state["known"] and self.by != "nothing":
            anchors = matched(model["classifier.weight"] - state["W"])
            state = state | {"anchors": anchors.roll(1, 0) if self.by == "turned" else anchors}
        directions = F.normalize(state["anchors"], dim=1)
        override = {"classifier.weight": directions, "classifier.bias": torch.zeros(len(directions))}
        return state | {"known": torch.ones(())}, override
