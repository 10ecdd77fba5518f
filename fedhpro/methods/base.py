"""The hooks of a method, in the order in which a round calls them. Their defaults are FedAvg.

A method is a frozen dataclass of hyper-parameters that sees named tensors only. The federation averages models (Eq 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor

Tensors = dict[str, Tensor]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Count = Annotated[int, Ge(0)]
AtLeastOne = Annotated[int, Ge(1)]


class Net(Protocol):
    """A split model: features f, then a linear classifier h with weight [C, d] and bias [C]."""

    dim: int
    num_classes: int
    classifier: torch.nn.Linear
    prior: Tensor | None  # where losses are balanced (`balanced`)
    no_stages: str  # why `stages_and_features` cannot be asked for; mostly it can

    def features(self, x: Tensor) -> Tensor: ...  # z, before dropout
    def stages_and_features(self, x: Tensor) -> tuple[list[Tensor], Tensor]: ...  # pooled at five depths, and z
    def classify(self, z: Tensor) -> Tensor: ...
    def balanced(self, logits: Tensor) -> Tensor: ...  # part of `classify`; for logits that come from elsewhere
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def __call__(self, x: Tensor) -> Any: ...


class Client(Protocol):
    """What a method sees of a client: its net, what it received, what it remembered, and passes over its data."""

    received: Tensors
    memory: Tensors
    counts: Tensor  # samples per class [C]
    rng: torch.Generator

    @property
    def net(self) -> Net:
        """The received model before training, the trained one after it."""

    def features(self, limit: int | None = None, augment: bool = False) -> tuple[Tensor, Tensor]:
        """z and y in eval mode, without gradients; with a limit, at most so many random samples of each class."""


METHODS: dict[str, type[Method]] = {}  # every class with a name of its own


@dataclass(frozen=True)
class Method:
    name: ClassVar[str]
    frozen: ClassVar[tuple[str, ...]] = ()  # nets kept beside the trained one, e.g. MOON's "received" and "previous"
    exchanges: ClassVar[tuple[str, ...]] = ("model",)  # what of the model may travel; the first is the default
    pools_data: ClassVar[bool] = False  # centralised training: one client that holds everybody's samples
    needs_means_only: ClassVar[bool] = True  # of reports: their means over the clients that hold a class will do

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            METHODS[cls.name] = cls

    @property
    def counts_all(self) -> bool:  # whether what clients report as counts by class is of all their samples
        return True

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        """Before round 1: what the server keeps besides the model. Names that start with "log/" go to the metrics."""
        return {}

    def broadcast(self, state: Tensors) -> Tensors:
        """What the server sends besides the model."""
        return {}

    def prepare(self, client: Client) -> Tensors:
        """At the client, before training: the context of the loss. Always the same names and shapes."""
        return dict(client.received)

    def refresh(self, client: Client, context: Tensors) -> Tensors:
        """At the client, before each further epoch."""
        return context

    def loss(self, net: Net, frozen: Mapping[str, Net], x: Tensor, y: Tensor, context: Tensors) -> Tensors:
        """Named terms, summed by the training loop. Pure: no .item(), no branch on data."""
        return {"ce": F.cross_entropy(net(x), y)}

    def report(self, client: Client, context: Tensors) -> Tensors:
        """At the client, after training: what it sends besides its model. Always the same names and shapes."""
        return {}

    def remember(self, client: Client, report: Tensors) -> Tensors:
        """What the client keeps for its next participation."""
        return {}

    def decode(self, report: Tensors, classifier: Tensors) -> Tensors:
        """At the server, for each upload, with the classifier that came with it."""
        return report

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """At the server, after the models were averaged: the new state, and what to overwrite in the model.

        `reports` holds every reported name stacked over the valid uploads [K, ...], and "samples" [K].
        """
        return state, {}

    def predict(self, net: Net, x: Tensor, received: Tensors) -> Tensors:
        """Named logits; the first is the headline."""
        return {"head": net(x)}
