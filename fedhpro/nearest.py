"""`nearest=true`: the class of the nearest of the clients' class means, in place of what the classifier says.

Under domain skew a class is in several places of the feature space, and under label skew an averaged classifier leans
to the classes of its largest clients; the means of each client know neither. Before they train, clients take the class
means of the model that they received, which is the same one for all of them, and send C x d numbers. The server keeps
those of the last round beside the model. Training does not change.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Config
from .equations import class_means
from .errors import ConfigError
from .methods.base import Client, Tensors

HEAD = "nearest_mean"  # among the ways to predict
NOBODY = -1e30  # in place of -inf: where no client has sent means yet, all classes are as likely, and not nan


def report(client: Client) -> Tensors:
    """The class means of the received model, Eq 2, and of how many samples each is."""
    means, counts = class_means(*client.features(), client.net.num_classes)
    return {"means": means, "counts": counts}


def empty(clients: int, classes: int, dim: int) -> Tensors:
    return {"means": torch.zeros(clients, classes, dim), "counts": torch.zeros(clients, classes, dtype=torch.int64)}


def latest(kept: Tensors, reports: Tensors) -> Tensors:
    """Those of a round's uploads, in the form in which they are kept; a class that nobody holds stays as it was."""
    found = {name: torch.zeros_like(value) for name, value in kept.items()}
    for name, value in found.items():
        value[: len(reports[name])] = reports[name]
    if found:  # with nearest=true
        nobody = ~(found["counts"] > 0).any(0)
        for name, value in found.items():
            value[:, nobody] = kept[name][:, nobody]
    return found


def logits(z: Tensor, means: Tensor, counts: Tensor) -> Tensor:
    """[n, C]: of each class the largest -|z - m_k|^2 / 2 of any client k, without |z|^2 / 2, which all have alike."""
    K, C, d = means.shape
    there = torch.where(counts > 0, -means.square().sum(2) / 2, NOBODY)
    return (F.linear(z, means.reshape(K * C, d)).view(-1, K, C) + there).amax(1)


class NearestMeans(nn.Module):
    """The same as a part of a model that is used."""

    means: Tensor
    counts: Tensor

    def __init__(self, clients: int, classes: int, dim: int) -> None:
        super().__init__()
        for name, value in empty(clients, classes, dim).items():
            self.register_buffer(name, value)

    def forward(self, z: Tensor) -> Tensor:
        return logits(z, self.means, self.counts)


def check(config: Config, exchange: str) -> None:
    if not config.nearest:
        return
    if exchange != "model":
        raise ConfigError(f"nearest=true needs one model for all clients, and with exchange={exchange} there is none")
    for key, off in (("secure", False), ("privacy", "off"), ("robust", "off")):
        if getattr(config, key) != off:
            value = str(getattr(config, key)).lower()
            raise ConfigError(
                f"nearest=true needs the class means of each client, and {key}={value} does not give them"
            )
