"""Hyper-prototypes in place of the global prototypes of another method (the FedHPro paper's Table 3).

The server keeps S and matches gradients as FedHPro does; H^c, the mean of class c's hyper-prototypes, is what the host
method's clients get as their global prototype (FedSA: as their anchor). Everything else of the host stays, its weights
too. FedTGP's own training of prototypes falls away, which leaves FedProto's loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import equations as eq
from .base import AtLeastOne, Count, Net, Positive, Tensors
from .fedgmkd import FedGMKD
from .fedproto import FedProto
from .fedsa import FedSA
from .fedtgp import FedTGP
from .prototypes import PrototypeMethod
from .uplink import ReportsGradients


@dataclass(frozen=True)
class HyperPrototypes(ReportsGradients, PrototypeMethod):
    exchanges: ClassVar[tuple[str, ...]] = ("model", "classifier")  # Eq 7 needs the averaged classifier

    I: AtLeastOne = 5  # hyper-prototypes per class
    M: Count = 30  # steps of gradient matching per round; 0: S stays at its random start
    match_lr: Positive = 0.1  # step size of gradient matching

    def __post_init__(self) -> None:
        if self.uplink == "off":
            raise ValueError("uplink=off is for fedhpro with M=0: a host with hyper-prototypes matches gradients")

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        S = torch.randn(net.num_classes, self.I, net.dim, generator=rng)
        state = super().server_state(net, rng) | {"S": S} | self.averaged(S)
        return state | ({"A": state["P"]} if "A" in state else {})

    def summary(self, z: Tensor, y: Tensor, net: Net) -> Tensors:
        return super().summary(z, y, net) | self.class_gradients(z, y, net)  # Eq 5

    def prototypes(self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator) -> Tensors:
        h = model["classifier.weight"], model["classifier.bias"]
        target, present = eq.mean_gradients(reports["gradients"], reports["counts"])  # Eq 6
        S, _ = eq.match(state["S"], target, present, *h, self.M, self.match_lr)  # Eq 7 to 9
        loss = eq.matching_loss(target, eq.hyper_gradients(S, *h))[present].mean()
        return {"S": S, "log/L_GM": loss} | self.averaged(S)

    def averaged(self, S: Tensor) -> Tensors:
        return {"P": S.mean(1), "present": torch.ones(len(S), dtype=torch.bool)}

    def anchors(self, A: Tensor, P: Tensor, held: Tensor) -> Tensor:
        """FedSA's anchors are H, without a moving mean."""
        return P


def with_hyperprototypes(host: type[PrototypeMethod]) -> type[PrototypeMethod]:
    """The host method with hyper-prototypes, under the name HOST-hp."""
    about = f"{(host.__doc__ or host.__name__).rstrip('.')}, with hyper-prototypes."
    body = {"name": f"{host.name}-hp", "__doc__": about, "__module__": __name__}
    return dataclass(frozen=True)(type(f"{host.__name__}HP", (HyperPrototypes, host), body))


for _host in (FedProto, FedTGP, FedGMKD, FedSA):
    with_hyperprototypes(_host)
