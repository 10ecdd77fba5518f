"""Cutting a part off a set of samples: the same share of each class, and nothing that belongs together is cut apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def carve(labels: Ints, count: int, rng: np.random.Generator, groups: NDArray | None = None) -> tuple[Ints, Ints]:
    """Rows that stay and `count` rows that are taken, both in order. With groups (a lesion, a patient), all samples of
    one are on the same side, and as many are taken as whole groups allow: never more than `count`.

    At least one sample of each class stays where it has two, or two groups.
    """
    ids = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1]
    sizes = np.bincount(ids)
    first = np.unique(ids, return_index=True)[1]  # a group's class is that of its first sample
    wanted = _quotas(np.bincount(labels), count)
    taken = np.zeros(len(sizes), bool)
    for label, most in enumerate(wanted):
        members = rng.permutation(np.flatnonzero(labels[first] == label))
        for group in members[:-1]:  # the last one stays
            if sizes[group] <= most:
                taken[group] = True
                most -= sizes[group]
    rows = np.arange(len(labels))
    return rows[~taken[ids]], rows[taken[ids]]


def eight_of_ten(count: int) -> tuple[Ints, Ints]:
    """Of each ten samples in a row, eight stay and two are taken, as FPL, MarsFL and F2DC cut Office-Caltech."""
    rows = np.arange(count)
    return rows[rows % 10 < 8], rows[rows % 10 >= 8]


def _quotas(counts: Ints, total: int) -> Ints:
    """The total shared out in proportion, to whole numbers: the largest remainders are rounded up."""
    exact = counts * (min(total, counts.sum()) / max(1, counts.sum()))
    whole = np.floor(exact + 1e-9).astype(np.int64)
    left = min(total, int(counts.sum())) - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:left]] += 1
    return whole
