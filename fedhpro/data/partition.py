"""Who gets which samples: pure functions from labels to one index array per client. All of them end, for any input."""

from __future__ import annotations

import numpy as np

from ..errors import PartitionError

Indices = list[np.ndarray]


def domains(
    sizes: dict[str, int], allocation: dict[str, tuple[int, int]], rng: np.random.Generator
) -> list[tuple[str, np.ndarray]]:
    """Domain skew: each client draws its samples from one domain, disjoint from the others'; client order is random."""
    clients: list[tuple[str, np.ndarray]] = []
    for name, (count, samples) in allocation.items():
        if count * samples > sizes[name]:
            raise PartitionError(
                f"{count} clients with {samples} samples each need {count * samples} samples of domain {name!r}, "
                f"which has {sizes[name]}"
            )
        order = rng.permutation(sizes[name])
        clients += [(name, order[i * samples : (i + 1) * samples]) for i in range(count)]
    return [clients[i] for i in rng.permutation(len(clients))]


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Indices:
    """Equal random shares."""
    _enough(labels, clients, 1)
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def dirichlet(
    labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, min_samples: int = 10, attempts: int = 100
) -> Indices:
    """NID1: per class, shares ~ Dir(alpha); a client that is full (N/K) gets no more of it; drawn again until every
    client has min_samples. Where no draw succeeds, the best one is kept and topped up from the largest clients.
    """
    _enough(labels, clients, min_samples)
    best = _dirichlet_once(labels, clients, alpha, rng)
    for _ in range(attempts - 1):
        if _smallest(best) >= min_samples:
            break
        best = max(best, _dirichlet_once(labels, clients, alpha, rng), key=_smallest)
    return [np.sort(part) for part in _top_up(best, min_samples, rng)]


def dirichlet_equalised(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> Indices:
    """NID1 as the authors' code cuts it: the clients' lists laid end to end and cut again into equal sizes."""
    _enough(labels, clients, 1)
    parts = dirichlet(labels, clients, alpha, rng, min_samples=len(labels) // clients // 2)
    shuffled = [rng.permutation(part) for part in parts]
    return [np.sort(part) for part in np.array_split(np.concatenate(shuffled), clients)]


def _dirichlet_once(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> Indices:
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    sizes = np.zeros(clients)
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        room = sizes < len(labels) / clients
        shares = rng.dirichlet(np.full(clients, alpha)) * room
        # a tiny alpha can put all of a class on clients that are full: then it goes to one that is not
        shares = shares / shares.sum() if shares.sum() > 0 else np.eye(clients)[rng.choice(np.flatnonzero(room))]
        cuts = (np.cumsum(shares) * len(members)).astype(int)[:-1]
        for k, piece in enumerate(np.split(members, cuts)):
            parts[k].append(piece)
            sizes[k] += len(piece)
    return [np.concatenate(pieces) for pieces in parts]


def _top_up(parts: Indices, min_samples: int, rng: np.random.Generator) -> Indices:
    parts = [rng.permutation(part) for part in parts]
    for k in range(len(parts)):
        while len(parts[k]) < min_samples:
            giver = max(range(len(parts)), key=lambda j: len(parts[j]))  # has more than min_samples: see _enough
            move = min(min_samples - len(parts[k]), len(parts[giver]) - min_samples)
            parts[k] = np.concatenate([parts[k], parts[giver][:move]])
            parts[giver] = parts[giver][move:]
    return parts


def _smallest(parts: Indices) -> int:
    return min(len(part) for part in parts)


def _enough(labels: np.ndarray, clients: int, min_samples: int) -> None:
    if len(labels) < clients * min_samples:
        raise PartitionError(
            f"{clients} clients with at least {min_samples} sample{'s' * (min_samples > 1)} each need "
            f"{clients * min_samples} samples, and there are {len(labels)}"
        )
