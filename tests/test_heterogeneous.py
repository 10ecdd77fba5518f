"""Mixed federations: every client its own network; only the classifier and the prototypes travel."""

import json

import pytest
import torch
from conftest import TINY

from fedhpro.config import configure
from fedhpro.errors import ConfigError
from fedhpro.federation import Federation
from fedhpro.methods import METHODS
from fedhpro.models import GROUPS
from fedhpro.training import section

# small networks in place of the paper's, of three families and widths
MIXED = {"model": "toy", "dim": 64, "exchange": "auto"}
FIT = sorted(name for name in METHODS if "classifier" in METHODS[name].exchanges)
UNFIT = sorted(set(METHODS) - set(FIT) - {"local"})


@pytest.fixture(autouse=True)
def toy_group(monkeypatch):
    monkeypatch.setitem(GROUPS, "toy", ("cnn", "resnet10"))


def run(source, **keys):
    with Federation(configure(**(TINY | MIXED | keys)), source) as federation:
        return list(federation.rounds()), federation


def test_the_papers_groups():
    assert {name: len(group) for name, group in GROUPS.items() if name != "toy"} == {
        "htfe2": 2, "htfe3": 3, "htfe5": 5, "htfe8": 8,
    }  # fmt: skip
    assert "resnet10" in GROUPS["htfe5"] and "mobilenetv2" not in GROUPS["htfe5"]


@pytest.mark.parametrize("method", FIT)
def test_only_the_classifier_travels_and_extractors_stay_apart(tiny_source, method):
    history, federation = run(tiny_source, method=method)
    assert federation.exchange == "classifier"
    assert {n for n in federation.schema if n.startswith("model/")} == {
        "model/classifier.weight",
        "model/classifier.bias",
    }
    assert federation.model["classifier.weight"].shape == (4, 64)
    nets = {k: section(memory, "net") for k, memory in federation.memories.items()}
    assert nets[0].keys() == nets[2].keys() != nets[1].keys()  # client k has network k mod 2
    assert any(not torch.equal(nets[0][name], nets[2][name]) for name in nets[0])
    last = history[-1]
    assert 0 <= last["own_labels"] <= 100 and set(last["accuracy"]) == {"dark", "light", "AVG"}


@pytest.mark.parametrize("method", ["fedproto", "fedhpro", "fedsa"])
def test_same_bits_with_workers(tiny_source, method):
    alone, one = run(tiny_source, method=method)
    pooled, two = run(tiny_source, method=method, workers=2)
    assert json.dumps(alone) == json.dumps(pooled)
    pairs = [(one.snapshot()[0], two.snapshot()[0])] + [(one.memories[k], two.memories[k]) for k in one.memories]
    assert len(pairs) == 4 and all(torch.equal(value, b[name]) for a, b in pairs for name, value in a.items())


@pytest.mark.parametrize("method", UNFIT)
def test_a_method_that_averages_whole_models_refuses(tiny_source, method):
    with pytest.raises(ConfigError, match=f"{method} would have to average whole models") as error:
        run(tiny_source, method=method)
    assert "\n" not in str(error.value)


def test_whole_model_exchange_is_refused_when_asked_for(tiny_source):
    with pytest.raises(ConfigError, match="average whole models"):
        run(tiny_source, method="fedproto", exchange="model")


def test_prototype_only_in_a_mixed_federation(tiny_source):
    history, federation = run(tiny_source, method="fedproto", exchange="prototypes")
    assert federation.model == {}
    assert set(history[-1]["heads"]) == {"head", "nearest_prototype"}


def test_own_labels_weigh_classes_by_what_the_client_holds(tiny_source):
    from fedhpro.engines.cpu import Test

    with Federation(configure(**(TINY | MIXED | {"method": "fedproto"})), tiny_source) as federation:
        counts = torch.bincount(federation.clients[0].train.y, minlength=4).tolist()
        confusion = torch.diag(torch.tensor([10, 0, 10, 0]))
        confusion[1, 0] = confusion[3, 0] = 10
        expected = 100 * (counts[0] + counts[2]) / sum(counts)
        assert federation._on_own_labels(Test("server/dark", 0), confusion) == pytest.approx(expected)
