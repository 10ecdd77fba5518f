"""Client-level differential privacy of everything that leaves: clipping, Gaussian noise, and how much was spent.

What a client sends is a change of the model and, with most methods, a report (class gradients, prototypes, soft
predictions). Each of these G groups is clipped to a norm of its own, c, and noised with standard deviation
z sqrt(G) c: together they are one Gaussian mechanism with the noise multiplier z. What says something without being
needed is withheld: which classes a client holds and how many samples (all clients count the same, and a class that a
client lacks adds zero), its losses, and its accuracy.

`central`: clients send what they have, and the server, which is trusted, clips and adds noise to the sum. Protected
from whoever sees the models: that a client took part at all (its contribution replaced by nothing).
`local`: the client clips and adds noise before anything leaves, so that the server need not be trusted. Protected: any
two datasets of the client, which costs twice the sensitivity. It takes far more noise for the same epsilon.
"""

from __future__ import annotations

import bisect
import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from . import wire
from .config import unseen_tests
from .data.sources import SITES
from .errors import ConfigError
from .methods.base import Tensors
from .randomness import generator

if TYPE_CHECKING:
    from .config import Config
    from .federation import Federation


@dataclass(frozen=True)
class Privacy:
    where: Literal["central", "local"]
    clip: float
    clip_report: float
    noise: float
    delta: float
    budget: float | None
    seed: int | None  # None: noise that nobody can draw again

    @classmethod
    def of(cls, config: Config) -> Privacy | None:
        if config.privacy == "off":
            return None
        seed = None if config.data == SITES else config.seed  # clients of a deployment know the seed
        c = config
        return cls(c.privacy, c.clip, c.clip_report, c.noise, c.delta, c.epsilon, seed)  # type: ignore[arg-type]

    def rng(self, *purpose: str | int) -> torch.Generator | None:
        """Of the run's seed, or None for the operating system's: a generator of torch can be found by its 32 bits."""
        return None if self.seed is None else generator(self.seed, "privacy", *purpose)

    def bounds(self, model: Tensors, report: Tensors) -> list[tuple[Tensors, float]]:
        """The groups of what leaves, and the norm that each is clipped to."""
        return [(group, bound) for group, bound in ((model, self.clip), (report, self.clip_report)) if group]

    def deviation(self, bound: float, groups: int) -> float:
        return self.noise * math.sqrt(groups) * bound

    # what is spent

    def epsilon(self, rounds: int) -> float:
        """Of a client that took part in so many rounds.

        That it was drawn from many in a round saves nothing: who was asked is known, from the seed and the records.
        """
        multiplier = self.noise / 2 if self.where == "local" else self.noise
        if multiplier < 1e-100:  # its square is what counts, and would be 0
            return math.inf if rounds else 0.0
        return _epsilon(multiplier, rounds, self.delta) if rounds else 0.0

    def check(self, federation: Federation) -> None:
        """What this does not go with, and a budget that is too small for the rounds."""
        c, what = federation.config, f"privacy={self.where}"
        if federation.exchange == "nothing" or federation.method.pools_data:
            raise ConfigError(f"{what}: with method={c.method} nothing leaves a client")
        if c.weights != "equal":
            raise ConfigError(f"{what}: all clients must count the same, or their sizes would show: weights=equal")
        if c.evaluation not in ("central", "off"):
            raise ConfigError(
                f"{what}: evaluation={c.evaluation} would tell every client's accuracy without noise: "
                + unseen_tests(c)
            )
        if self.where == "central" and c.robust != "off":
            raise ConfigError(f"{what}: what is released must be a noised sum, and robust={c.robust} makes no sum")
        if other := sorted(name for name in held(federation.upload) if name != "counts"):
            raise ConfigError(f"{what}: method={c.method} reports {other[0]}, which cannot be noised")
        for name, value in federation.upload.items():
            if name.startswith("report/") and value.dim() == 0:
                raise ConfigError(
                    f"{what}: method={c.method} reports {name.removeprefix('report/')}, a single number, which noise "
                    "would drown; fedhpro-plus has none with agreed=false"
                )
        self.check_budget(federation)

    def check_budget(self, federation: Federation) -> None:
        """Of all rounds, those that were run again after a crash among them."""
        rounds = federation.config.rounds
        if not math.isfinite(spent := self.epsilon(federation.most_releases(rounds))):
            raise ConfigError(f"noise={self.noise:g} protects nobody: epsilon would be infinite")
        if self.budget is not None and spent > self.budget:
            allowed = bisect.bisect_right(
                range(1, rounds + 1), self.budget, key=lambda n: self.epsilon(federation.most_releases(n))
            )
            raise ConfigError(
                f"epsilon={self.budget:g}: {rounds} rounds with noise={self.noise:g} cost {spent:.2f}, and the "
                f"budget is spent after {allowed}: fewer rounds, more noise, or a larger budget"
            )

    # the client, with local noise

    def leave(self, round: int, client: int, upload: Tensors, received: Tensors) -> Tensors:
        """The upload as it may leave: clipped and noised; with central noise, as it is."""
        if self.where == "central":
            return upload
        rng = self.rng("client", round, client)
        model = {name: upload[name] - received[name] for name in upload if name.startswith("model/")}
        report = {
            name: value for name, value in upload.items() if name.startswith("report/") and value.is_floating_point()
        }
        groups, sent = self.bounds(model, report), withheld(upload)
        for group, bound in groups:
            sent |= noised(clipped(group, bound), self.deviation(bound, len(groups)), rng)
        return sent | wire.non_negative({name: received[name] + sent[name] for name in model})


class PrivateSum:
    """The fold of central noise: the sum of clipped uploads, and noise, over the number of clients that were asked."""

    note: Mapping[str, Any] = {}

    def __init__(self, privacy: Privacy, start: Tensors, asked: int, rng: torch.Generator | None) -> None:
        self.privacy, self.start, self.asked, self.rng = privacy, start, asked, rng
        self.count = 0
        self.model: Tensors = {}
        self.report: Tensors = {}
        self.held: Tensors = {}

    def add(self, client: int, model: Tensors, report: Tensors) -> None:
        change = {name: value.cpu() - self.start[name] for name, value in model.items()}
        floats = {name: value.cpu() for name, value in report.items() if value.is_floating_point()}
        for total, group, bound in (
            (self.model, change, self.privacy.clip),
            (self.report, floats, self.privacy.clip_report),
        ):
            for name, value in clipped(group, bound).items():
                total[name] = total[name].add_(value) if name in total else value.clone()
        self.held = {name: value for name, value in report.items() if not value.is_floating_point()}
        self.count += 1

    def result(self) -> tuple[Tensors, Tensors]:
        groups = self.privacy.bounds(self.model, self.report)
        found = Tensors()
        for group, bound in groups:
            found |= noised(group, self.privacy.deviation(bound, len(groups)), self.rng)
        mean = {name: value / self.asked for name, value in found.items()}
        model = wire.non_negative({name: self.start[name] + mean[name] for name in self.model})
        report = {name: mean[name] for name in self.report}
        report |= {name: torch.full_like(value, self.asked) for name, value in self.held.items()}
        return model, {name: value[None] for name, value in report.items()}


def clipped(tensors: Tensors, bound: float) -> Tensors:
    """All of them together scaled to that norm, where it is larger."""
    if not tensors:
        return {}
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in tensors.values()))
    if not math.isfinite(norm):  # it has no length to be scaled to: nothing of it leaves
        return {name: torch.zeros_like(value) for name, value in tensors.items()}
    factor = min(1.0, bound / norm) if norm > 0 else 1.0
    return {name: value * factor for name, value in tensors.items()}


def noised(tensors: Tensors, deviation: float, rng: torch.Generator | None) -> Tensors:
    return {name: value + deviation * normal(value.shape, rng).to(value) for name, value in sorted(tensors.items())}


def normal(shape: torch.Size, rng: torch.Generator | None) -> Tensor:
    """Standard normal numbers; without a generator, from the operating system's random bytes (Box and Muller)."""
    if rng is not None:
        return torch.randn(shape, generator=rng)
    pairs = (shape.numel() + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64).reshape(2, pairs)
    uniform = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53  # above 0 and below 1
    radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]
    found = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: shape.numel()]
    return torch.from_numpy(found).view(shape)


def withheld(upload: Tensors) -> Tensors:
    """An upload of the same form that says nothing: one sample of every class, no losses."""
    blank = {
        name: torch.zeros_like(value) if value.is_floating_point() else torch.ones_like(value)
        for name, value in upload.items()
    }
    most = max([1, *(int(value.sum()) for value in held(blank).values())])
    return blank | {"samples": torch.full_like(upload["samples"], most)}


def held(upload: Tensors) -> Tensors:
    """The whole numbers of a report: who holds what."""
    return {
        name.removeprefix("report/"): value
        for name, value in upload.items()
        if name.startswith("report/") and not value.is_floating_point()
    }


@functools.lru_cache(maxsize=4096)
def _epsilon(multiplier: float, rounds: int, delta: float) -> float:
    try:
        from dp_accounting import GaussianDpEvent, rdp
    except ModuleNotFoundError:
        raise ConfigError("privacy needs an accountant: pip install 'fedhpro[privacy]'") from None
    return float(rdp.RdpAccountant().compose(GaussianDpEvent(multiplier), rounds).get_epsilon(delta))
