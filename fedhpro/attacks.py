"""What hostile clients do, for experiments alone: a part of the clients, drawn from the seed, spoils what it sends.

label-flip  trains on wrong labels: class c as class C - 1 - c
sign-flip   its step from the model that was sent, the other way round and attack_scale times as long
scale       its step, attack_scale times as long
gaussian    noise in place of its step, in each tensor attack_scale times as large as the step's own root mean square
poison      of each report (prototypes, class gradients, soft predictions) attack_scale times the row of another class

They are written to pass the server's check of uploads: a variance that would be negative is sent as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import wire
from .config import Config
from .data.clients import ClientData, Part, Samples
from .errors import ConfigError
from .methods.base import Tensors
from .randomness import generator, numpy_generator
from .robust import hostile_among

ON_MODELS = ("sign-flip", "scale", "gaussian")


def hostile_clients(config: Config, clients: int) -> frozenset[int]:
    """With the same seed, those of a small share are among those of a larger one. A share above 0 has one at least."""
    if config.attack == "off":
        return frozenset()
    order = numpy_generator(config.seed, "hostile").permutation(clients)
    return frozenset(order[: hostile_among(clients, config.attack_share)].tolist())


def check(config: Config, exchange: str, clients: int, upload: Tensors) -> None:
    attack = f"attack={config.attack}"
    if config.attack == "off":
        return
    if exchange == "nothing" or clients == 1:
        raise ConfigError(f"{attack}: with method={config.method} no client depends on another")
    if config.attack in ON_MODELS and exchange == "prototypes":
        raise ConfigError(f"{attack} is on models, and with exchange=prototypes they stay with the clients: try poison")
    if config.attack == "poison" and not any(name.startswith("report/") for name in upload):
        raise ConfigError(f"{attack}: {config.method} reports nothing besides its model")


@dataclass(frozen=True)
class Attack:
    """On the uploads of the hostile clients, where they are made: every engine has it."""

    kind: str
    scale: float
    clients: frozenset[int]
    seed: int

    def on(self, upload: Tensors, received: Tensors, round: int, k: int) -> Tensors:
        if k not in self.clients:
            return upload
        rng = generator(self.seed, "attack", round, k)
        spoilt = dict(upload)
        for name, value in upload.items():
            if self.kind in ON_MODELS and name.startswith("model/"):
                spoilt[name] = self.moved(value, received[name].to(value.device), rng)
            elif self.kind == "poison" and name.startswith("report/") and value.is_floating_point():
                spoilt[name] = self.scale * value.roll(1, 0) if value.dim() else 1 - value  # a vote is turned round
        return wire.non_negative(spoilt)

    def moved(self, value: Tensor, start: Tensor, rng: torch.Generator) -> Tensor:
        step = value - start
        if self.kind == "sign-flip":
            step = -step
        elif self.kind == "gaussian":
            step = torch.randn(step.shape, generator=rng).to(step.device) * step.square().mean().sqrt()
        return start + self.scale * step


@dataclass(frozen=True)
class WronglyLabelled(Part):
    classes: int = 0

    @property
    def y(self) -> Tensor:
        return self.classes - 1 - super().y


def with_flipped_labels(clients: Sequence[ClientData], hostile: frozenset[int], classes: int) -> list[ClientData]:
    return [
        replace(client, train=_flipped(client.train, classes)) if k in hostile else client
        for k, client in enumerate(clients)
    ]


def _flipped(samples: Samples, classes: int) -> Samples:
    pool, rows = (samples.pool, samples.rows) if isinstance(samples, Part) else (samples, torch.arange(len(samples)))
    return WronglyLabelled(pool, rows, classes)
