"""What a run costs: bytes by tensor, FLOPs against a counter on the real thing, seconds, memory, and Table 4."""

import json
from dataclasses import dataclass

import pytest
import torch
from conftest import TINY

from fedhpro import accounting, costs, models, runs
from fedhpro.config import configure
from fedhpro.data import load
from fedhpro.errors import ConfigError
from fedhpro.federation import Federation
from fedhpro.methods import METHODS
from fedhpro.methods.base import Method

PHASES = {"send", "train", "fold", "aggregate", "evaluate", "save"}


def tiny(source, **keys):
    return Federation(configure(**(TINY | keys)), source)


# bytes


def test_the_table_of_tensors_adds_up_to_the_bytes_of_a_round(tiny_source):
    with tiny(tiny_source, participation=0.7) as federation:
        table = accounting.tensor_table(federation.sent(), federation.upload)
        record = federation.next_round()
    for direction in ("down", "up"):
        each = sum(row["bytes"] for row in table if row["direction"] == direction)
        assert record[f"bytes_{direction}"] == 2 * each
    gradients = next(row for row in table if row["tensor"] == "report/gradients")
    assert gradients == {"tensor": "report/gradients", "direction": "up", "shape": [4, 128], "dtype": "float32",
                         "bytes": 4 * 4 * 128}  # fmt: skip


# FLOPs


def test_forward_flops_of_the_papers_network_by_hand():
    """Multiply-adds: kernel x inputs x outputs x places. The last three stages cost the same."""
    stem, first = 9 * 3 * 64 * 32**2, 2 * 9 * 64 * 64 * 32**2
    later = (9 * 64 * 128 + 9 * 128 * 128 + 64 * 128) * 16**2
    net = models.build("resnet10", 10).eval()
    with torch.no_grad():
        _, flops = accounting.counted(net, torch.zeros(1, 3, 32, 32))
    assert flops == 2 * (stem + first + 3 * later + 512 * 10) == 506_865_664


VARIANTS = {name: {"method": name} for name in METHODS} | {
    "margin per epoch": {"margin_per": "epoch"},
    "some samples": {"gradient_samples": 2, "hpcl": "global"},
    "before": {"gradients": "before", "retrain_classifier": True},
    "steps": {"local_steps": 5},
    "mixed": {"model": "htfe2", "width": 16},
    "half the bits": {"precision": "bf16"},
}


@pytest.mark.parametrize("keys", VARIANTS.values(), ids=VARIANTS)
def test_counted_flops_are_those_of_a_real_client(tiny_source, keys):
    federation = tiny(tiny_source, local_epochs=2, **keys)
    each = accounting.client_flops(federation)
    for k in (0, len(federation.clients) - 1):
        _, real = accounting.counted(federation.trainer.update, 1, k, federation.sent(), {})
        assert each["training"][k] + each["passes"][k] == real


def test_flops_of_texts():
    source = load("docs-lite")
    federation = Federation(configure(data="docs-lite", rounds=1, workers=0), source)
    each = accounting.client_flops(federation)
    _, real = accounting.counted(federation.trainer.update, 1, 3, federation.sent(), {})
    assert each["training"][3] + each["passes"][3] == real


def test_flops_of_an_evaluation_are_those_of_a_real_one(tiny_source):
    with tiny(tiny_source) as federation:
        _, real = accounting.counted(federation.evaluate)
        assert accounting.client_flops(federation)["evaluation"] == real


@pytest.mark.parametrize("method", ["fedhpro", "fedtgp"])
def test_counting_an_aggregation_does_not_change_it(tiny_source, method):
    states = []
    for known in (None, 0):  # None: the first aggregation is counted
        with tiny(tiny_source, method=method, rounds=1) as federation:
            federation.server_flops = known
            federation.next_round()
            states.append(federation.snapshot()[0])
            assert known == 0 or federation.server_flops > 0
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


# a run


def test_costs_of_a_run(tiny_source, tmp_path):
    keys = TINY | {"rounds": 3, "evaluate_every": 2, "participation": 0.7, "workers": 2}
    done = runs.run(configure(**keys, out=str(tmp_path / "run")), source=tiny_source)
    result, written = (json.loads((done.folder / f"{name}.json").read_text()) for name in ("result", "costs"))
    assert result["costs"] == done.costs and written == done.costs | {"tensors": written["tensors"]}
    each = accounting.client_flops(Federation(done.config, tiny_source))
    taking_part = [k for record in done.history for k in record["clients"]]
    flops = done.costs["flops"]
    assert flops["training"] == sum(each["training"][k] for k in taking_part)
    assert flops["passes"] == sum(each["passes"][k] for k in taking_part) > 0
    assert flops["evaluation"] == 2 * each["evaluation"] and flops["server"] % 3 == 0 and flops["server"] > 0
    assert done.costs["peak_mb"]["process"] > 50 and done.costs["peak_mb"]["largest_worker"] > 50
    timings = [json.loads(line) for line in (done.folder / "timings.jsonl").read_text().splitlines()]
    assert [timing["round"] for timing in timings] == [1, 2, 3]
    assert [set(timing["phases"]) for timing in timings] == [PHASES - {"evaluate"}, PHASES, PHASES]
    assert all(0 < sum(t["phases"].values()) <= t["seconds"] + 0.01 for t in timings)
    assert set(done.costs["seconds"]) == PHASES
    assert not {"seconds", "phases", "costs", "flops"} & {key for record in done.history for key in record}


def test_resumed_timings_have_every_round_once(tiny_source, tmp_path):
    done = runs.run(configure(**(TINY | {"rounds": 3}), out=str(tmp_path / "run")), source=tiny_source)
    sorted((done.folder / "checkpoints").glob("*.json"))[-1].unlink()  # round 3 is to be repeated
    runs.resume(done.folder, source=tiny_source)
    timings = [json.loads(line) for line in (done.folder / "timings.jsonl").read_text().splitlines()]
    assert [timing["round"] for timing in timings] == [1, 2, 3]


def test_a_method_that_cannot_be_counted_still_runs(tiny_source, tmp_path):
    @dataclass(frozen=True)
    class Curious(Method):
        name = "curious"

        def loss(self, net, frozen, x, y, context):
            terms = super().loss(net, frozen, x, y, context)
            assert terms["ce"].item() > 0
            return terms

    try:
        config = configure(**(TINY | {"method": "curious"}), out=str(tmp_path / "run"))
        done = runs.run(config, source=tiny_source)
    finally:
        del METHODS["curious"]
    assert done.status == "finished" and "meta" in done.costs["flops"]["error"]


# Table 4


@pytest.fixture(scope="module")
def rows():
    keys = {"width": 64, "stem": "3x3", "batch_size": 64, "local_epochs": 10}
    return {row["method"]: row for row in costs.costs(keys, ("fedavg", "moon", "fedproto", "fedhpro"))}


def test_values_uploaded_are_the_papers_but_for_an_mlp_that_it_never_uses(rows):
    mlp = 2 * (512 * 512 + 512)
    assert rows["fedavg"]["values_up"] + 20 * mlp == 20 * (5_428_554 + 5_760)
    assert (rows["fedavg"]["values_up"] + 20 * mlp) / 1e7 == pytest.approx(costs.PAPER["fedavg"]["values_up_e7"], 1e-3)
    for method in ("fedproto", "fedhpro"):
        assert rows[method]["values_up"] - rows["fedavg"]["values_up"] == 20 * 10 * 512
    assert rows["fedhpro"]["bytes_down"] - rows["fedavg"]["bytes_down"] == 20 * 4 * 10 * 5 * 512
    (means,) = costs.costs({"width": 64, "stem": "3x3", "nearest": True}, ("fedavg",))
    assert means["values_up"] - rows["fedavg"]["values_up"] == 20 * 10 * 512


def test_flops_of_the_methods_in_proportion(rows):
    flops = {method: row["flops_clients"] / rows["fedavg"]["flops_clients"] for method, row in rows.items()}
    assert flops["moon"] == pytest.approx(5 / 3, rel=0.01)  # two forward passes more, of three in all
    assert flops["fedproto"] == pytest.approx(1 + 1 / 30, rel=0.01)  # one pass after ten epochs
    assert flops["fedhpro"] == pytest.approx(1 + 2 / 30, rel=0.01)  # one before and one after


def test_measured_in_turns(tiny_source, monkeypatch):
    monkeypatch.setattr(costs.data, "load", lambda name: tiny_source)
    order = []
    real = Federation.next_round
    monkeypatch.setattr(Federation, "next_round", lambda self: (order.append(self.config.method), real(self))[1])
    keys = {name: value for name, value in TINY.items() if name != "rounds"}
    rows = costs.costs(keys, ("fedavg", "fedhpro"), measure=2)
    assert order == ["fedhpro", "fedavg", "fedavg", "fedhpro", "fedhpro", "fedavg"]
    assert all(row["seconds"] > 0 for row in rows) and rows[1]["flops_server"] > rows[0]["flops_server"] == 0


def test_the_command(capsys):
    from fedhpro.cli import app

    def call(*arguments):
        app(args=["costs", *arguments], standalone_mode=False)
        return capsys.readouterr().out

    found = json.loads(call("fedavg", "fedhpro", "data=digits-lite", "--json"))
    assert [row["method"] for row in found] == ["fedavg", "fedhpro"] and found[0]["seconds"] is None
    smaller = json.loads(call("fedhpro:uplink=probabilities", "data=digits-lite", "--json"))[0]
    assert found[1]["bytes_up"] - smaller["bytes_up"] == 20 * 4 * 10 * (128 - 10)
    frozen = json.loads(call("fedhpro", "M=0", "uplink=off", "data=digits-lite", "--json"))[0]
    assert frozen["bytes_up"] < smaller["bytes_up"]  # keys of a method that is named
    masked = json.loads(call("fedavg", "secure=true", "data=digits-lite", "--json"))[0]
    assert masked["bytes_up"] / found[0]["bytes_up"] == pytest.approx(2, rel=1e-4)  # 8 bytes a number
    text = call("fedavg", "moon", "data=digits-lite")
    assert "digits-lite" in text and "1.67" in text and "10.87" in text
    with pytest.raises(ConfigError, match="name the methods"):
        call("method=fedavg")
