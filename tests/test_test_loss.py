"""The loss beside the accuracy: per domain, from the same pass, checked where it comes from a site."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, call

import fedhpro
from fedhpro.engines import cpu
from fedhpro.federation import Federation, _test_loss
from fedhpro.report.page import build_page
from fedhpro.report.reading import read_run
from fedhpro.training import LOSS, copy_into, model_tensors

KEYS = TINY | {"local_steps": 2, "rounds": 1}


def by_hand(federation, split):
    """Mean of -log p(y): the logits of all samples at once, in float64."""
    copy_into(model_tensors(federation.net), federation.model)
    with torch.no_grad():
        logits = federation.net.eval()(federation.trainer.transform.plain(split.x)).double()
    return float((logits.logsumexp(1) - logits[torch.arange(len(split.y)), split.y]).mean())


def test_it_is_the_cross_entropy_of_each_domain(tiny_source):
    with Federation(fedhpro.configure(**KEYS), tiny_source) as federation:
        found = federation.next_round()["test_loss"]
        expected = {domain.name: by_hand(federation, domain.test) for domain in tiny_source.domains}
    assert list(found) == ["dark", "light", "AVG"]
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert found["AVG"] == (found["dark"] + found["light"]) / 2


@pytest.mark.parametrize("method, exchange", [("fedproto", "prototypes"), ("fedhpro", "classifier")])
def test_where_models_stay_at_home_it_is_that_of_their_classifiers(tiny_source, method, exchange):
    with Federation(fedhpro.configure(**KEYS | {"method": method, "exchange": exchange}), tiny_source) as federation:
        found = federation.next_round()["test_loss"]
        tests = federation.tests()
        losses = [float(r[LOSS]) for r in federation.engine.evaluate(tests, federation.sent(), federation.memories)]
    dark = [loss for test, loss in zip(tests, losses, strict=True) if test.name == "server/dark"]
    assert len(dark) == 2 and found["dark"] == sum(dark) / 2


def test_worker_processes_give_the_same_bits(tiny_source):
    def records(workers):
        config = fedhpro.configure(**(KEYS | {"workers": workers, "evaluation": "both", "method": "fedavg"}))
        with Federation(config, tiny_source) as federation:
            return json.dumps(federation.next_round())

    assert records(0) == records(2)


def test_held_out_samples_alone_have_a_mean(tiny_source):
    with Federation(
        fedhpro.configure(**KEYS | {"method": "fedavg", "evaluation": "federated"}), tiny_source
    ) as federation:
        assert list(federation.next_round()["test_loss"]) == ["AVG"]


def test_what_is_not_a_number_is_left_out():
    def found(**losses):
        return [(cpu.Test(f"server/{name}"), {LOSS: torch.tensor(loss)}) for name, loss in losses.items()]

    assert _test_loss(found(a=1.0, b=float("nan"))) == {"test_loss": {"a": 1.0}}
    assert _test_loss(found(a=float("inf"))) == {}
    assert _test_loss([(cpu.Test("server/a"), {})]) == {}  # a test that failed


ODD = {
    "a table": torch.ones(2, 2, dtype=torch.float64),
    "below zero": torch.tensor(-1.0, dtype=torch.float64),
    "of another type": torch.tensor(1.0),
    "a count": torch.tensor(1),
}


def test_a_site_cannot_send_anything_else_in_its_place():
    flower = pytest.importorskip("fedhpro.engines.flower", reason="fedhpro[flower] is not installed")
    federation = SimpleNamespace(source=SimpleNamespace(num_classes=2))
    engine = SimpleNamespace(federation=federation, test_size=lambda test: 4)
    table, loss = torch.ones(2, 2, dtype=torch.int64), torch.tensor(0.5, dtype=torch.float64)
    test = cpu.Test("held-out/0")

    def read(**tensors):
        named = {f"0/{name}": value for name, value in tensors.items()}
        return flower.FlowerEngine.confusions(engine, [test], named, ["head", LOSS])

    assert read(head=table, loss=loss) == {test: {"head": table, LOSS: loss}}
    assert read(head=table) == {}  # a test is whole, or left out
    for what, value in ODD.items():
        with pytest.raises(flower.Refused, match="is no loss"):
            read(head=table, loss=value)
            pytest.fail(what)
    with pytest.raises(flower.Refused, match="no table of counts"):
        read(head=loss, loss=loss)


def test_the_audit_of_a_deployment_names_it(capsys):
    _, text, _ = call(capsys, "deploy", "audit", "data=sites", "classes=a,b,c")
    assert re.search(r"evaluation/loss +one number +float64 +8", text)


def test_the_report_draws_it_and_does_without(tiny_source, tmp_path):
    keys = KEYS | {"rounds": 2, "method": "fedavg", "out": str(tmp_path / "run")}
    result = fedhpro.run(source=tiny_source, **keys)
    page = build_page([read_run(result.folder)])
    assert "<figcaption>test loss</figcaption>" in page
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    older = [{key: value for key, value in json.loads(line).items() if key != "test_loss"} for line in lines]
    (result.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in older))
    page = build_page([read_run(result.folder)])
    assert "<figcaption>accuracy</figcaption>" in page and "test loss" not in page
    assert result.plot()._repr_png_().startswith(b"\x89PNG")
