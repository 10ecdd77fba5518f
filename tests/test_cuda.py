"""Captured steps on a GPU against the same clients trained eagerly, for every method; skipped where there is none."""

import dataclasses
import logging

import pytest
import torch
from conftest import TINY, synthetic_split

from fedhpro import methods, runs
from fedhpro.config import configure
from fedhpro.data.sources import Domain, Source, Split
from fedhpro.federation import Federation
from fedhpro.methods.base import METHODS as REGISTERED
from fedhpro.methods.fedavg import FedAvg

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
METHODS = sorted(methods.METHODS)
KEYS = TINY | {"engine": "cuda", "precision": "fp32", "local_epochs": 2, "rounds": 2, "lr": 0.01}


def two_engines(source, **keys):
    """Federations of the same config: captured with two slots, and eager."""
    return Federation(configure(**(KEYS | {"workers": 2} | keys)), source), Federation(
        configure(**(KEYS | {"workers": 0} | keys)), source
    )


def uploads(federation, round=1):
    with federation:
        return {
            answer.client: (answer.error, {name: value.cpu() for name, value in answer.upload.items()})
            for answer in federation.engine.train(round, federation.sample(round), federation.sent(), {})
        }


def assert_near(captured, eager, rtol=2e-3):
    assert captured.keys() == eager.keys()
    for k, (error, upload) in captured.items():
        assert error is None and eager[k][0] is None
        for name, value in upload.items():
            other = eager[k][1][name]
            scale = other.float().abs().max().clamp_min(1e-3)
            assert float((value.float() - other.float()).abs().max() / scale) < rtol, (k, name)


def assert_same_change(captured, eager, sent, rtol=0.2):
    """Of all that training changed in a model. Steps amplify rounding: on a CPU, weights that differ by 3e-7 at the
    start of these tests differ by up to 6 % of the change in the end, and single small tensors by 26 % of their values.
    """
    assert captured.keys() == eager.keys()
    for k, (error, upload) in captured.items():
        assert error is None and eager[k][0] is None
        models = [{name: v for name, v in each.items() if name.startswith("model/")} for each in (upload, eager[k][1])]
        difference = sum(float((models[0][name] - models[1][name]).norm() ** 2) for name in models[1])
        change = sum(float((models[1][name] - sent[name]).norm() ** 2) for name in models[1])
        assert difference < rtol**2 * change, k


@pytest.mark.parametrize("method", METHODS)
def test_steps_as_eager(tiny_source, method, caplog):
    captured, eager = two_engines(tiny_source, method=method, local_steps=2)  # more would amplify the rounding
    assert_near(uploads(captured), uploads(eager))
    assert not caplog.records  # nothing fell back


OPTIONS = [
    {"optimizer": "adam", "lr": 0.001},
    {"margin_per": "epoch"},
    {"local_steps": 3},
    {"batch_size": 11},
    {"augment": "batch"},
    {"augment": "off"},
    {"momentum": 0.0},
    {"balanced": True},
    {"nearest": True},
    {"method": "fedhpro-plus"},
    {"method": "fedhpro-plus", "balanced": True},
    {"method": "fedhpro-plus", "agreed": False},
]


@pytest.mark.parametrize("keys", OPTIONS, ids=str)
def test_options_as_eager(tiny_source, keys, caplog):
    epochs = 2 if "margin_per" in keys else 1
    captured, eager = two_engines(tiny_source, local_epochs=epochs, **({"method": "fedhpro"} | keys))
    assert_same_change(uploads(captured), uploads(eager), eager.sent())
    assert not caplog.records


def test_a_step_is_captured_for_each_kind_of_context(tiny_source, caplog):
    engines = two_engines(tiny_source, method="fedhpro-plus", local_steps=2)
    with engines[0], engines[1]:
        for pro in (0.0, 1.0, 0.0):  # of the votes
            found = []
            for federation in engines:
                federation.state = {"votes": torch.tensor([100 * pro, 100])}
                answers = federation.engine.train(1, federation.sample(1), federation.sent(), {})
                found.append(
                    {each.client: (each.error, {n: v.cpu() for n, v in each.upload.items()}) for each in answers}
                )
            assert_near(*found)
            assert all((upload["loss/hpal"] > 0) == (pro > 0) for _, upload in found[0].values())
    assert not caplog.records


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precision_is_near(tiny_source, precision):
    captured, eager = two_engines(tiny_source, method="fedavg", precision=precision, local_epochs=1)
    captured, eager = uploads(captured), uploads(eager)
    for k, (_, upload) in captured.items():
        assert float(upload["loss/ce"]) == pytest.approx(float(eager[k][1]["loss/ce"]), rel=0.05)


def test_rounds_learn_and_repeat(tiny_source):
    keys = KEYS | {"method": "fedavg", "local_epochs": 4, "lr": 0.03, "workers": 3, "rounds": 3}
    found = []
    for _ in range(2):
        with Federation(configure(**keys), tiny_source) as federation:
            *_, last = federation.rounds()
            found.append(last)
    assert found[0]["accuracy"]["AVG"] > 80  # chance is 25
    assert abs(found[0]["loss"]["ce"] - found[1]["loss"]["ce"]) < 0.05


def test_a_whole_run_leaves_a_model_that_predicts(tiny_source, tmp_path):
    done = runs.run(configure(**KEYS, method="fedhpro", out=str(tmp_path / "run")), source=tiny_source)
    assert done.status == "finished" and done.costs["peak_mb"]["gpu"] > 0
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("method", ["fedproto", "fedhpro", "local"])
def test_mixed_models(tiny_source, method, caplog):
    exchange = "classifier" if method == "fedhpro" else "auto"
    captured, eager = two_engines(tiny_source, method=method, model="htfe2", width=None, exchange=exchange)
    with captured, eager:
        first, second = list(captured.rounds()), list(eager.rounds())
    assert first[-1]["aggregated"] and not first[-1]["refused"]
    assert first[0]["loss"]["ce"] == pytest.approx(second[0]["loss"]["ce"], rel=0.05)


def test_text_with_dropout(caplog):
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 4
    split = Split(torch.randint(1, 50, (60, 12), generator=rng) + 50 * y[:, None], y)
    source = Source("words", (Domain("w", split, split, split, False, ""),), ("a", "b", "c", "d"), {}, vocab=300)
    captured, eager = two_engines(source, method="fedhpro", model="textcnn", width=None, scenario="iid", clients=3)
    assert_near(uploads(captured), uploads(eager), rtol=1e-2)
    assert not caplog.records


def test_what_cannot_be_captured_runs_eagerly_with_one_warning(tiny_source, caplog):
    @dataclasses.dataclass(frozen=True)
    class Peeks(FedAvg):
        name = "peeks"

        def loss(self, net, frozen, x, y, context):
            terms = super().loss(net, frozen, x, y, context)
            assert terms["ce"].item() > 0  # waits for the GPU: not capturable
            return terms

    try:
        captured, eager = two_engines(tiny_source, method="peeks")
        with caplog.at_level(logging.WARNING):
            assert_near(uploads(captured), uploads(eager))
        assert len(caplog.records) == 1 and "eagerly" in caplog.text
    finally:
        REGISTERED.pop("peeks")


def test_larger_images_and_ragged_clients():
    sets = [synthetic_split(n, 4, n, size=32) for n in (300, 8, 40)]
    source = Source("ragged", (Domain("d", *sets, False, ""),), ("a", "b", "c", "d"), {}, crop=4, flip=True)
    captured, eager = two_engines(
        source, method="fedhpro", scenario="nid1", alpha=0.3, clients=7, batch_size=16, local_epochs=1
    )
    assert_same_change(uploads(captured), uploads(eager), eager.sent())
