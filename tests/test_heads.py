"""Other classifiers on the features of a finished run."""

import json

import pytest
import torch
from conftest import TINY, call

from fedhpro import config as configuration
from fedhpro import measures, runs
from fedhpro.config import configure
from fedhpro.errors import RunError
from fedhpro.heads import NAMES, compared, final_features, heads, mixture
from fedhpro.report.reading import read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_source):
    out = tmp_path_factory.mktemp("heads") / "run"
    return runs.run(configure(**(TINY | {"method": "fedavg"}), out=str(out)), source=tiny_source)


def test_the_own_classifier_is_the_runs_accuracy_and_the_nearest_mean_is_the_nearest(run, tiny_source):
    found = heads(run.folder, tiny_source)
    assert list(found) == list(NAMES) and found["h*"] == pytest.approx(run.accuracy["AVG"])
    _, _, parts, tests = final_features(run.folder, tiny_source)
    points = [(z[y == c].mean(0), c) for z, y in parts for c in range(4) if (y == c).any()]
    scores = []
    for z, y in tests.values():
        nearest = [min(points, key=lambda point: float((sample - point[0]).norm()))[1] for sample in z]
        scores.append(100 * float((torch.tensor(nearest) == y).float().mean()))
    assert found["nearest client mean"] == pytest.approx(sum(scores) / len(scores))


def test_domains_apart_need_more_than_one_mean():
    """A class on either side of the other, by client: the mean of both clients is in the middle, and no use."""
    y = torch.tensor([0, 0, 1, 1])
    one = (torch.tensor([[0.0, 4], [0, 4], [0, 1], [0, 1]]), y)
    two = (torch.tensor([[0.0, -4], [0, -4], [0, -1], [0, -1]]), y)
    found = compared([one, two], {"a": one, "b": two}, torch.zeros(2, 2), torch.zeros(2))
    assert found["nearest client mean"] == 100 and found["nearest pooled mean"] == 50


def test_a_mixture_lies_within_its_class():
    z, y = torch.tensor([[0.0], [1.0], [5.0], [6.0]]), torch.tensor([0, 0, 1, 1])
    for seed in range(20):
        points = mixture(z, y, 2, torch.Generator().manual_seed(seed))
        assert 0 < points[0] < 1 and 5 < points[1] < 6


def test_the_command_and_a_column_of_an_experiment(run, tiny_source, capsys, monkeypatch):
    import fedhpro.federation as module

    monkeypatch.setattr(module.data, "load", lambda name: tiny_source)
    _, out, _ = call(capsys, "heads", str(run.folder), "--json")
    found = json.loads(out)[str(run.folder)]
    _, out, _ = call(capsys, "heads", str(run.folder))
    assert f"{found['nearest client mean']:.2f}" in out and "the nearest of the clients' class means" in out
    record = read_run(run.folder)
    assert measures.measured("head.h*", record) == {"final": pytest.approx(found["h*"])}
    kept = json.loads((run.folder / measures.HEADS).read_text())
    assert kept == {"round": 2, "accuracies": pytest.approx(found)}
    monkeypatch.setattr(measures, "heads", lambda folder: pytest.fail("it is kept"))
    assert measures.measured("head.all features", record)["final"] == pytest.approx(found["all features"])


def test_a_run_of_a_gpu_is_read_without_one(run, tiny_source, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elsewhere = configuration.load(run.folder).replace(engine="cuda", precision="bf16")
    monkeypatch.setattr(configuration, "load", lambda folder: elsewhere)
    assert heads(run.folder, tiny_source)["h*"] == pytest.approx(run.accuracy["AVG"])


def test_without_a_global_model_there_is_nothing_to_compare(tiny_source, tmp_path):
    done = runs.run(configure(**(TINY | {"method": "local"}), out=str(tmp_path / "run")), source=tiny_source)
    with pytest.raises(RunError, match="no global model"):
        heads(done.folder, tiny_source)
