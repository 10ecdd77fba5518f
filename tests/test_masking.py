"""Secure aggregation: sums are exact, single uploads are noise, and losing members costs an attempt or the round."""

import json

import numpy as np
import pytest
import torch
from conftest import TINY

from fedhpro import masking, runs
from fedhpro.config import configure
from fedhpro.errors import ConfigError
from fedhpro.federation import Federation
from fedhpro.masking import MaskingError, Member, decode, encode, gather
from fedhpro.methods import METHODS

pytest.importorskip("cryptography", reason="an extra: pip install 'fedhpro[secure]'")

VALUES = {k: torch.randn(50, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(5)}


class Clients:
    """A Transport to clients in this process, some of which are lost at some step."""

    def __init__(self, values=VALUES, lost=()):
        self.values, self.lost = values, set(lost)  # of (step, client, attempt)
        self.members = {k: Member(k, 1) for k in values}
        self.sealed, self.seeds = {}, {}  # what a curious server has seen, of every attempt

    def answer(self, step, k, attempt, value):
        return "no answer" if (step, k, attempt) in self.lost else value

    def offer(self, round, clients):
        for k in clients:
            yield k, self.answer("offer", k, 0, self.members[k].public)

    def seal(self, round, attempt, keys):
        for k in keys:
            sealed = self.members[k].seal(attempt, keys, self.values[k])
            self.sealed[k, attempt] = sealed  # also of one whose message comes too late
            yield k, self.answer("seal", k, attempt, sealed)

    def reveal(self, round, attempt, members):
        for k in members:
            seed = self.answer("reveal", k, attempt, None) or self.members[k].reveal(attempt)
            if isinstance(seed, bytes):
                self.seeds[k, attempt] = seed
            yield k, seed


def gathered(clients, fewest=3):
    return gather(clients, 1, list(clients.values), 50, fewest)


def expected(*members):
    return decode(sum(encode(VALUES[k], 5) for k in members))


# --- numbers ---


def test_fixed_point_numbers_are_near_and_their_sums_exact():
    values = torch.tensor([0.0, 1.5, -2.25, 1e-9, -1e6], dtype=torch.float64)
    assert (decode(encode(values, 3)) - values).abs().max() <= 2.0**-33
    total = np.zeros(50, np.uint64)
    for k in (3, 1, 4, 0, 2):  # in any order
        total += encode(VALUES[k], 5)
    assert torch.equal(decode(total), expected(0, 1, 2, 3, 4))


@pytest.mark.parametrize("members", [3, 100])
def test_a_value_that_could_wrap_around_is_refused_and_the_largest_is_not(members):
    most = 2.0**30 / members
    total = np.zeros(1, np.uint64)
    for _ in range(members):
        total += encode(torch.tensor([-most], dtype=torch.float64), members)
    assert decode(total).item() == pytest.approx(-most * members, rel=1e-9)
    with pytest.raises(MaskingError, match="beyond"):
        encode(torch.tensor([most * 1.01]), members)
    with pytest.raises(MaskingError, match="not finite"):
        encode(torch.tensor([float("nan")]), members)


# --- the steps ---


def test_the_sum_of_all_is_read_and_nobody_is_lost():
    outcome = gathered(Clients())
    assert torch.equal(decode(outcome.total), expected(0, 1, 2, 3, 4))
    assert outcome.lost == {}


def test_what_a_client_sends_tells_nothing_by_itself():
    """The same upload under other keys is another row of numbers, and of any row the bits are evenly spread."""
    once, again = Clients(), Clients()
    gathered(once), gathered(again)
    for k in VALUES:
        assert (once.sealed[k, 0] != again.sealed[k, 0]).all()
    bits = np.unpackbits(np.concatenate(list(once.sealed.values())).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.02  # 16,000 bits: five standard deviations


def test_all_but_one_pair_of_clients_still_hide_them_from_the_server():
    """Even with the seeds of all, and all secrets but those of two, what is left is the sum of the two."""
    clients = Clients()
    gathered(clients)
    unhidden = {k: clients.sealed[k, 0] - masking.drawn(clients.seeds[k, 0], 50) for k in VALUES}
    for k in VALUES:  # without its own seed, the masks of the pairs are still there
        assert (decode(unhidden[k]) - VALUES[k]).abs().min() > 1
    total = sum(unhidden.values())
    assert torch.equal(decode(total), expected(*VALUES))


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ([("offer", 2, 0)], (0, 1, 3, 4)),
        ([("seal", 2, 0)], (0, 1, 3, 4)),
        ([("seal", 2, 0), ("seal", 0, 1)], (1, 3, 4)),
        ([("offer", 4, 0), ("seal", 0, 0)], (1, 2, 3)),
    ],
)
def test_who_is_lost_is_left_out_and_the_others_are_summed(lost, left):
    outcome = gathered(Clients(lost=lost))
    assert torch.equal(decode(outcome.total), expected(*left))
    assert outcome.lost == dict.fromkeys(set(VALUES) - set(left), "no answer")


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ([("offer", k, 0) for k in (0, 1, 2)], "2 members are left, and 3 are needed"),
        ([("seal", k, 0) for k in (0, 1, 2)], "2 members are left, and 3 are needed"),
        ([("reveal", 1, 0)], "lost in the last step"),
    ],
)
def test_nothing_comes_of_a_round_that_lost_too_many_or_one_at_the_end(lost, reason):
    clients = Clients(lost=lost)
    outcome = gathered(clients)
    assert outcome.total is None
    assert outcome.lost.keys() == VALUES.keys()
    assert any(reason in why for why in outcome.lost.values())


def test_attempts_have_an_end():
    values = {k: VALUES[k % 5] for k in range(9)}
    outcome = gathered(Clients(values, [("seal", attempt, attempt) for attempt in range(masking.ATTEMPTS)]))
    assert outcome.total is None
    assert "in each of 3 attempts" in outcome.lost[8]


def test_an_upload_that_comes_too_late_stays_hidden():
    """The server has the first attempt of everybody and the sum of the second. Their difference would be the late one's
    upload; but of the first attempt no seed was told.
    """
    clients = Clients(lost=[("seal", 2, 0)])
    outcome = gathered(clients)
    assert {attempt for _, attempt in clients.seeds} == {1}
    late = sum(clients.sealed[k, 0] for k in VALUES) - outcome.total
    assert (decode(late) - VALUES[2]).abs().min() > 1
    with pytest.raises(MaskingError, match="told already"):  # and none will be
        clients.members[0].reveal(0)
    with pytest.raises(MaskingError):
        clients.members[0].reveal(1)


def test_a_client_looks_at_what_it_is_asked():
    members = {k: Member(k, 1) for k in range(3)}
    keys = {k: member.public for k, member in members.items()}
    one, row = members[0], VALUES[0]
    for wrong, reason in (
        ({0: keys[0], 1: keys[1]}, "too few"),
        ({1: keys[1], 2: keys[2], 3: bytes(range(32))}, "not those"),
        (keys | {0: keys[1]}, "not those"),
        (keys | {2: keys[1]}, "not those"),
        (keys | {2: bytes(32)}, "is none"),
    ):
        with pytest.raises(MaskingError, match=reason):
            one.seal(0, wrong, row)
    one.seal(1, keys, row)
    with pytest.raises(MaskingError, match="over"):
        one.seal(1, keys, row)
    with pytest.raises(MaskingError, match="not the last"):
        one.reveal(0)
    before = one.public
    assert len(one.reveal(1)) == 32
    assert one.public != before, "its key is forgotten"
    assert "secret" not in repr(one) and "seed" not in repr(one)


def test_members_that_were_told_different_things_share_no_masks():
    members = {k: Member(k, 1) for k in range(4)}
    keys = {k: member.public for k, member in members.items()}
    some = {k: keys[k] for k in (0, 1, 2)}
    assert members[0]._shared(1, keys[1], 0, keys) == members[1]._shared(0, keys[0], 0, keys)
    assert members[0]._shared(1, keys[1], 0, keys) != members[1]._shared(0, keys[0], 0, some)
    assert members[0]._shared(1, keys[1], 0, keys) != members[0]._shared(1, keys[1], 1, keys)


# --- runs ---

SUMMABLE = sorted(
    name
    for name, method in METHODS.items()
    if method.needs_means_only and not method.pools_data and method.exchanges != ("nothing",)
)


def federated(source, rounds=2, **keys):
    with Federation(configure(**(TINY | keys)), source) as federation:
        return [federation.next_round() for _ in range(rounds)], federation.snapshot()[0]


@pytest.mark.parametrize("method", SUMMABLE)
def test_every_method_that_needs_means_gets_the_model_of_a_run_without_masks(tiny_source, method):
    """After one round: local training would blow up rounding of 1e-7 in later ones."""
    plain, masked = (federated(tiny_source, 1, method=method, secure=secure) for secure in (False, True))
    for name, value in plain[1].items():
        assert torch.allclose(masked[1][name].double(), value.double(), rtol=1e-4, atol=1e-5), name
    assert masked[0][0]["loss"] == pytest.approx(plain[0][0]["loss"], rel=1e-5)
    assert masked[0][0]["refused"] == []


@pytest.mark.parametrize("by_samples", [True, False])
def test_votes_and_losses_are_means_over_the_samples_whatever_a_model_counts(by_samples):
    names = ("model/w", "report/vote", "loss/ce")
    upload = dict.fromkeys(names, torch.ones(())) | {"samples": torch.tensor(30)}
    layout = masking.Layout(upload, by_samples)
    against = dict.fromkeys(names, torch.zeros(())) | {"samples": torch.tensor(10)}
    found = layout.means(layout.row(upload) + layout.row(against), 2)
    assert [found[name].item() for name in names] == [0.75 if by_samples else 0.5, 0.75, 0.75]
    assert found["samples"] == 40


def test_equal_weights_and_other_protocols(tiny_source):
    for keys in ({"weights": "equal"}, {"exchange": "classifier"}, {"method": "fedproto", "exchange": "prototypes"}):
        plain, masked = (federated(tiny_source, 1, secure=secure, **keys) for secure in (False, True))
        for name, value in plain[1].items():
            assert torch.allclose(masked[1][name].double(), value.double(), rtol=1e-4, atol=1e-5), name


def test_masks_are_new_each_time_and_the_run_is_the_same_to_the_bit(tiny_source):
    (records, model), (records_2, model_2) = (federated(tiny_source, secure=True) for _ in range(2))
    assert json.dumps(records) == json.dumps(records_2)
    assert all(torch.equal(model[name], model_2[name]) for name in model)
    (records_3, _) = federated(tiny_source, secure=True, workers=2)
    assert json.dumps(records) == json.dumps(records_3)


def test_a_client_that_fails_is_left_out_of_the_sum(tiny_source, monkeypatch):
    config = configure(**(TINY | {"secure": True, "clients_per_domain": 2, "method": "moon"}))
    with Federation(config, tiny_source) as federation:
        update = federation.trainer.update

        def fail(round, k, *more):
            if k == 1:
                raise RuntimeError("no room left")
            return update(round, k, *more)

        monkeypatch.setattr(federation.trainer, "update", fail)
        record = federation.next_round()
        assert record["aggregated"]
        assert record["refused"] == [{"client": 1, "reason": "RuntimeError: no room left"}]
        assert sorted(federation.memories) == [0, 2, 3]


def test_a_member_that_sends_something_else_spoils_the_round_and_is_not_found(tiny_source, monkeypatch):
    """The price of secrecy: one upload cannot be checked. What cannot be a sum of uploads is thrown away."""
    with Federation(configure(**(TINY | {"secure": True})), tiny_source) as federation:
        before = {name: value.clone() for name, value in federation.model.items()}
        seal = Member.seal
        garbage = np.full(federation.layout.size, 2**40 + 12345, np.uint64)
        monkeypatch.setattr(Member, "seal", lambda m, *a: seal(m, *a) + (garbage if m.client == 1 else 0 * garbage))
        record = federation.next_round()
        assert not record["aggregated"]
        assert {entry["reason"] for entry in record["refused"]} == {
            "the sum is not one of sound uploads: a member sent something else"
        }
        assert all(torch.equal(federation.model[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"method": "fedtgp"}, "method=fedtgp looks at what each client sent"),
        ({"method": "fedgmkd"}, "method=fedgmkd looks at what each client sent"),
        ({"method": "fedgmkd-hp"}, "method=fedgmkd-hp looks at what each client sent"),
        ({"method": "centralised"}, "nothing leaves a client"),
        ({"method": "local"}, "nothing leaves a client"),
        ({"uplink": "probabilities"}, "uplink=gradients"),
        ({"evaluation": "both"}, "evaluation=central"),
        ({"participation": 0.5}, "2 clients are in a round, and 3 are the fewest"),
        ({"hpcl": "global"}, "reports mean_counts"),
        ({"engine": "flower", "compress": "fp16"}, "compress=fp16"),
    ],
)
def test_what_it_does_not_go_with_is_said(tiny_source, keys, words):
    with pytest.raises(ConfigError, match=words):
        Federation(configure(**(TINY | {"secure": True} | keys)), tiny_source)


def test_a_resumed_run_has_the_bytes_of_one_that_was_not_stopped(tiny_source, tmp_path):
    config = configure(**(TINY | {"secure": True, "rounds": 3}))
    whole = runs.run(config.replace(out=str(tmp_path / "whole")), source=tiny_source)
    part = runs.run(config.replace(out=str(tmp_path / "part"), rounds=1), source=tiny_source)
    resumed = runs.resume(part.folder, source=tiny_source, rounds=3)
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (whole.folder / name).read_bytes() == (resumed.folder / name).read_bytes(), name
