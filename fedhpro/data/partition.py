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


def with_all_classes(indices: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The same number of samples with every class among them: for each missing class a random sample comes in, and one
    of a class that has several goes. What comes in may be another client's as well.
    """
    chosen = list(indices)
    for c in np.setdiff1d(np.unique(labels), labels[indices]):
        held, counts = np.unique(labels[chosen], return_counts=True)
        if counts.max() > 1:
            spare = np.flatnonzero(np.isin(labels[chosen], held[counts > 1]))
            chosen.pop(rng.choice(spare))
        chosen.append(rng.choice(np.flatnonzero(labels == c)))
    return np.array(chosen)


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


# AG-NID: clients in all -> those with two classes; the pairs in rotation, so that among 40 each class is in 20
AG_NID = {10: 5, 50: 40}
AG_NID_PAIRS = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2))


def ag_nid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Indices:
    """AG-NID: first the clients with two of the four classes (5 of 10, or 40 of 50), then those with all four.

    A client with four classes gets 1/K of each class, hence of the data. What is left of a class is split evenly over
    the two-class clients that have it: 20 each for K = 50, which makes all clients equal in size; 3, 2, 2 and 3 for
    K = 10, whose two-class clients are 25/24 and, with the pair (0, 3), 5/6 of N/K. Sizes are exact up to rounding.
    """
    if clients not in AG_NID:
        raise PartitionError(f"ag-nid is made for 10 or 50 clients, not for {clients}")
    classes, counts = np.unique(labels, return_counts=True)
    if not np.array_equal(classes, np.arange(4)):
        raise PartitionError(f"ag-nid is made for the classes 0 to 3, and the labels are {classes.tolist()}")
    if counts.min() < clients:
        raise PartitionError(
            f"ag-nid with {clients} clients needs {clients} samples of each class, and class {counts.argmin()} has "
            f"{counts.min()}"
        )
    pairs = [AG_NID_PAIRS[k % len(AG_NID_PAIRS)] for k in range(AG_NID[clients])]
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for c in range(4):
        members = rng.permutation(np.flatnonzero(labels == c))
        fours = range(len(pairs), clients)
        cut = round(len(members) * len(fours) / clients)
        pieces = np.array_split(members[:cut], len(fours))
        owners = [k for k, pair in enumerate(pairs) if c in pair]
        pieces += np.array_split(members[cut:], len(owners))
        for k, piece in zip([*fours, *owners], pieces, strict=True):
            parts[k].append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in parts]


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
