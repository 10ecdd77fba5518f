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


@pytest.mark.parametrize(
    ("allocation", "message"),
    [
        ({"b": (1, 1)}, "there is no domain 'b', only a, mnist"),
        ({"a": (2, 0)}, "a client of domain 'a' needs at least 1 sample, not 0"),
    ],
)
def test_domains_that_cannot_be(allocation, message):
    with pytest.raises(PartitionError) as caught:
        partition.domains({"a": 100, "mnist": 29}, allocation, rng())
    assert str(caught.value) == message


@quick
@given(label_arrays, seeds, st.data())
def test_with_all_classes_keeps_the_size_where_it_can(labels, seed, data):
    size = data.draw(st.integers(1, len(labels)))
    indices = rng(seed).permutation(len(labels))[:size]
    completed = partition.with_all_classes(indices, labels, rng(seed))
    assert set(labels[completed]) == set(labels)
    assert len(completed) == max(size, len(set(labels)))
    assert len(np.unique(completed)) == len(completed)


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


@pytest.mark.parametrize("clients", [7, 10, 25, 30])
def test_equalised_draws_ten_clients_together(clients, monkeypatch):
    drawn = []
    original = partition._dirichlet

    def watched(labels, together, alpha, random, wanted, attempts):
        drawn.append((len(labels), together, wanted))
        return original(labels, together, alpha, random, wanted, attempts)

    monkeypatch.setattr(partition, "_dirichlet", watched)
    partition.dirichlet_equalised(np.repeat(np.arange(10), 300), clients, 0.5, rng())
    blocks = [min(10, clients - start) for start in range(0, clients, 10)]
    assert [together for _, together, _ in drawn] == blocks
    assert [size for size, _, _ in drawn] == [3000 * together // clients for together in blocks]
    assert {wanted for _, _, wanted in drawn} == {3000 // clients // 2}


def test_equalised_cuts_the_lists_class_after_class(monkeypatch):
    """Two clients with 6 + 6 and 2 + 2 samples: the second cut begins among the last class of the first client."""
    labels = np.repeat([0, 1], 8)
    lists = [np.r_[0:6, 8:14], np.r_[6:8, 14:16]]
    monkeypatch.setattr(partition, "_dirichlet", lambda labels, *_: [part.copy() for part in lists])
    first, second = partition.dirichlet_equalised(labels, 2, 0.5, Unshuffled())
    assert first.tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert second.tolist() == [6, 7, 10, 11, 12, 13, 14, 15]


class Unshuffled:
    def permutation(self, n):
        return np.arange(n)


@pytest.mark.parametrize("cut", [partition.dirichlet, partition.dirichlet_equalised])
def test_alpha_above_zero(cut):
    for alpha in (0.0, -1.0, float("nan")):
        with pytest.raises(PartitionError, match=r"^alpha, .*, is above 0, not"):
            cut(np.zeros(100, int), 5, alpha, rng())


# nid2

CIFAR10, CIFAR100 = np.repeat(np.arange(10), 5000), np.repeat(np.arange(100), 500)


def table(labels, parts):
    """Samples of clients x classes, of the classes that there are."""
    classes = np.unique(labels)
    return np.array([[(labels[part] == c).sum() for c in classes] for part in parts])


def test_nid2_on_cifar10():
    parts = partition.nid2(CIFAR10, rng())
    assert_covers(parts, 50_000, 7)
    counts = table(CIFAR10, parts)
    assert np.array_equal(counts[:6], 2500 * np.eye(6, 10))
    assert counts[6].tolist() == [2500] * 6 + [5000] * 4


def test_nid2_on_cifar10_with_equal_sizes():
    parts = partition.nid2(CIFAR10, rng(), equal_size=True)
    assert sizes(parts) == [4545] * 7
    assert len(np.unique(np.concatenate(parts))) == 7 * 4545
    counts = table(CIFAR10, parts)
    assert np.array_equal(counts[:6], 4545 * np.eye(6, 10))
    assert counts[6].tolist() == [455] * 5 + [454] * 5


def test_nid2_on_cifar100():
    counts = table(CIFAR100, partition.nid2(CIFAR100, rng()))
    assert np.array_equal(counts[:6], 250 * np.repeat(np.eye(6, 10), 10, axis=1))
    assert counts[6].tolist() == [250] * 60 + [500] * 40
    assert sizes(partition.nid2(CIFAR100, rng(), classes_each=1, equal_size=True)) == [495] * 7
    assert sizes(partition.nid2(CIFAR100, rng(), equal_size=True)) == [4540] * 7


@quick
@given(st.lists(st.integers(2, 40), min_size=1, max_size=12), st.floats(0.01, 0.99), st.booleans(), seeds, st.data())
def test_nid2_is_exact(per_class, share, equal_size, seed, data):
    labels = rng(seed).permutation(np.repeat(3 * np.arange(len(per_class)), per_class))
    each = data.draw(st.integers(1, len(per_class)))
    biased = data.draw(st.integers(1, len(per_class) // each))

    def cut():
        return partition.nid2(labels, rng(seed), biased, each, share, equal_size)

    if equal_size and min(per_class) < 1 + len(per_class) // each + 1:  # may be too few for a sample of each class
        return
    parts = cut()
    counts = table(labels, parts)
    assert len(parts) == biased + 1
    assert same(parts, cut())
    for k in range(biased):
        assert set(np.flatnonzero(counts[k])) == set(range(k * each, (k + 1) * each))
    assert (counts[biased] > 0).all()
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    if equal_size:
        assert len(set(sizes(parts))) == 1
        assert (counts.max(1) - np.where(counts > 0, counts, counts.max()).min(1) <= 1).all()  # evenly from the classes
    else:
        assert_covers(parts, len(labels), biased + 1)
        taken = counts[:biased].sum(0)[: biased * each]
        assert (np.abs(taken - share * np.array(per_class[: biased * each])) <= 1).all()


@pytest.mark.parametrize(
    ("labels", "keys", "message"),
    [
        (np.arange(40) % 4, {}, "nid2 with 6 biased clients of 1 class each needs 6 classes, and there are 4"),
        (np.arange(40) % 9, {"classes_each": 2},
         "nid2 with 6 biased clients of 2 classes each needs 12 classes, and there are 9"),
        (CIFAR10, {"share": 1.0}, "the share of a biased client in its classes is between 0 and 1, not 1"),
        (CIFAR10, {"biased": 0}, "nid2 needs at least 1 biased client and 1 class for each, not 0 and 1"),
        (CIFAR10, {"classes_each": 0}, "nid2 needs at least 1 biased client and 1 class for each, not 6 and 0"),
        (np.r_[0:8, 0:5, 6:8], {}, "nid2 needs 2 samples of class 5, and there is 1"),
        (np.repeat(np.arange(10), 9), {"equal_size": True},
         "nid2 with equal sizes gives each client 8 samples, too few for 10 classes"),
    ],
)  # fmt: skip
def test_nid2_that_cannot_be(labels, keys, message):
    with pytest.raises(PartitionError) as caught:
        partition.nid2(labels, rng(), **keys)
    assert str(caught.value) == message


# shards


@quick
@given(label_arrays, seeds, st.data())
def test_shards_are_complete_and_have_few_classes(labels, seed, data):
    per_client = data.draw(st.integers(1, len(labels)))
    clients = data.draw(st.integers(1, len(labels) // per_client))
    parts = partition.shards(labels, clients, rng(seed), per_client)
    assert_covers(parts, len(labels), clients)
    assert max(sizes(parts)) - min(sizes(parts)) <= per_client
    assert same(parts, partition.shards(labels, clients, rng(seed), per_client))
    # a shard that ends a class and begins the next has both: all shards together have at most C - 1 of them more
    held = sum(len(set(labels[part])) for part in parts)
    assert held <= clients * per_client + len(set(labels)) - 1


def test_shards_on_cifar10():
    """100 clients, two shards of 250: one or two classes each."""
    parts = partition.shards(CIFAR10, 100, rng())
    counts = table(CIFAR10, parts)
    assert set(counts.flatten().tolist()) <= {0, 250, 500}
    assert (counts.sum(1) == 500).all()
    assert set((counts > 0).sum(1).tolist()) == {1, 2}
    assert not same(parts, partition.shards(CIFAR10, 100, rng(1)))


# long tail


@pytest.mark.parametrize(
    ("rho", "expected"),
    [
        (100, [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]),
        (50, [5000, 3237, 2096, 1357, 878, 568, 368, 238, 154, 100]),
        (10, [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500]),
        (1, [5000] * 10),
    ],
)
def test_the_long_tail_of_cifar10(rho, expected):
    kept = partition.long_tail(CIFAR10, rho, rng())
    assert np.bincount(CIFAR10[kept]).tolist() == expected
    assert len(np.unique(kept)) == len(kept) == sum(expected)


def exactly(n, rho, c, classes):
    """floor(n rho^(-c/(C-1))) in whole numbers: the largest m with m^(C-1) rho^c <= n^(C-1)."""
    return max(m for m in range(n + 1) if m ** (classes - 1) * rho**c <= n ** (classes - 1))


@pytest.mark.parametrize(("rho", "total"), [(100, 10847), (50, 12608), (10, 19573)])
def test_the_long_tail_of_cifar100(rho, total):
    counts = np.bincount(CIFAR100[partition.long_tail(CIFAR100, rho, rng())])
    assert counts.tolist() == [exactly(500, rho, c, 100) for c in range(100)]
    assert counts.sum() == total and (counts[0], counts[-1]) == (500, 500 // rho)


@quick
@given(st.integers(1, 12), st.integers(1, 60), st.integers(1, 60), seeds)
def test_long_tails_are_exact(classes, n, rho, seed):
    labels = rng(seed).permutation(np.repeat(2 * np.arange(classes), n))
    if classes > 1 and rho > n:
        with pytest.raises(PartitionError, match=rf"^rho={rho} leaves no sample of class {2 * classes - 2}: .* {n} at"):
            partition.long_tail(labels, rho, rng(seed))
        return
    kept = partition.long_tail(labels, rho, rng(seed))
    assert np.array_equal(kept, np.unique(kept))
    assert np.array_equal(kept, partition.long_tail(labels, rho, rng(seed)))
    counts = np.bincount(labels[kept])[::2].tolist()
    assert counts == [exactly(n, rho, c, classes) if classes > 1 else n for c in range(classes)]


def test_a_long_tail_of_unequal_classes_keeps_its_shape():
    """The second class is too small for 100 of the first: 91 is what all of them can follow, floor(45.5) is 45."""
    labels = np.repeat([0, 1, 2], [100, 45, 60])
    counts = np.bincount(labels[partition.long_tail(labels, 4, rng())])
    assert counts.tolist() == [91, 45, 22]


@quick
@given(st.integers(2, 12), st.integers(1, 400), st.sampled_from([1, 3, 10, 50, 100]))
def test_a_long_tail_cut_again_stays_as_it_is(classes, n, rho):
    sizes = [exactly(n, rho, c, classes) for c in range(classes)]
    if sizes[-1] > 0:
        assert len(partition.long_tail(np.repeat(np.arange(classes), sizes), rho, rng())) == sum(sizes)


@pytest.mark.parametrize("rho", [0.5, 0, -1, float("nan"), float("inf")])
def test_rho_below_one(rho):
    with pytest.raises(PartitionError, match=r"^rho, the largest class over the smallest, is at least 1, not"):
        partition.long_tail(CIFAR10, rho, rng())


# many clients

CUTS = {
    "iid": partition.iid,
    "dirichlet": lambda labels, clients, random: partition.dirichlet(labels, clients, 0.01, random),
    "equalised": lambda labels, clients, random: partition.dirichlet_equalised(labels, clients, 0.01, random),
    "shards": partition.shards,
}


@pytest.mark.parametrize("clients", [10, 20, 30, 50, 100, 1000])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_any_number_of_clients(cut, clients):
    labels = rng(1).permutation(np.repeat(np.arange(20), 600))
    before = labels.copy()
    parts = cut(labels, clients, rng(2))
    assert_covers(parts, len(labels), clients)
    assert min(sizes(parts)) >= 10
    assert np.array_equal(labels, before)


def test_more_classes_than_samples_of_a_client():
    """TinyImageNet's 200 classes over 1,000 clients with the smallest alpha: it ends, and the minimum holds."""
    labels = np.repeat(np.arange(200), 50)
    parts = partition.dirichlet(labels, 1000, 0.01, rng(), attempts=5)
    assert_covers(parts, 10_000, 1000)
    assert sizes(parts) == [10] * 1000


# not enough


@pytest.mark.parametrize(
    "cut",
    [
        lambda labels: partition.iid(labels, 8, rng()),
        lambda labels: partition.dirichlet(labels, 8, 0.5, rng(), min_samples=1),
        lambda labels: partition.dirichlet_equalised(labels, 8, 0.5, rng()),
        lambda labels: partition.shards(labels, 8, rng(), per_client=1),
    ],
    ids=["iid", "dirichlet", "equalised", "shards"],
)
def test_more_clients_than_samples(cut):
    with pytest.raises(PartitionError, match=r"^8 clients .* need 8 samples, and there are 5$"):
        cut(np.zeros(5, dtype=int))


def test_minimum_that_the_samples_cannot_meet():
    with pytest.raises(
        PartitionError, match="4 clients with at least 10 samples each need 40 samples, and there are 39"
    ):
        partition.dirichlet(np.zeros(39, dtype=int), 4, 0.5, rng())


@pytest.mark.parametrize(("clients", "minimum"), [(0, 1), (-3, 1), (5, 0)])
def test_nobody_or_nothing(clients, minimum):
    with pytest.raises(PartitionError, match=f"there is at least 1 client .*, not {clients} with {minimum}"):
        partition.dirichlet(np.zeros(39, dtype=int), clients, 0.5, rng(), minimum)
