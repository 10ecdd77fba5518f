"""Options that every method can use, and the probe."""

import math

import pytest
import torch
from conftest import TINY

from fedhpro import runs
from fedhpro.config import configure
from fedhpro.data.sources import Domain, Source, Split
from fedhpro.equations import class_means
from fedhpro.errors import ConfigError, RunError
from fedhpro.federation import Federation
from fedhpro.probe import features, probe
from fedhpro.training import LocalTrainer


def federation(source, **keys):
    return Federation(configure(**(TINY | keys)), source)


def test_learning_rate_schedules(tiny_source):
    def rates(**keys):
        return [federation(tiny_source, rounds=4, lr=0.1, **keys).trainer.settings.lr_of(r) for r in (1, 2, 3, 4)]

    assert rates() == [0.1] * 4
    assert rates(lr_schedule="exponential", lr_decay=0.5) == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    expected = [0.05 * (1 + math.cos(math.pi * done / 4)) for done in range(4)]
    assert rates(lr_schedule="cosine") == pytest.approx(expected)


def test_the_schedule_reaches_the_optimizer(tiny_source):
    """With a learning rate that all but vanishes after round 1, round 2 leaves the model where it is."""
    with federation(tiny_source, method="fedavg", lr_schedule="exponential", lr_decay=1e-30, weight_decay=0) as run:
        run.next_round()
        before = run.model["classifier.weight"].clone()
        run.next_round()
        torch.testing.assert_close(run.model["classifier.weight"], before, rtol=0, atol=1e-7)


def count_steps(monkeypatch, source, **keys):
    import fedhpro.training as training

    seen = []
    real = training.step
    monkeypatch.setattr(training, "step", lambda *a: (seen.append(len(a[5])), real(*a))[1])
    with federation(source, **keys) as run:
        seen.clear()
        run.trainer.update(1, 0, run.sent(), {})
    monkeypatch.setattr(training, "step", real)
    return seen


def test_local_steps_instead_of_epochs(tiny_source, monkeypatch):
    size = federation(tiny_source).sizes[0]
    epoch = count_steps(monkeypatch, tiny_source, batch_size=4)
    assert sum(epoch) == size
    for steps in (1, len(epoch), 2 * len(epoch) + 1):
        assert len(count_steps(monkeypatch, tiny_source, batch_size=4, local_steps=steps)) == steps


def test_exchange_that_a_method_does_not_have(tiny_source):
    for method, exchange in (("fedhpro", "prototypes"), ("moon", "classifier"), ("fedavg", "prototypes")):
        with pytest.raises(ConfigError, match=f"exchange={exchange}: {method} exchanges"):
            federation(tiny_source, method=method, exchange=exchange)


@pytest.mark.parametrize(
    "method, kind, size",
    [
        ("fedavg", "class means under the global model", 1),
        ("fedproto", "global prototypes", 1),
        ("fedsa", "anchors", 1),
        ("fedhpro", "hyper-prototypes", 5),
    ],
)
def test_the_probe_gives_every_method_prototypes(tiny_source, tmp_path, method, kind, size):
    done = runs.run(configure(**(TINY | {"method": method}), out=str(tmp_path / "run")), source=tiny_source)
    found = probe(done.folder, tiny_source)
    assert found.kind == kind and found.prototypes.shape == (4, size, 128) and found.present.all()
    assert set(found.domains) == {"dark", "light"}
    # the means again, with the model from its file
    from fedhpro.use import load_model

    net = load_model(done.folder).net
    fresh = federation(tiny_source, method=method)
    parts = [features(net, client.train, fresh.trainer.transform) for client in fresh.clients]
    z, y = (torch.cat(each) for each in zip(*parts, strict=True))
    torch.testing.assert_close(found.means, class_means(z, y, 4)[0])
    if method == "fedavg":
        torch.testing.assert_close(found.prototypes[:, 0], found.means)


def test_the_probe_needs_a_global_model(tiny_source, tmp_path):
    done = runs.run(configure(**(TINY | {"method": "local"}), out=str(tmp_path / "run")), source=tiny_source)
    with pytest.raises(RunError, match="no global model"):
        probe(done.folder, tiny_source)


def test_run_or_resume(tiny_source, tmp_path, monkeypatch):
    import fedhpro.federation as module

    monkeypatch.setattr(module.data, "load", lambda name: tiny_source)
    config = configure(**TINY, out=str(tmp_path / "run"))
    first = runs.run_or_resume(config)
    monkeypatch.setattr(LocalTrainer, "update", lambda *a: pytest.fail("it is done already"))
    again = runs.run_or_resume(config)
    assert again.history == first.history and again.status == "finished"
    with pytest.raises(ConfigError, match="another config"):
        runs.run_or_resume(config.replace(lr=0.5))


def test_facts_of_a_method():
    from fedhpro.facts import rehearse

    facts = {(fact.where, fact.name): (fact.shape, fact.bytes) for fact in rehearse("fedhpro")}
    model = ("4,909,002 numbers", 4 * (4_903_242 + 5_760))
    assert facts[("down", "a whole model")] == facts[("up", "a whole model")] == model
    assert facts[("down", "S")] == ("C x 5 x d", 4 * 10 * 5 * 512)
    assert facts[("up", "gradients")] == ("C x d", 4 * 10 * 512)
    assert {fact.where for fact in rehearse("local")} == {"kept by the client"}


def test_a_model_that_lacks_what_the_method_needs_is_refused_in_one_sentence():
    texts = Split(torch.randint(0, 50, (40, 12)), torch.arange(40) % 4)
    source = Source(
        "words", (Domain("words", texts, texts, texts, True, ""),), tuple("abcd"), {"words": (2, 10)}, vocab=50
    )
    keys = TINY | {"method": "fedrcl", "model": "textcnn", "width": None}
    with pytest.raises(ConfigError, match=r"method=fedrcl with model=textcnn: .* no stages"):
        Federation(configure(**keys), source)
    keys = TINY | {"method": "fedhpro-plus", "model": "textcnn", "width": None}
    with pytest.raises(ConfigError, match=r"method=fedhpro-plus with model=textcnn: .* no stages"):
        Federation(configure(**(keys | {"contrasted": True})), source)
    with Federation(configure(**keys), source) as federation:  # without contrast, where nobody asks for it
        assert [record["aggregated"] for record in federation.rounds()] == [True, True]
