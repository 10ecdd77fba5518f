"""nearest=true: the class of the nearest of the clients' class means."""

import pytest
import torch
from conftest import TINY

from fedhpro import config as configuration
from fedhpro import nearest, runs, use
from fedhpro.config import configure
from fedhpro.errors import ConfigError
from fedhpro.federation import Federation
from fedhpro.probe import features, local_accuracies

KEYS = TINY | {"method": "fedavg", "nearest": True}


def rounds(source, **keys):
    with Federation(configure(**(KEYS | keys)), source) as federation:
        return list(federation.rounds()), federation


def test_the_largest_logit_is_the_class_of_the_nearest_mean():
    rng = torch.Generator().manual_seed(0)
    z, means = torch.randn(200, 6, generator=rng), torch.randn(3, 4, 6, generator=rng)
    counts = torch.randint(0, 2, (3, 4), generator=rng)
    counts[:, 1] = 0  # nobody holds it
    found = nearest.logits(z, means, counts)
    distances = torch.cdist(z, means.flatten(0, 1)).view(200, 3, 4).masked_fill(counts == 0, torch.inf)
    assert torch.equal(found.argmax(1), distances.amin(1).argmin(1)) and (found[:, 1] < -1e29).all()
    squares = (z.square().sum(1, keepdim=True) - 2 * found).clamp_min(0)
    torch.testing.assert_close(squares.sqrt()[:, [0, 2, 3]], distances.amin(1)[:, [0, 2, 3]])


@pytest.mark.parametrize("method", ["fedavg", "moon", "fedsa", "fedhpro", "fedhpro-plus"])
def test_training_does_not_change_and_the_head_is_another(tiny_source, method):
    (*_, with_means), one = rounds(tiny_source, method=method)
    (*_, without), other = rounds(tiny_source, method=method, nearest=False)
    assert all(torch.equal(one.model[name], other.model[name]) for name in one.model)
    assert with_means["heads"][nearest.HEAD] == with_means["accuracy"]
    assert with_means["heads"]["head"] == without["accuracy"] and with_means["test_loss"] == without["test_loss"]
    means = 3 * (4 * 128 * 4 + 4 * 8)  # of three clients: C x d floats, and how many samples of each class
    assert with_means["bytes_up"] - without["bytes_up"] == means and with_means["bytes_down"] == without["bytes_down"]


def test_the_means_are_those_of_the_model_that_was_received(tiny_source):
    with Federation(configure(**KEYS), tiny_source) as federation:
        federation.next_round()
        received = {name: value.clone() for name, value in federation.model.items()}
        federation.next_round()
    federation.net.load_state_dict(received, strict=False)
    for row, k in enumerate(federation.sample(2)):
        z, y = features(federation.net, federation.clients[k].train, federation.trainer.transform)
        for c in y.unique():
            torch.testing.assert_close(federation.nearest["means"][row, c], z[y == c].mean(0))
        assert torch.equal(federation.nearest["counts"][row], torch.bincount(y, minlength=4))


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_give_the_same_bits(tiny_source, workers):
    assert rounds(tiny_source, workers=workers)[0] == rounds(tiny_source)[0]


def test_who_does_not_take_part_has_no_means(tiny_source):
    _, federation = rounds(tiny_source, participation=0.4)
    assert len(federation.nearest["means"]) == 1
    kept = nearest.empty(3, 4, 128)
    one = {"means": torch.ones(1, 4, 128), "counts": torch.ones(1, 4, dtype=torch.int64)}
    found = nearest.latest(kept, one)
    assert found["counts"].sum(1).tolist() == [4, 0, 0] and kept["counts"].sum() == 0


def test_a_resumed_run_and_the_model_for_use(tiny_source, tmp_path):
    whole = runs.run(configure(**(KEYS | {"rounds": 3}), out=str(tmp_path / "whole")), source=tiny_source)
    cut = configure(**(KEYS | {"rounds": 3}), out=str(tmp_path / "cut"))

    class Stop(runs.Callback):
        def on_round(self, record):
            if record["round"] == 2:
                raise KeyboardInterrupt

    runs.run(cut, source=tiny_source, callbacks=[Stop()])
    again = runs.resume(tmp_path / "cut", source=tiny_source)
    assert again.history == whole.history
    one, other = (use.load_model(tmp_path / name) for name in ("whole", "cut"))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    domains = {domain.name: domain.test for domain in tiny_source.domains}
    for name, split in domains.items():
        right = (one(split.x).argmax(1) == split.y).float().mean()
        assert 100 * float(right) == pytest.approx(whole.accuracy[name])
    for kind in use.FORMATS:
        use.export(tmp_path / "whole", tmp_path / f"model.{kind}", kind)  # which compares probabilities


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"method": "fedproto", "exchange": "prototypes"}, "exchange=prototypes"),
        ({"method": "local"}, "exchange=nothing"),
        ({"secure": True}, "secure=true"),
        ({"robust": "median"}, "robust=median"),
        ({"privacy": "central", "noise": 1.0}, "privacy=central"),
    ],
)
def test_what_it_does_not_go_with(tiny_source, keys, words):
    with pytest.raises(ConfigError, match=f"nearest=true needs .*{words}"):
        Federation(configure(**(KEYS | keys)), tiny_source)


def test_the_config_and_the_card_say_so(tiny_source, tmp_path):
    done = runs.run(configure(**KEYS, out=str(tmp_path / "run")), source=tiny_source)
    assert configuration.load(done.folder).nearest
    assert "class means of single clients" in (done.folder / "MODEL_CARD.md").read_text()
    assert len(local_accuracies(done.folder, tiny_source)) == 3  # each client's own model is tested alike
