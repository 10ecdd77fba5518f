"""A federation's data: what each client trains on, what it holds out, and the test sets of the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import PartitionError
from ..randomness import numpy_generator
from . import partition
from .sources import Domain, Source, Split

POOLED = "all"  # the domain of a client whose samples come from several


@dataclass(frozen=True)
class Part:
    """Some rows of a split, read when they are asked for: a memory-mapped dataset stays on disk."""

    pool: Split
    rows: Tensor

    @property
    def x(self) -> Tensor:
        return self.pool.x.index_select(0, self.rows)

    @property
    def y(self) -> Tensor:
        return self.pool.y.index_select(0, self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device) -> Split:
        return Split(self.x.to(device), self.y.to(device))


Samples = Split | Part


@dataclass(frozen=True)
class ClientData:
    domain: str
    train: Samples
    held_out: Samples


def cut(
    source: Source,
    *,
    scenario: str,
    seed: int,
    clients: int = 10,
    alpha: float = 0.5,
    min_samples: int = 10,
    rho: float | None = None,
    biased: int = 6,
    classes_each: int | None = None,
    share: float = 0.5,
    equal_size: bool = False,
    shards_per_client: int = 2,
    allocation: dict[str, tuple[int, int]] | None = None,
    clients_per_domain: int | None = None,
    samples: int | None = None,
    held_out: float = 0.0,
) -> list[ClientData]:
    """The clients of a scenario; docs/scenarios.md says which argument belongs to which.

    rho: the training samples are first reduced to a long tail. allocation: {domain: (clients, samples of each)} instead
    of the source's own; clients_per_domain and samples: these numbers for every domain in it. held_out: the share of
    its own samples that a client keeps for evaluation.
    """
    rng = numpy_generator(seed, "partition")
    if scenario == "domains":
        if rho is not None:
            raise PartitionError("a long tail (rho) goes with label scenarios such as nid1, not with scenario domains")
        if not (allocation or source.allocation):
            raise PartitionError(
                f"{source.name} does not say which clients have which domain: scenario=domains needs that (with data "
                "of your own: a folder for each site, or a column site); or let it be cut: scenario=iid clients=5"
            )
        by_name = {domain.name: domain for domain in source.domains}
        sizes = {name: len(domain.train) for name, domain in by_name.items()}
        wanted = {
            name: (count if clients_per_domain is None else clients_per_domain, each if samples is None else samples)
            for name, (count, each) in (allocation or source.allocation).items()
        }
        parts = partition.domains(sizes, wanted, rng)
        if source.complete:
            classes = {name: domain.train.y.numpy() for name, domain in by_name.items()}
            parts = [(name, partition.with_all_classes(indices, classes[name], rng)) for name, indices in parts]
        owned = [(name, by_name[name].train, indices) for name, indices in parts]
    else:
        pool, name = pooled(source.domains)
        labels = pool.y.numpy()
        kept = np.arange(len(labels))
        if rho is not None:
            kept = partition.long_tail(labels, rho, numpy_generator(seed, "long-tail"))
            labels = labels[kept]
        if scenario == "iid":
            cuts = partition.iid(labels, clients, rng)
        elif scenario == "nid1":
            cuts = partition.dirichlet(labels, clients, alpha, rng, min_samples)
        elif scenario == "nid1-equalised":
            cuts = partition.dirichlet_equalised(labels, clients, alpha, rng)
        elif scenario == "ag-nid":
            cuts = partition.ag_nid(labels, clients, rng)
        elif scenario == "nid2":
            cuts = partition.nid2(labels, rng, biased, classes_each, share, equal_size)
        elif scenario == "shards":
            cuts = partition.shards(labels, clients, rng, shards_per_client)
        else:
            raise PartitionError(f"there is no scenario {scenario!r}")
        owned = [(name, pool, kept[indices]) for indices in cuts]
    return [
        _hold_out(name, split, rows, held_out, numpy_generator(seed, "held-out", k))
        for k, (name, split, rows) in enumerate(owned)
    ]


def merged(clients: Sequence[ClientData]) -> ClientData:
    """Everybody's samples at one client: centralised training."""
    names = {client.domain for client in clients}
    return ClientData(
        domain=names.pop() if len(names) == 1 else POOLED,
        train=_join([client.train for client in clients]),
        held_out=_join([client.held_out for client in clients]),
    )


def pooled(domains: Sequence[Domain]) -> tuple[Split, str]:
    if len(domains) == 1:
        return domains[0].train, domains[0].name
    return _join([domain.train for domain in domains]), POOLED


def _hold_out(domain: str, pool: Split, rows: np.ndarray, share: float, rng: np.random.Generator) -> ClientData:
    order = rng.permutation(len(rows))
    kept = min(len(rows) - 1, round(share * len(rows)))  # at least one sample is left to train on
    train, held = (torch.from_numpy(rows[np.sort(part)]) for part in (order[kept:], order[:kept]))
    return ClientData(domain, Part(pool, train), Part(pool, held))


def _join(splits: Sequence[Samples]) -> Split:
    return Split(torch.cat([split.x for split in splits]), torch.cat([split.y for split in splits]))
