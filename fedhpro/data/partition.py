"""Who gets which samples: pure functions from labels to one index array per client. All of them end, for any input."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from ..errors import PartitionError

Indices = list[np.ndarray]


def domains(
    sizes: dict[str, int], allocation: dict[str, tuple[int, int]], rng: np.random.Generator
) -> list[tuple[str, np.ndarray]]:
    """Domain skew: each client draws its samples from one domain, disjoint from the others'; client order is random."""
    clients: list[tuple[str, np.ndarray]] = []
    for name, (count, samples) in allocation.items():
        if name not in sizes:
            raise PartitionError(f"there is no domain {name!r}, only {', '.join(sizes)}")
        if samples < 1:
            raise PartitionError(f"a client of domain {name!r} needs at least 1 sample, not {samples}")
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
    parts = _dirichlet(labels, clients, alpha, rng, min_samples, attempts)
    return [np.sort(part) for part in _top_up(parts, min_samples, rng)]


BLOCK = 10  # clients that the authors' code draws together


def dirichlet_equalised(
    labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, attempts: int = 100
) -> Indices:
    """NID1 as the authors' code cuts it: random samples for every ten clients, drawn as in `dirichlet` until each of
    them has half the mean; then the clients' lists, class after class, laid end to end and cut into equal sizes. Where
    no draw succeeds, the best one is kept; fewer than ten clients are one block.
    """
    _enough(labels, clients, 1)
    starts = np.arange(0, clients, BLOCK)
    blocks = np.split(rng.permutation(len(labels)), starts[1:] * len(labels) // clients)
    lists = []
    for start, block in zip(starts, blocks, strict=True):
        together = min(BLOCK, clients - int(start))
        parts = _dirichlet(labels[block], together, alpha, rng, len(block) // together // 2, attempts)
        lists += [block[part] for part in parts]
    return [np.sort(part) for part in np.array_split(np.concatenate(lists), clients)]


def nid2(
    labels: np.ndarray,
    rng: np.random.Generator,
    biased: int = 6,
    classes_each: int | None = None,
    share: float = 0.5,
    equal_size: bool = False,
) -> Indices:
    """NID2: biased clients with a few classes each, the first one with the first classes and so on, then one client
    with all classes. The biased take a share of every class of theirs, the last client takes the rest.

    equal_size: all clients get the same number, the largest possible, as evenly from their classes as it divides; the
    share is what comes out, and some samples are nobody's. classes_each: a tenth of the classes unless given.
    """
    classes, counts = np.unique(labels, return_counts=True)
    each = max(1, len(classes) // 10) if classes_each is None else classes_each
    owned = biased * each
    if biased < 1 or each < 1:
        raise PartitionError(f"nid2 needs at least 1 biased client and 1 class for each, not {biased} and {each}")
    if owned > len(classes):
        raise PartitionError(
            f"nid2 with {biased} biased clients of {each} class{'es' * (each > 1)} each needs {owned} classes, and "
            f"there are {len(classes)}"
        )
    if not 0 < share < 1:
        raise PartitionError(f"the share of a biased client in its classes is between 0 and 1, not {share:g}")
    if counts[:owned].min() < 2:
        raise PartitionError(f"nid2 needs 2 samples of class {classes[counts[:owned].argmin()]}, and there is 1")
    if equal_size:
        taken, rest = _equal_sizes(counts, biased, each)
    else:
        taken = np.clip(np.round(share * counts).astype(int), 1, counts - 1)
        taken[owned:] = 0
        rest = counts - taken
    parts: list[list[np.ndarray]] = [[] for _ in range(biased + 1)]
    for i, c in enumerate(classes):
        members = rng.permutation(np.flatnonzero(labels == c))
        parts[min(i // each, biased)].append(members[: taken[i]])
        parts[biased].append(members[taken[i] : taken[i] + rest[i]])
    return [np.sort(np.concatenate(pieces)) for pieces in parts]


def shards(labels: np.ndarray, clients: int, rng: np.random.Generator, per_client: int = 2) -> Indices:
    """The samples sorted by label, cut into equal shards, and so many dealt to each client (McMahan et al. 2017)."""
    _enough(labels, clients, per_client)
    order = rng.permutation(len(labels))
    pieces = np.array_split(order[np.argsort(labels[order], kind="stable")], clients * per_client)
    hands = rng.permutation(len(pieces)).reshape(clients, per_client)
    return [np.sort(np.concatenate([pieces[i] for i in hand])) for hand in hands]


def long_tail(labels: np.ndarray, rho: float, rng: np.random.Generator) -> np.ndarray:
    """A random subset whose c-th class of C has floor(n rho^(-c/(C-1))) samples: rho is the first class over the last.

    n is the size of the first class; it is less where a later class is too small for that.
    """
    if not 1 <= rho < np.inf:
        raise PartitionError(f"rho, the largest class over the smallest, is at least 1, not {rho:g}")
    _enough(labels, 1, 1)
    classes, counts = np.unique(labels, return_counts=True)
    shape = rho ** (-np.arange(len(classes)) / max(1, len(classes) - 1))
    largest = int(min(counts[0], np.ceil(((counts + 1 - 2e-9) / shape).min()) - 1))  # whose floors all classes can fill
    sizes = np.floor(largest * shape + 1e-9).astype(int)  # 5000 * 0.01 must not be 49
    if sizes[-1] < 1:
        raise PartitionError(
            f"rho={rho:g} leaves no sample of class {classes[-1]}: the largest class would have {largest}, so that rho "
            f"can be {largest} at most"
        )
    kept = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(classes, sizes, strict=True)]
    return np.sort(np.concatenate(kept))


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


def _dirichlet(
    labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, wanted: int, attempts: int
) -> Indices:
    """The first draw that gives everyone the wanted number, or else the one with the largest smallest client; in each
    client's list, class after class.
    """
    if not alpha > 0:
        raise PartitionError(f"alpha, the concentration of the Dirichlet distribution, is above 0, not {alpha:g}")
    members = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    best, smallest = _draw(members, clients, alpha, rng)
    for _ in range(attempts - 1):
        if smallest >= wanted:
            break
        other, size = _draw(members, clients, alpha, rng)
        if size > smallest:
            best, smallest = other, size
    pieces = [np.split(own, cuts) for own, cuts in best]
    return [np.concatenate(of_client) for of_client in zip(*pieces, strict=True)]


def _draw(
    members: Indices, clients: int, alpha: float, rng: np.random.Generator
) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """Each class in random order and where it is cut, and the size of the smallest client."""
    full = sum(map(len, members)) / clients
    sizes = np.zeros(clients, dtype=int)
    drawn = []
    for own in members:
        own = rng.permutation(own)
        room = sizes < full
        shares = rng.dirichlet(np.full(clients, alpha)) * room
        # a tiny alpha can put all of a class on clients that are full: then it goes to one that is not
        shares = shares / shares.sum() if shares.sum() > 0 else np.eye(clients)[rng.choice(np.flatnonzero(room))]
        cuts = (np.cumsum(shares) * len(own)).astype(int)[:-1]
        drawn.append((own, cuts))
        sizes += np.diff(cuts, prepend=0, append=len(own))
    return drawn, int(sizes.min())


def _top_up(parts: Indices, min_samples: int, rng: np.random.Generator) -> Indices:
    parts = [rng.permutation(part) for part in parts]
    for k in range(len(parts)):
        while len(parts[k]) < min_samples:
            giver = max(range(len(parts)), key=lambda j: len(parts[j]))  # has more than min_samples: see _enough
            move = min(min_samples - len(parts[k]), len(parts[giver]) - min_samples)
            parts[k] = np.concatenate([parts[k], parts[giver][:move]])
            parts[giver] = parts[giver][move:]
    return parts


def _equal_sizes(counts: np.ndarray, biased: int, each: int) -> tuple[np.ndarray, np.ndarray]:
    """How many of each class go to the biased clients and to the unbiased one, for clients of one size."""

    def needed(size: int) -> tuple[np.ndarray, np.ndarray]:
        taken = np.zeros_like(counts)
        taken[: biased * each] = np.tile(_evenly(size, each), biased)
        return taken, _evenly(size, len(counts))

    size = bisect_left(range(counts.sum()), True, key=lambda size: bool((sum(needed(size)) > counts).any())) - 1
    if size < len(counts):
        raise PartitionError(
            f"nid2 with equal sizes gives each client {size} samples, too few for {len(counts)} classes"
        )
    return needed(size)


def _evenly(total: int, parts: int) -> np.ndarray:
    return total // parts + (np.arange(parts) < total % parts)


def _enough(labels: np.ndarray, clients: int, min_samples: int) -> None:
    if clients < 1 or min_samples < 1:
        raise PartitionError(f"there is at least 1 client with at least 1 sample, not {clients} with {min_samples}")
    if len(labels) < clients * min_samples:
        raise PartitionError(
            f"{clients} clients with at least {min_samples} sample{'s' * (min_samples > 1)} each need "
            f"{clients * min_samples} samples, and there are {len(labels)}"
        )
