"""What a method sends, keeps and can exchange, found by letting it rehearse one step with the paper's network."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import models
from .data.batches import Transform
from .data.sources import IMAGENET_MEAN, IMAGENET_STD, Split
from .methods import METHODS
from .methods.base import Tensors
from .randomness import generator
from .training import LocalSettings, LocalTrainer, section
from .wire import num_bytes

CLASSES, FEATURES = 10, 512  # of ResNet-10 with 64 filters


@dataclass(frozen=True)
class Fact:
    where: str  # down, up, kept by the client, kept by the server
    name: str
    shape: str
    bytes: int


def rehearse(method: str) -> list[Fact]:
    """Everything beyond the training samples that moves or stays, for C=10 and d=512."""
    chosen = METHODS[method]()
    net = models.build("resnet10", CLASSES)
    settings = LocalSettings(1, 1, 2, 0.01, "constant", 1.0, 1, 0.9, 0.0, "sgd")
    transform = Transform(IMAGENET_MEAN, IMAGENET_STD)
    trainer = LocalTrainer([net], chosen, chosen.exchanges[0], settings, transform, [], {}, seed=0)
    state = chosen.server_state(net, generator(0, "facts"))
    extras = {} if chosen.exchanges[0] == "nothing" else chosen.broadcast(state)
    noise = Split(torch.randint(0, 256, (2, 3, 32, 32), generator=generator(0, "noise")).byte(), torch.tensor([0, 1]))
    sent = {f"extra/{name}": value for name, value in extras.items()}
    upload, memory = trainer.update_on(noise, settings, 1, 0, sent, {})
    model = section(upload, "model")
    return [
        *_model("down", model), *_each("down", extras),
        *_model("up", model), *_each("up", section(upload, "report")),
        *_model("kept by the client", {n: v for n, v in memory.items() if "/" in n}),
        *_each("kept by the client", {n: v for n, v in memory.items() if "/" not in n}),
        *_each("kept by the server", {n: v for n, v in state.items() if n not in extras}),
    ]  # fmt: skip


def _each(where: str, tensors: Tensors) -> list[Fact]:
    return [Fact(where, name, _shape(value), num_bytes({name: value})) for name, value in tensors.items()]


def _model(where: str, tensors: Tensors) -> list[Fact]:
    if not tensors:
        return []
    count = sum(value.numel() for value in tensors.values())
    return [Fact(where, "a whole model", f"{count:,} numbers", num_bytes(tensors))]


def _shape(value: torch.Tensor) -> str:
    names = {CLASSES: "C", FEATURES: "d"}
    return " x ".join(names.get(size, str(size)) for size in value.shape) or "one number"
