"""Secure aggregation over Flower's Grid: the bits of this process, and nothing to read in any message."""

import json

import pytest
import torch
from conftest import TINY, synthetic_split

pytest.importorskip("flwr", reason="Flower is an extra: pip install 'fedhpro[flower]'")

from flower_grid import LocalGrid

from fedhpro import masking
from fedhpro.config import configure
from fedhpro.data import sources
from fedhpro.deploy import audit
from fedhpro.engines import flower, masked
from fedhpro.engines.flower import ABOUT, TENSORS, from_record, to_record
from fedhpro.federation import Federation

KEYS = TINY | {"data": "tiny", "join_deadline": 0.3, "round_deadline": 0.3, "secure": True, "clients_per_domain": 2}


@pytest.fixture(autouse=True)
def tiny_by_name(tiny_source, monkeypatch):
    monkeypatch.setitem(sources.SOURCES, "tiny", lambda: tiny_source)
    flower.site_of.cache_clear()


def through_flower(grid=None, rounds=1, **keys):
    config = configure(**(KEYS | {"engine": "flower"} | keys))
    with Federation(config, grid=grid or LocalGrid(4)) as federation:
        return [federation.next_round() for _ in range(rounds)], federation.snapshot()[0]


def in_this_process(rounds=1, **keys):
    with Federation(configure(**(KEYS | keys))) as federation:
        return [federation.next_round() for _ in range(rounds)], federation.snapshot()[0]


def kind(message):
    return message.metadata.message_type


@pytest.mark.parametrize("method", ["fedavg", "fedhpro", "moon", "fedsa"])
def test_the_bits_are_those_of_this_process(method):
    one, other = through_flower(rounds=2, method=method), in_this_process(rounds=2, method=method)
    assert json.dumps(one[0]) == json.dumps(other[0])
    assert all(torch.equal(one[1][name], other[1][name]) for name in other[1])


def test_nothing_that_leaves_a_client_can_be_read():
    replies = []
    grid = LocalGrid(4)
    grid.meddle = lambda message, reply, context: replies.append((kind(message), reply)) or reply
    through_flower(grid)
    assert {name for name, _ in replies} == {"query", masked.OFFER, masked.SEAL, masked.REVEAL}
    for name, reply in replies:
        about, tensors = reply.content.config_records[ABOUT], from_record(reply.content.array_records[TENSORS])
        allowed = {"version", "client", "digest", "request"}
        allowed |= {"query": {"samples", "held_out"}, masked.OFFER: {"key"}, masked.REVEAL: {"seed"}}.get(name, set())
        allowed |= {"remembered", "recalled"} if name == masked.SEAL else set()
        assert set(about) == allowed
        assert about.get("samples", 1) == 1, "how many it has is not told"
        assert list(tensors) == (["sealed"] if name == masked.SEAL else [])
        for value in tensors.values():  # whole numbers over the whole range, as of a die with 2^64 faces
            assert value.dtype == torch.int64
            assert abs(value.double().mean() / 2**63) < 0.02
            assert abs(value.double().std() / 2**63 - 3**-0.5) < 0.02


def test_a_node_that_is_lost_costs_an_attempt_and_nobody_trains_twice(monkeypatch):
    trained = []
    update = flower.trained
    monkeypatch.setattr(masked, "trained", lambda site, k, *more: trained.append(k) or update(site, k, *more))
    grid = LocalGrid(4)
    lost = {grid.node_of(2)}
    grid.meddle = lambda message, reply, _: (
        None if kind(message) == masked.SEAL and message.metadata.dst_node_id in lost else reply
    )
    (record,), _ = through_flower(grid)
    assert record["aggregated"]
    assert record["refused"] == [{"client": 2, "reason": "no answer within 0.3 seconds"}]
    assert sorted(trained) == [0, 1, 2, 3]
    assert [
        message.content.config_records[ABOUT]["attempt"] for message in grid.seen if kind(message) == masked.SEAL
    ] == [
        *[0] * 4,
        *[1] * 3,
    ]
    second = [message for message in grid.seen if kind(message) == masked.SEAL][-1]
    assert not second.content.array_records[TENSORS], "the model is not sent again"


def test_a_node_that_is_lost_at_the_end_costs_the_round_and_the_next_goes_on():
    grid = LocalGrid(4)
    grid.meddle = lambda message, reply, _: (
        None
        if kind(message) == masked.REVEAL
        and message.metadata.dst_node_id == grid.node_of(1)
        and message.metadata.group_id == "1"
        else reply
    )
    rounds, _ = through_flower(grid, rounds=2, method="moon")
    assert [record["aggregated"] for record in rounds] == [False, True]
    reasons = {entry["client"]: entry["reason"] for entry in rounds[0]["refused"]}
    assert reasons[1] == "no answer within 0.3 seconds"
    assert "lost in the last step" in reasons[0]


def test_a_node_that_was_started_again_is_left_out_of_this_round():
    grid = LocalGrid(4)

    def forgetful(message, reply, context):
        if kind(message) == masked.OFFER and context.node_id == grid.node_of(3):
            masked.forget(context)
        return reply

    grid.meddle = forgetful
    (record,), _ = through_flower(grid)
    assert record["aggregated"]
    (entry,) = record["refused"]
    assert entry["client"] == 3 and "no key for this round" in entry["reason"]


@pytest.mark.parametrize(
    ("step", "spoil", "reason"),
    [
        (masked.OFFER, lambda about, content: about.update(key=b"short"), "not 32 bytes"),
        (masked.OFFER, lambda about, content: about.update(key="text"), "has no key"),
        (masked.SEAL, lambda about, content: content.update({TENSORS: to_record({})}), "sealed is missing"),
        (
            masked.SEAL,
            lambda about, content: content.update({TENSORS: to_record({"sealed": torch.zeros(3, dtype=torch.int64)})}),
            "sealed has shape [3]",
        ),
        (masked.SEAL, lambda about, content: about.update(client=0), "answers as client 0"),
    ],
)
def test_a_reply_that_is_none_is_refused_and_the_others_count(step, spoil, reason):
    grid = LocalGrid(4)

    def meddle(message, reply, context):
        if kind(message) == step and context.node_id == grid.node_of(1):
            spoil(reply.content.config_records[ABOUT], reply.content)
        return reply

    grid.meddle = meddle
    (record,), _ = through_flower(grid)
    assert record["aggregated"]
    (entry,) = record["refused"]
    assert entry["client"] == 1 and reason in entry["reason"]


def test_a_client_of_a_masked_run_answers_no_server_that_asks_for_the_plain_upload():
    grid = LocalGrid(4)
    config = configure(**(KEYS | {"engine": "flower"}))
    with Federation(config, grid=grid) as federation:
        engine = federation.engine
        message = engine.message("train", 0, {"round": 1, "generation": 0, "held": []}, to_record(federation.sent()))
        ((_, reply),) = engine.ask({0: message}, 1)
        assert "is to be masked" in reply.content.config_records[ABOUT]["error"]
        assert not reply.content.array_records[TENSORS]


def test_a_client_tells_one_seed_in_a_round():
    """What a server that claims a loss would need to take one upload out of two sums."""
    grid = LocalGrid(4)
    with Federation(configure(**(KEYS | {"engine": "flower"})), grid=grid) as federation:
        nodes = masked.Nodes(federation.engine, federation.sent())
        keys = dict(nodes.offer(1, range(4)))
        assert all(not isinstance(sealed, str) for _, sealed in nodes.seal(1, 0, keys))
        assert all(isinstance(seed, bytes) for _, seed in nodes.reveal(1, 0, range(4)))
        fewer = {k: keys[k] for k in range(3)}
        assert all("told its seed" in answer for _, answer in nodes.seal(1, 1, fewer))
        assert all("told its seed" in answer for _, answer in nodes.reveal(1, 0, range(4)))
        pair = dict(nodes.offer(2, range(2)))
        assert all(f"fewer than {masking.FEWEST}" in answer for _, answer in nodes.seal(2, 0, pair))


def test_the_audit_shows_what_leaves():
    rows = audit.tensors(configure(**(KEYS | {"engine": "flower"})))
    (leaves,) = [row for row in rows if row["direction"] == audit.LEAVES]
    assert (leaves["tensor"], leaves["dtype"]) == ("sealed", "int64")


def squares():
    split = synthetic_split(40, 4, 1)
    return split.x, split.y


def test_a_site_does_not_say_how_many_samples_it_has():
    """Nor how many it holds out, a fifth of them."""
    grid, said = LocalGrid(3, data="python:test_masking_flower:squares"), []
    grid.meddle = lambda message, reply, _: said.append(reply.content.config_records[ABOUT]) or reply
    sites = {"data": "sites", "classes": "a,b,c,d", "image_size": 16, "clients": 3, "evaluation": "off"}
    (record,), _ = through_flower(grid, clients_per_domain="none", **sites)
    assert record["aggregated"] and record["refused"] == []
    assert {(about["samples"], about["held_out"]) for about in said if "samples" in about} == {(1, 0)}
