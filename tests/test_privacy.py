"""Client-level differential privacy: what leaves is clipped, noised and withheld, and epsilon is what it should be."""

import math

import pytest
import torch
from conftest import TINY, call

from fedhpro import runs
from fedhpro.config import configure
from fedhpro.errors import ConfigError
from fedhpro.federation import Federation
from fedhpro.methods import METHODS
from fedhpro.privacy import Privacy, PrivateSum, clipped, normal
from fedhpro.training import section

pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
PRIVATE = TINY | {"weights": "equal", "privacy": "central"}
AVERAGED = [name for name in sorted(METHODS) if name not in ("centralised", "local")]


def privacy(where="central", noise=1.0, budget=None, seed=0, clip=2.0, clip_report=0.5):
    return Privacy(where, clip, clip_report, noise, 1e-5, budget, seed)


# --- what is spent -------------------------------------------------------------------------------------------------


def renyi_epsilon(multiplier, rounds, delta):
    """Of composed Gaussian mechanisms, from their Renyi divergence by hand (Canonne, Kamath, Steinke 2020)."""
    orders = [1 + x / 100 for x in range(1, 20_000)]
    return min(
        rounds * a / (2 * multiplier**2) + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1)
        for a in orders
    )


def exact_delta(multiplier, rounds, epsilon):
    """Of composed Gaussian mechanisms (Balle, Wang 2018)."""
    mu = math.sqrt(rounds) / multiplier
    phi = torch.distributions.Normal(0, 1).cdf
    a, b = (float(phi(torch.tensor(x, dtype=torch.float64))) for x in (mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu))
    return a - math.exp(epsilon) * b


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (1.0, 100), (4.0, 50), (10.0, 1000)])
def test_epsilon_is_that_of_the_gaussian_mechanism(noise, rounds):
    spent = privacy(noise=noise).epsilon(rounds)
    assert spent == pytest.approx(renyi_epsilon(noise, rounds, 1e-5), rel=0.01)
    assert 1e-7 < exact_delta(noise, rounds, spent) < 1e-5  # an upper bound, and not a loose one
    assert privacy("local", noise=2 * noise).epsilon(rounds) == spent  # any two datasets: twice the change


def test_a_client_pays_for_the_rounds_that_it_is_asked_in(tiny_source):
    """No less for having been drawn: everybody can know who was."""
    assert privacy().epsilon(0) == 0
    keys = PRIVATE | {"clients_per_domain": 3, "participation": 1 / 3, "rounds": 12}
    with Federation(configure(**keys), tiny_source) as federation:
        asked = [federation.sample(number) for number in range(1, 13)]
        most = [max(sum(k in chosen for chosen in asked[:n]) for k in range(6)) for n in range(1, 13)]
        assert [federation.most_releases(n) for n in range(13)] == [0, *most] and most[-1] < 12
        record = federation.next_round()
    assert record["privacy"]["epsilon"] == pytest.approx(federation.privacy.epsilon(1), abs=1e-4)


def test_a_budget_that_is_too_small_is_refused_and_says_what_it_allows(tiny_source):
    keys = PRIVATE | {"noise": 20.0, "epsilon": 1.0}
    allowed = next(n for n in range(1000) if privacy(noise=20.0).epsilon(n + 1) > 1.0)
    Federation(configure(**keys | {"rounds": allowed}), tiny_source)
    with pytest.raises(ConfigError, match=rf"epsilon=1: 1000 rounds .* the budget is spent after {allowed}:"):
        Federation(configure(**keys | {"rounds": 1000}), tiny_source)


def test_a_run_cannot_be_resumed_past_its_budget(tiny_source, tmp_path):
    keys = PRIVATE | {"noise": 20.0, "epsilon": 1.0, "rounds": 2}
    done = runs.run(keys, source=tiny_source, out=str(tmp_path / "run"))
    assert done.history[-1]["privacy"]["epsilon"] == pytest.approx(privacy(noise=20.0).epsilon(2), abs=1e-4)
    with pytest.raises(ConfigError, match="the budget is spent after"):
        runs.resume(tmp_path / "run", source=tiny_source, rounds=1000)


# --- what leaves ---------------------------------------------------------------------------------------------------


def test_a_group_is_clipped_as_a_whole():
    small, large = {"a": torch.tensor([0.3]), "b": torch.tensor([0.4])}, {"a": torch.tensor([3.0, 4.0])}
    assert clipped(small, 1.0) == small
    assert torch.allclose(clipped(large, 1.0)["a"], torch.tensor([0.6, 0.8]))
    assert torch.equal(clipped({"a": torch.zeros(2)}, 1.0)["a"], torch.zeros(2)) and clipped({}, 1.0) == {}


UPLOAD = {
    "model/weight": torch.full((50, 50), 3.0), "model/bn.running_var": torch.zeros(2500),
    "report/means": torch.full((4, 500), 7.0), "report/counts": torch.tensor([5, 0, 2, 0]),
    "loss/ce": torch.tensor(1.5), "samples": torch.tensor(7),
}  # fmt: skip
RECEIVED = {"model/weight": torch.ones(50, 50), "model/bn.running_var": torch.zeros(2500), "extra/S": torch.ones(2)}


def test_with_local_noise_nothing_leaves_that_is_not_clipped_and_noised():
    kept = {name: value.clone() for name, value in UPLOAD.items()}
    sent = privacy("local", noise=1e-9).leave(3, 1, dict(UPLOAD), RECEIVED)
    assert sent.keys() == UPLOAD.keys() and all(torch.equal(UPLOAD[name], kept[name]) for name in kept)
    assert (sent["model/weight"] - 1).norm() == pytest.approx(2.0, rel=1e-3)  # clip
    assert sent["report/means"].norm() == pytest.approx(0.5, rel=1e-3)  # clip_report
    assert sent["report/counts"].tolist() == [1, 1, 1, 1] and sent["samples"] == 4 and sent["loss/ce"] == 0
    sent = privacy("local", noise=10.0).leave(3, 1, dict(UPLOAD), RECEIVED)
    assert (sent["model/weight"] - 1).std() == pytest.approx(10 * math.sqrt(2) * 2.0, rel=0.05)  # two groups
    assert sent["report/means"].std() == pytest.approx(10 * math.sqrt(2) * 0.5, rel=0.05)
    assert (sent["model/bn.running_var"] >= 0).all() and (sent["model/bn.running_var"] > 0).any()
    alone = {name: value for name, value in UPLOAD.items() if not name.startswith("report/")}
    sent = privacy("local", noise=10.0).leave(3, 1, alone, RECEIVED)
    assert (sent["model/weight"] - 1).std() == pytest.approx(10 * 2.0, rel=0.05)  # one group


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_of_what_has_no_length_nothing_leaves(bad):
    assert clipped({"a": torch.tensor([bad, 5000.0]), "b": torch.ones(2)}, 1.0)["a"].tolist() == [0, 0]
    sent = privacy("local", noise=1e-9).leave(3, 1, UPLOAD | {"model/weight": torch.full((50, 50), bad)}, RECEIVED)
    assert torch.allclose(sent["model/weight"], RECEIVED["model/weight"])


def test_noise_of_the_operating_system_is_normal():
    found = normal(torch.Size([333, 333]), None)
    assert found.shape == (333, 333) and abs(found.mean()) < 0.02 and found.std() == pytest.approx(1, abs=0.02)
    assert (found.abs() < 1.96).double().mean() == pytest.approx(0.95, abs=0.005)
    assert normal(torch.Size([]), None).shape == () and normal(torch.Size([0]), None).shape == (0,)
    assert abs((found[:166] * found[166:332]).mean()) < 0.03  # the two of a pair


def test_noise_that_protects_nobody_is_refused(tiny_source):
    with pytest.raises(ConfigError, match=r"^noise=1e-300 protects nobody"):
        Federation(configure(**PRIVATE | {"noise": 1e-300}), tiny_source)


def test_in_a_deployment_nobody_can_draw_the_noise_again():
    for seed, same in ((0, True), (None, False)):
        one, other = (privacy("local", seed=seed).leave(3, 1, dict(UPLOAD), RECEIVED) for _ in range(2))
        assert torch.equal(one["model/weight"], other["model/weight"]) is same
    assert Privacy.of(configure(privacy="local", data="sites", classes="a,b")).seed is None


def fold(noise, uploads, asked):
    start = section(RECEIVED, "model")
    total = PrivateSum(privacy(noise=noise), start, asked, torch.Generator().manual_seed(0))
    for k, upload in enumerate(uploads):
        total.add(k, section(upload, "model"), section(upload, "report") | {"samples": upload["samples"]})
    return total.result()


def test_the_server_releases_a_noised_sum_over_those_it_asked():
    model, report = fold(1e-9, [UPLOAD, UPLOAD], asked=4)
    assert (model["weight"] - 1).norm() == pytest.approx(2 * 2.0 / 4, rel=1e-3)
    assert report["means"].shape == (1, 4, 500) and report["means"].norm() == pytest.approx(2 * 0.5 / 4, rel=1e-3)
    assert report["counts"].tolist() == [[4, 4, 4, 4]] and report["samples"].tolist() == [4]
    model, report = fold(10.0, [UPLOAD, UPLOAD], asked=4)
    assert (model["weight"] - 1).std() == pytest.approx(10 * math.sqrt(2) * 2.0 / 4, rel=0.05)
    assert (model["bn.running_var"] >= 0).all()


def test_one_client_more_changes_the_sum_by_no_more_than_the_bounds():
    huge = UPLOAD | {"model/weight": torch.full((50, 50), 1e30), "report/means": torch.full((4, 500), -1e30)}
    (with_it, report), (without, report_2) = fold(1e-9, [UPLOAD, huge], 2), fold(1e-9, [UPLOAD], 2)
    assert 2 * (with_it["weight"] - without["weight"]).norm() <= 2.0 * 1.001
    assert 2 * (report["means"] - report_2["means"]).norm() <= 0.5 * 1.001


# --- whole rounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["central", "local"])
@pytest.mark.parametrize("method", AVERAGED)
def test_every_method_and_both_places(tiny_source, method, where):
    keys = PRIVATE | {"method": method, "privacy": where, "noise": 0.01}
    with Federation(configure(**keys), tiny_source) as federation:
        record = federation.next_round()
        assert record["refused"] == [] and record["aggregated"] and "loss" not in record
        assert record["privacy"]["epsilon"] > 0
        assert all(value.isfinite().all() for value in federation.model.values())
        federation.next_round()


def test_a_vote_is_refused(tiny_source):
    with pytest.raises(ConfigError, match=r"reports vote, a single number, .* agreed=false$"):
        Federation(configure(**PRIVATE | {"method": "fedhpro-plus", "agreed": True}), tiny_source)


def test_without_noise_to_speak_of_or_clipping_it_is_the_mean(tiny_source):
    found = []
    for keys in ({"privacy": "off"}, {"clip": 1e4, "clip_report": 1e4, "noise": 1e-12}):
        with Federation(configure(**PRIVATE | {"method": "fedavg"} | keys), tiny_source) as federation:
            federation.next_round()
            found.append(federation.model)
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-5) for name in found[0])


def test_two_workers_and_a_resumed_run_give_the_same_bits(tiny_source, tmp_path):
    keys = PRIVATE | {"method": "fedhpro", "privacy": "local", "rounds": 2}
    whole = runs.run(keys, source=tiny_source, out=str(tmp_path / "whole"))
    runs.run(keys | {"rounds": 1, "workers": 2}, source=tiny_source, out=str(tmp_path / "part"))
    assert runs.resume(tmp_path / "part", source=tiny_source, rounds=2).history == whole.history


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"weights": "samples"}, "all clients must count the same"),
        ({"evaluation": "federated"}, "would tell every client's accuracy without noise"),
        ({"robust": "median"}, "robust=median makes no sum"),
        ({"method": "local"}, "nothing leaves a client"),
        ({"method": "centralised"}, "nothing leaves a client"),
    ],
)
def test_what_does_not_go_together_is_said(tiny_source, keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Federation(configure(**PRIVATE | keys), tiny_source)


def test_a_run_shows_epsilon_and_writes_it_down(tmp_path, capsys):
    keys = [f"{name}={value}" for name, value in (PRIVATE | {"rounds": 1, "samples_per_client": 8}).items()]
    code, text, error = call(capsys, "run", *keys, "evaluation=off", f"out={tmp_path / 'run'}")
    assert code == 0 and "epsilon" in text and "no round was evaluated" in text, text + error
    assert "differential privacy with central noise: epsilon = " in (tmp_path / "run/MODEL_CARD.md").read_text()
    assert "privacy spent" in (tmp_path / "run/report.html").read_text()
