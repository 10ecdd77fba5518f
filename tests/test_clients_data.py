"""A federation's data: every scenario's clients, what they hold out, and all of them as one."""

import dataclasses

import pytest
import torch

from fedhpro.data.clients import POOLED, cut, merged, pooled
from fedhpro.data.sources import Domain, Source, Split
from fedhpro.errors import PartitionError

SIZES = {"a": 60, "b": 40}
ALLOCATION = {"a": (3, 15), "b": (2, 20)}


def split(n, offset):
    """Random images of three classes whose first two pixels are their number, so that each is told from the others."""
    x = torch.randint(0, 256, (n, 1, 2, 3), generator=torch.Generator().manual_seed(offset), dtype=torch.uint8)
    number = torch.arange(offset, offset + n)
    x[:, 0, 0, 0], x[:, 0, 0, 1] = number // 256, number % 256
    return Split(x, number % 3)


def source(*names):
    starts = {"a": 0, "b": 1000}
    domains = tuple(
        Domain(name, split(SIZES[name], starts[name]), split(5, 5000), split(5, 6000), real=False, about="noise")
        for name in names
    )
    return Source("noise", domains, ("0", "1", "2"), {name: ALLOCATION[name] for name in names})


BOTH = source("a", "b")


def numbers(part):
    """The samples of a split by number, after a look at their labels."""
    found = [256 * int(x[0, 0, 0]) + int(x[0, 0, 1]) for x in part.x]
    assert part.y.tolist() == [number % 3 for number in found]
    return found


def owned(client):
    return numbers(client.train) + numbers(client.held_out)


def all_numbers(clients):
    return [number for client in clients for number in owned(client)]


def same(a, b):
    return [(c.domain, owned(c)) for c in a] == [(c.domain, owned(c)) for c in b]


EVERYTHING = sorted([*range(60), *range(1000, 1040)])
NID2 = {"biased": 2}  # three classes are too few for six biased clients
SCENARIOS = ["domains", "iid", "nid1", "nid1-equalised", "nid2", "shards"]


def test_domains_take_the_allocation_of_the_source():
    clients = cut(BOTH, scenario="domains", seed=0)
    assert sorted((c.domain, len(c.train)) for c in clients) == [("a", 15)] * 3 + [("b", 20)] * 2
    for client in clients:
        assert {number // 1000 for number in numbers(client.train)} == {"ab".index(client.domain)}
    assert len(set(all_numbers(clients))) == 85


def test_domains_with_an_allocation_of_its_own():
    clients = cut(BOTH, scenario="domains", seed=0, allocation={"b": (4, 10)})
    assert [(c.domain, len(c.train)) for c in clients] == [("b", 10)] * 4
    assert sorted(all_numbers(clients)) == list(range(1000, 1040))


def test_domains_with_other_numbers():
    def sizes(**keys):
        return sorted((c.domain, len(c.train)) for c in cut(BOTH, scenario="domains", seed=0, **keys))

    assert sizes(samples=7) == [("a", 7)] * 3 + [("b", 7)] * 2
    assert sizes(clients_per_domain=1) == [("a", 15), ("b", 20)]
    assert sizes(clients_per_domain=4, samples=9, allocation={"b": (1, 1)}) == [("b", 9)] * 4
    with pytest.raises(PartitionError, match="3 clients with 21 samples each need 63 samples of domain 'a', which has"):
        sizes(samples=21)


def test_a_source_without_an_allocation():
    alone = dataclasses.replace(BOTH, allocation={})
    with pytest.raises(PartitionError, match=r"noise does not say which clients have which .*: scenario=iid clients=5"):
        cut(alone, scenario="domains", seed=0)
    assert len(cut(alone, scenario="iid", seed=0)) == 10


@pytest.mark.parametrize("scenario", ["iid", "nid1", "nid1-equalised"])
def test_pooled_scenarios_share_out_everything(scenario):
    clients = cut(BOTH, scenario=scenario, seed=0, clients=7, min_samples=5)
    assert len(clients) == 7
    assert {client.domain for client in clients} == {POOLED}
    assert sorted(all_numbers(clients)) == EVERYTHING
    sizes = [len(client.train) for client in clients]
    assert min(sizes) >= 5
    if scenario != "nid1":
        assert max(sizes) - min(sizes) <= 1


def test_alpha_and_min_samples_reach_the_partition():
    def classes(alpha):
        clients = cut(BOTH, scenario="nid1", seed=0, clients=5, alpha=alpha, min_samples=3)
        return sum(len(client.train.y.unique()) for client in clients)

    assert classes(0.01) < classes(1e6) == 15
    assert [len(c.train) for c in cut(BOTH, scenario="nid1", seed=0, clients=5, min_samples=20)] == [20] * 5
    with pytest.raises(
        PartitionError, match="5 clients with at least 21 samples each need 105 samples, and there are 100"
    ):
        cut(BOTH, scenario="nid1", seed=0, clients=5, min_samples=21)


def by_class(clients):
    return [client.train.y.bincount(minlength=3).tolist() for client in clients]


def test_nid2_keys_reach_the_partition():
    """33, 34 and 33 samples of the classes."""
    assert by_class(cut(BOTH, scenario="nid2", seed=0, biased=2)) == [[16, 0, 0], [0, 17, 0], [17, 17, 33]]
    assert by_class(cut(BOTH, scenario="nid2", seed=0, biased=1, classes_each=2, share=0.1)) == [
        [3, 3, 0],
        [30, 31, 33],
    ]
    equal = cut(BOTH, scenario="nid2", seed=0, biased=3, equal_size=True)
    assert by_class(equal) == [[24, 0, 0], [0, 24, 0], [0, 0, 24], [8, 8, 8]]
    assert {client.domain for client in equal} == {POOLED}


def test_shards_reach_the_partition():
    one = by_class(cut(BOTH, scenario="shards", seed=0, clients=3, shards_per_client=1))
    assert sorted(one) == [[0, 0, 33], [0, 33, 0], [33, 1, 0]]
    assert sum(map(sum, by_class(cut(BOTH, scenario="shards", seed=0, clients=4)))) == 100


# long tail


@pytest.mark.parametrize("scenario", ["iid", "nid1", "nid1-equalised", "nid2", "shards"])
def test_a_long_tail_comes_before_the_cut(scenario):
    """rho = 4 on 33, 34, 33: 33, 16 and 8 are left, the same ones in every scenario."""
    clients = cut(BOTH, scenario=scenario, seed=0, clients=4, min_samples=2, rho=4, **NID2)
    assert [sum(counts) for counts in zip(*by_class(clients), strict=True)] == [33, 16, 8]
    assert set(all_numbers(clients)) == set(all_numbers(cut(BOTH, scenario="iid", seed=0, clients=2, rho=4)))
    assert set(all_numbers(clients)) != set(all_numbers(cut(BOTH, scenario="iid", seed=1, clients=2, rho=4)))


def test_rho_from_one_to_what_the_classes_have():
    balanced = cut(BOTH, scenario="iid", seed=0, rho=1)
    assert sum(map(sum, by_class(balanced))) == 99  # 33 of each class
    with pytest.raises(PartitionError, match=r"^rho=40 leaves no sample of class 2: .* rho can be 33 at most$"):
        cut(BOTH, scenario="iid", seed=0, rho=40)


def test_domains_have_no_long_tail():
    with pytest.raises(PartitionError, match="goes with label scenarios such as nid1, not with scenario domains"):
        cut(BOTH, scenario="domains", seed=0, rho=10)


def test_a_single_domain_keeps_its_name():
    alone = source("b")
    assert {client.domain for client in cut(alone, scenario="iid", seed=0, clients=3)} == {"b"}
    pool, name = pooled(alone.domains)
    assert (name, numbers(pool)) == ("b", list(range(1000, 1040)))


def test_unknown_scenario():
    with pytest.raises(PartitionError, match="there is no scenario 'nid9'"):
        cut(BOTH, scenario="nid9", seed=0)


# seeds


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_cut_depends_on_the_seed_alone(scenario):
    def again(seed):
        return cut(BOTH, scenario=scenario, seed=seed, clients=5, held_out=0.2, **NID2)

    torch.manual_seed(1)
    first = again(0)
    torch.manual_seed(2)
    assert same(first, again(0))
    assert not same(first, again(1))


# held-out samples


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_held_out_samples_are_a_share_of_each_clients_own(scenario):
    whole = cut(BOTH, scenario=scenario, seed=3, clients=5, **NID2)
    shared = cut(BOTH, scenario=scenario, seed=3, clients=5, held_out=0.3, **NID2)
    for before, after in zip(whole, shared, strict=True):
        assert len(before.held_out) == 0
        assert before.held_out.x.shape[1:] == (1, 2, 3)
        assert len(after.held_out) == round(0.3 * len(before.train))
        assert sorted(owned(after)) == sorted(owned(before))
        assert numbers(after.held_out) != numbers(before.train)[: len(after.held_out)]  # chosen at random


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_one_sample_is_always_left_to_train_on(share):
    clients = cut(source("b"), scenario="iid", seed=0, clients=30, held_out=share)  # of one or two samples
    assert {len(client.train) for client in clients} == {1}
    assert sorted(all_numbers(clients)) == list(range(1000, 1040))


def test_splits_own_their_samples():
    client = cut(BOTH, scenario="domains", seed=0)[0]
    client.train.x.zero_()
    assert same(cut(BOTH, scenario="iid", seed=0), cut(source("a", "b"), scenario="iid", seed=0))


# merged


def test_merged_has_everybodys_samples():
    clients = cut(BOTH, scenario="domains", seed=0, held_out=0.2)
    one = merged(clients)
    assert one.domain == POOLED
    assert numbers(one.train) == [number for client in clients for number in numbers(client.train)]
    assert numbers(one.held_out) == [number for client in clients for number in numbers(client.held_out)]


def test_merged_clients_of_one_domain_keep_its_name():
    assert merged([c for c in cut(BOTH, scenario="domains", seed=0) if c.domain == "a"]).domain == "a"
