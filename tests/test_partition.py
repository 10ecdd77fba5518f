"""Partitions: whatever the labels, every sample goes to one client, minima hold, and the cut ends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhpro.data import partition
from fedhpro.errors import PartitionError

quick = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)
alphas = st.sampled_from([1e-300, 0.01, 0.1, 0.5, 5.0, 1e6])
# label values with gaps, so that absent classes and a single class come up
label_arrays = st.lists(st.sampled_from([0, 1, 4, 9]), min_size=1, max_size=120).map(np.array)


@st.composite
def federations(draw, largest_minimum=12):
    """Labels, and clients and a minimum that they are enough for."""
    labels = draw(label_arrays)
    clients = draw(st.integers(1, len(labels)))
    return labels, clients, draw(st.integers(1, min(largest_minimum, len(labels) // clients)))


def rng(seed=0):
    return np.random.default_rng(seed)


def sizes(parts):
    return [len(part) for part in parts]


def assert_covers(parts, n, clients):
    """Every sample once, over the right number of clients, each one's in order."""
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))
    assert all(np.array_equal(part, np.sort(part)) for part in parts)


def same(a, b):
    return all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


def skew(labels, parts):
    """Mean share of a client's most frequent class: 1 where each client has a single one."""
    return np.mean([np.bincount(labels[part]).max() / len(part) for part in parts])


# domains


@quick
@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 6), st.integers(1, 9))), st.data())
def test_domains_are_disjoint_and_exact(allocation, data):
    spare = {name: data.draw(st.integers(0, 10)) for name in allocation}
    available = {name: count * samples + spare[name] for name, (count, samples) in allocation.items()}
    clients = partition.domains(available, allocation, rng(data.draw(seeds)))
    assert len(clients) == sum(count for count, _ in allocation.values())
    for name, (count, samples) in allocation.items():
        own = [indices for domain, indices in clients if domain == name]
        assert sizes(own) == [samples] * count
        drawn = np.concatenate(own)
        assert len(np.unique(drawn)) == len(drawn)
        assert drawn.min() >= 0 and drawn.max() < available[name]


def test_domains_clients_come_in_random_order_and_by_seed():
    def names(seed):
        return [name for name, _ in partition.domains({"a": 50, "b": 50}, {"a": (10, 5), "b": (10, 5)}, rng(seed))]

    assert names(0) == names(0)
    assert names(0) != names(1)
    assert names(0) != ["a"] * 10 + ["b"] * 10


def test_domains_without_enough_samples():
    with pytest.raises(PartitionError) as caught:
        partition.domains({"a": 100, "mnist": 29}, {"a": (1, 1), "mnist": (3, 10)}, rng())
    assert str(caught.value) == "3 clients with 10 samples each need 30 samples of domain 'mnist', which has 29"


# iid


@quick
@given(federations(), seeds)
def test_iid_is_complete_and_even(federation, seed):
    labels, clients, _ = federation
    parts = partition.iid(labels, clients, rng(seed))
    assert_covers(parts, len(labels), clients)
    assert max(sizes(parts)) - min(sizes(parts)) <= 1


# dirichlet


@quick
@given(federations(), alphas, seeds)
def test_dirichlet_is_complete_and_keeps_the_minimum(federation, alpha, seed):
    labels, clients, minimum = federation
    parts = partition.dirichlet(labels, clients, alpha, rng(seed), minimum, attempts=3)
    assert_covers(parts, len(labels), clients)
    assert min(sizes(parts)) >= minimum


@quick
@given(st.integers(1, 8), st.integers(1, 12), seeds, st.data())
def test_topping_up_takes_nobody_below_the_minimum(clients, minimum, seed, data):
    """The tightest case: exactly clients * minimum samples, handed out anyhow."""
    owners = data.draw(st.lists(st.integers(0, clients - 1), min_size=clients * minimum, max_size=clients * minimum))
    parts = [np.flatnonzero(np.array(owners) == k) for k in range(clients)]
    topped = partition._top_up(parts, minimum, rng(seed))
    assert sizes(topped) == [minimum] * clients
    assert np.array_equal(np.sort(np.concatenate(topped)), np.arange(clients * minimum))


def test_dirichlet_depends_on_the_seed_alone():
    labels = rng(1).integers(0, 10, 600)
    for cut in (partition.dirichlet, partition.dirichlet_equalised):
        assert same(cut(labels, 10, 0.5, rng(3)), cut(labels, 10, 0.5, rng(3)))
        assert not same(cut(labels, 10, 0.5, rng(3)), cut(labels, 10, 0.5, rng(4)))


@pytest.mark.parametrize("minimum", [1, 3])
def test_dirichlet_ends_for_a_thousand_clients(minimum):
    labels = rng(1).integers(0, 10, 3000)
    parts = partition.dirichlet(labels, 1000, 0.01, rng(), minimum)
    assert_covers(parts, 3000, 1000)
    assert min(sizes(parts)) >= minimum


def test_dirichlet_with_a_large_alpha_is_nearly_uniform():
    labels = np.repeat(np.arange(5), 200)
    for part in partition.dirichlet(labels, 10, 1e6, rng()):
        assert np.abs(np.bincount(labels[part], minlength=5) - 20).max() <= 2


def test_dirichlet_is_more_skewed_for_a_smaller_alpha():
    labels = np.repeat(np.arange(10), 200)

    def mean_skew(alpha):
        return np.mean([skew(labels, partition.dirichlet(labels, 10, alpha, rng(seed))) for seed in range(5)])

    assert mean_skew(0.05) > mean_skew(0.5) + 0.1 > mean_skew(100.0) + 0.2


def test_dirichlet_gives_a_full_client_no_more():
    """Nobody who had N/K gets another class: the overhang is at most one class's."""
    labels = np.repeat(np.arange(20), 50)
    for seed in range(20):
        parts = partition.dirichlet(labels, 5, 0.1, rng(seed), min_samples=1)
        assert max(sizes(parts)) <= 1000 / 5 + 50 + 20  # N/K, one class, and one per class for rounding


# dirichlet_equalised


@quick
@given(federations(), alphas, seeds)
def test_equalised_is_complete_and_even(federation, alpha, seed):
    labels, clients, _ = federation
    parts = partition.dirichlet_equalised(labels, clients, alpha, rng(seed))
    assert_covers(parts, len(labels), clients)
    assert max(sizes(parts)) - min(sizes(parts)) <= 1


def test_equalised_is_still_skewed():
    labels = np.repeat(np.arange(10), 100)
    equalised, iid = partition.dirichlet_equalised(labels, 10, 0.1, rng()), partition.iid(labels, 10, rng())
    assert skew(labels, equalised) > skew(labels, iid) + 0.2


# not enough


@pytest.mark.parametrize(
    "cut",
    [
        lambda labels: partition.iid(labels, 8, rng()),
        lambda labels: partition.dirichlet(labels, 8, 0.5, rng(), min_samples=1),
        lambda labels: partition.dirichlet_equalised(labels, 8, 0.5, rng()),
    ],
    ids=["iid", "dirichlet", "equalised"],
)
def test_more_clients_than_samples(cut):
    with pytest.raises(PartitionError, match=r"^8 clients .* need 8 samples, and there are 5$"):
        cut(np.zeros(5, dtype=int))


def test_minimum_that_the_samples_cannot_meet():
    with pytest.raises(
        PartitionError, match="4 clients with at least 10 samples each need 40 samples, and there are 39"
    ):
        partition.dirichlet(np.zeros(39, dtype=int), 4, 0.5, rng())
