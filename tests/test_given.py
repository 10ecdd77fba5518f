"""What a site gives, it gives once: uploads with noise of its own, seeds of masks; and only for what it requires."""

import sys
import types

import pytest
from conftest import TINY, synthetic_split

pytest.importorskip("flwr", reason="Flower is an extra: pip install 'fedhpro[flower]'")

from flower_grid import LocalGrid
from flwr.app import RecordDict

from fedhpro import masking, runs
from fedhpro.callbacks import Callback
from fedhpro.config import configure
from fedhpro.engines import flower
from fedhpro.engines.flower import ABOUT, TENSORS, from_record, to_record
from fedhpro.errors import ConfigError
from fedhpro.federation import Federation

SITES = TINY | {
    "data": "sites", "classes": "a,b,c,d", "image_size": 16, "clients": 4, "method": "fedavg", "engine": "flower",
    "join_deadline": 0.3, "round_deadline": 0.3, "evaluation": "off", "rounds": 2,
}  # fmt: skip
LOCAL = SITES | {"privacy": "local", "noise": 4.0, "clip": 1.0, "weights": "equal"}


@pytest.fixture
def grid(monkeypatch, tmp_path):
    """Four nodes with data of their own, which keep what they remember in a folder."""
    data = types.ModuleType("data_of_a_site")
    split = synthetic_split(40, 4, 5)
    data.load = lambda: (split.x, split.y)
    monkeypatch.setitem(sys.modules, "data_of_a_site", data)
    flower.site_of.cache_clear()
    return LocalGrid(4, **{"data": "python:data_of_a_site:load", "memory-dir": str(tmp_path / "memory")})


def asked(federation, grid, kind, **what):
    """-> the error that a node answers with, or None, and its tensors."""
    engine = federation.engine
    message = engine.message(kind, 0, {"generation": 0, "held": []} | what, to_record(federation.sent()))
    (reply,) = grid.pull_messages(grid.push_messages([message]))
    return reply.content.config_records[ABOUT].get("error"), from_record(reply.content.array_records[TENSORS])


def forgetful(grid):
    """Nodes that were started again."""
    for context in grid.contexts.values():
        context.state = RecordDict()


def test_an_upload_with_noise_is_given_once(grid):
    with Federation(configure(**LOCAL), grid=grid) as federation:
        assert federation.next_round()["aggregated"]
        forgetful(grid)
        error, tensors = asked(federation, grid, "train", round=1)
        assert error == "it has given an upload of round 1 already, and gives none of round 1" and not tensors
        error, tensors = asked(federation, grid, "train", round=3)
        assert error == "this run has 2 rounds, and not 3" and not tensors
        assert federation.next_round()["aggregated"]


def test_a_run_without_evaluation_at_the_sites_learns_nothing_of_their_tests(grid):
    with Federation(configure(**SITES), grid=grid) as federation:
        tests = {"tests": [f"{flower.HELD_OUT}0"], "private": [False]}
        error, tensors = asked(federation, grid, "evaluate", round=1, **tests)
    assert error.startswith("this run has no evaluation at the sites") and not tensors


@pytest.mark.parametrize(("keys", "takes_part"), [(LOCAL, True), (SITES, False), (LOCAL | {"noise": 1.0}, False)])
def test_a_site_takes_part_only_with_what_it_requires(grid, keys, takes_part):
    grid.contexts[grid.node_of(0)].node_config["require"] = "privacy=local noise=4"
    with Federation(configure(**keys), grid=grid) as federation:
        refused = federation.next_round()["refused"]
    reasons = [] if takes_part else [{"client": 0, "reason": "this site takes part only with privacy=local noise=4"}]
    assert refused == reasons


@pytest.mark.parametrize(
    ("required", "keys", "takes_part"),
    [
        ("method=fedavg", {"method": "fedavg", "rounds": 3}, True),
        ("method=fedavg", {"method": "fedhpro"}, False),
        ("method=fedhpro M=0", {}, False),
        ("preset=paper", {"preset": "paper", "seed": 3}, True),
        ("preset=paper", {"preset": "paper", "lr": 0.5}, False),
        ("preset=plus", {"preset": "paper"}, False),
        ("secure=true evaluation=off", {"secure": True, "evaluation": "off"}, True),
    ],
)
def test_a_site_may_require_a_method_or_a_preset(required, keys, takes_part):
    text = configure(**keys).to_toml()
    if takes_part:
        flower.check_required(required, text)
    else:
        with pytest.raises(flower.SiteError, match=f"only with {required}"):
            flower.check_required(required, text)


class PowerCut(Callback):
    def round(self, record):
        if record["round"] == 1:
            raise SystemExit


def test_after_a_power_cut_no_second_sum_of_a_round_can_be_read(grid, tmp_path, monkeypatch):
    """Two sums of the same round, one of them without a client, would differ by that client's upload."""
    pytest.importorskip("cryptography", reason="an extra: pip install 'fedhpro[secure]'")
    sums, gather = [], masking.gather

    def seen(*arguments):
        outcome = gather(*arguments)
        sums.append((arguments[1], outcome.total is not None))
        return outcome

    monkeypatch.setattr(masking, "gather", seen)
    keys = SITES | {"secure": True, "checkpoint_every": 2, "out": str(tmp_path / "run")}
    with pytest.raises(SystemExit):
        runs.run(keys, grid=grid, callbacks=[PowerCut()])
    forgetful(grid)
    grid.online = grid.online[:3]
    history = runs.resume(tmp_path / "run", grid=grid).history
    assert sums == [(1, True), (1, False), (2, True)]
    assert "it has given the seed of round 1 already" in history[0]["refused"][0]["reason"]


def test_a_round_that_is_released_again_is_paid_for_again(grid, tmp_path):
    keys = SITES | {"privacy": "central", "noise": 4.0, "weights": "equal", "checkpoint_every": 5}
    out = tmp_path / "run"
    with pytest.raises(SystemExit):
        runs.run(keys, grid=grid, callbacks=[PowerCut()], out=str(out))
    with pytest.raises(SystemExit):
        runs.resume(out, grid=grid, callbacks=[PowerCut()])
    done = runs.resume(out, grid=grid)
    with Federation(configure(**keys), grid=grid) as federation:
        paid = [round(federation.privacy.epsilon(n), 4) for n in (3, 4)]  # round 1 was released three times
    assert [record["privacy"]["epsilon"] for record in done.history] == paid


def test_releases_that_the_budget_does_not_allow_are_refused(grid, tmp_path):
    keys = SITES | {"privacy": "central", "noise": 4.0, "weights": "equal", "checkpoint_every": 5, "epsilon": 1.6}
    out = tmp_path / "run"
    with pytest.raises(SystemExit):
        runs.run(keys, grid=grid, callbacks=[PowerCut()], out=str(out))
    with pytest.raises(
        ConfigError, match=r"^epsilon=1.6: 2 rounds with noise=4 cost 1.8\d, and the budget is spent after 1:"
    ):
        runs.resume(out, grid=grid)
