"""Hostile clients and folds that withstand them: each rule by hand, its bounds, each attack, and whole rounds."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhpro import robust, runs
from fedhpro.attacks import ON_MODELS, hostile_clients
from fedhpro.config import configure
from fedhpro.errors import ConfigError, FederationStalled
from fedhpro.federation import Federation
from fedhpro.methods import METHODS

RULES = ("clip", "median", "trimmed", "krum", "multikrum")
TOGETHER = [name for name in sorted(METHODS) if name not in ("centralised", "local")]
SIX = TINY | {
    "clients_per_domain": 3,
    "samples_per_client": 20,
    "robust_share": 0.1,
    "attack_share": 0.1,
}  # 1 of 6 is hostile


def fold_of(rule, models, reports, share=0.2, **keys):
    """The fold of plain numbers: a model of a weight and a variance, and one report."""
    config = configure(method="fedavg", robust=rule, robust_share=share, **keys)
    sent = {"weight": torch.zeros(2), "bn.running_var": torch.ones(1)}
    fold = robust.RobustFold(config, len(models) + 3, sent)  # more were asked than answered
    for k, (model, report) in enumerate(zip(models, reports, strict=True)):
        report = {"means": torch.tensor(report[0]), "counts": torch.tensor(report[1]), "samples": torch.tensor(4)}
        fold.add(k, {"weight": torch.tensor(model[:2]), "bn.running_var": torch.tensor(model[2:])}, report)
    return fold


# two classes with two features; nobody but the last holds class 1
MODELS = [[1.0, 5.0, 1.0], [2.0, 4.0, 2.0], [3.0, 3.0, 3.0], [4.0, 2.0, 4.0], [500.0, 100.0, 0.0]]
ROW = [7.0, 7.0]
REPORTS = [([[k, 2.0 * k], ROW if k == 5 else [0.0, 0.0]], [k, 3 if k == 5 else 0]) for k in (1.0, 2.0, 3.0, 4.0, 5.0)]
REPORTS = [(means, [int(n) for n in counts]) for means, counts in REPORTS]


def test_median_by_hand():
    model, reports = fold_of("median", MODELS, REPORTS).result()
    assert model["weight"].tolist() == [3.0, 4.0] and model["bn.running_var"].tolist() == [2.0]
    assert reports["means"].tolist() == [[[3.0, 6.0], ROW]]  # of class 1, all that its one holder sent
    assert reports["counts"].tolist() == [[3, 3]] and reports["counts"].dtype == torch.int64
    assert reports["samples"].tolist() == [4]


def test_the_median_of_an_even_number_is_between_the_middle_two():
    model, reports = fold_of("median", MODELS[:4], REPORTS[:4]).result()
    assert model["weight"].tolist() == [2.5, 3.5]
    assert reports["means"].tolist() == [[[2.5, 5.0], [0.0, 0.0]]] and reports["counts"].tolist() == [[2, 0]]


def test_trimmed_mean_by_hand():
    model, reports = fold_of("trimmed", MODELS, REPORTS).result()  # 0.2 of 5: one off each end
    torch.testing.assert_close(model["weight"], torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(model["bn.running_var"], torch.tensor([2.0]))
    assert reports["means"].tolist() == [[[3.0, 6.0], ROW]]
    plain, _ = fold_of("trimmed", MODELS, REPORTS, share=0.0).result()
    torch.testing.assert_close(plain["weight"], torch.tensor([102.0, 22.8]))


def test_clipping_by_hand():
    models = [[3.0, 4.0, 1.0], [0.0, 5.0, 1.0], [30.0, 40.0, 1.0]]  # steps of length 5, 5 and 50
    reports = [([[3.0, 4.0], [0.0, 0.0]], [2, 0]), ([[0.0, 1.0], [6.0, 8.0]], [9, 1]), ([[60.0, 80.0], ROW], [4, 0])]
    fold = fold_of("clip", models, reports)
    model, clipped = fold.result()
    torch.testing.assert_close(model["weight"], torch.tensor([2.0, 13 / 3]))  # the third is [3, 4] now
    expected = [[[3.0, 4.0], [0.0, 0.0]], [[0.0, 1.0], [6.0, 8.0]], [[3.0, 4.0], ROW]]  # lengths 5, 1, 100: 5
    torch.testing.assert_close(clipped["means"], torch.tensor(expected))
    assert clipped["counts"].tolist() == [[2, 0], [4, 1], [4, 0]]  # nobody has more samples than the median
    assert fold.note == {"clipped": [{"client": 2, "model": 0.1, "reports": 0.05}]}
    given_limit, _ = fold_of("clip", models, reports, robust_clip=2.5).result()
    torch.testing.assert_close(given_limit["weight"], torch.tensor([1.0, 13 / 6]))


def test_krum_by_hand():
    """Without a report, squared distances of the models alone: client 1 is nearest to its 5 - 1 - 2 nearest."""
    points = [[0.0, 0.0, 1.0], [1.0, 0.0, 1.0], [2.0, 0.0, 1.0], [4.0, 0.0, 1.0], [100.0, 0.0, 1.0]]
    same = [([[1.0, 1.0], [1.0, 1.0]], [1, 1])] * 5
    krum = fold_of("krum", points, same)
    model, reports = krum.result()
    assert model["weight"].tolist() == [1.0, 0.0] and len(reports["means"]) == 1
    assert krum.note == {"left_out": [0, 2, 3, 4]}
    several = fold_of("multikrum", points, same)
    model, reports = several.result()
    torch.testing.assert_close(model["weight"], torch.tensor([7 / 4, 0.0]))
    assert several.note == {"left_out": [4]} and len(reports["means"]) == 4


def test_krum_sees_a_report_beside_a_large_model():
    """An honest model with a hostile report: the parts have the same say, whatever their size."""
    rng = torch.Generator().manual_seed(0)
    models = torch.randn(7, 1000, generator=rng)
    means = 1e-3 * torch.randn(7, 2, 3, generator=rng)
    means[4] *= 30
    square = robust.distances(models, torch.zeros(1000), {"means": means, "counts": torch.ones(7, 2).long()}, 1)
    assert 4 not in robust.nearest_to_others(square, hostile=1, keep=6)
    alone = robust.distances(models, torch.zeros(1000), {}, 0)
    torch.testing.assert_close(alone, torch.cdist(models.double(), models.double()).square() / alone_median(models))


def alone_median(models):
    pairs = [float((a - b).double().square().sum()) for i, a in enumerate(models) for b in models[i + 1 :]]
    return sorted(pairs)[(len(pairs) - 1) // 2]


@pytest.mark.parametrize("part", ["model", "report"])
def test_krum_sees_two_fifths_that_are_hostile_in_one_part_alone(part):
    """Where most pairs have a hostile client in them, the median of all distances is one of theirs: then the honest
    client that is somewhat apart in the other part would be left out in place of a hostile one.
    """
    rng = torch.Generator().manual_seed(0)
    models, means = torch.randn(20, 1000, generator=rng), torch.randn(20, 4, 3, generator=rng)
    one, other = (models, means) if part == "model" else (means, models)
    one[12:] *= -10
    other[0] *= 4
    reports = {"means": means, "counts": torch.ones(20, 4).long()}
    square = robust.distances(models, torch.zeros(1000), reports, 8)
    assert robust.nearest_to_others(square, hostile=8, keep=12) == list(range(12))


def test_clients_without_a_class_in_common_are_at_the_usual_distance():
    means, counts = (
        torch.tensor([[[1.0], [0.0]], [[3.0], [0.0]], [[0.0], [9.0]]]),
        torch.tensor([[1, 0], [1, 0], [0, 1]]),
    )
    square = robust.distances(torch.zeros(3, 0), torch.zeros(0), {"means": means, "counts": counts}, 0)
    assert square.tolist() == [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_uploads_does_not_matter(rule):
    rng = torch.Generator().manual_seed(3)
    models = torch.rand(9, 3, generator=rng).tolist()
    counts = torch.randint(0, 3, (9, 2), generator=rng).tolist()
    reports = list(zip(torch.randn(9, 2, 2, generator=rng).tolist(), counts, strict=True))
    order = torch.randperm(9, generator=rng).tolist()
    first, second = (
        fold_of(rule, models, reports),
        fold_of(rule, [models[k] for k in order], [reports[k] for k in order]),
    )
    (a, own), (b, other) = first.result(), second.result()
    for name in a:
        torch.testing.assert_close(a[name], b[name])
    for name in own:
        flat = [
            sorted(map(str, value.flatten(1).tolist() if value.dim() > 1 else value.tolist()))
            for value in (own[name], other[name])
        ]
        assert flat[0] == flat[1]
    if "left_out" in first.note:
        assert first.note["left_out"] == sorted(order[k] for k in second.note["left_out"])


numbers = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.booleans())
def test_breakdown(data, hostile, median):
    """With f hostile of more than 2f, every coordinate stays within the range of the honest, whatever f send."""
    n = data.draw(st.integers(2 * hostile + 1, 2 * hostile + 6))
    honest = data.draw(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=n - hostile, max_size=n - hostile))
    extreme = st.floats(width=32, allow_nan=False, allow_infinity=False)
    spoilt = data.draw(st.lists(st.lists(extreme, min_size=3, max_size=3), min_size=hostile, max_size=hostile))
    values = torch.tensor(honest + spoilt)[torch.from_numpy(np.random.default_rng(n).permutation(n))]
    found = robust.trimmed_mean(values, None, n if median else hostile).float()
    good = torch.tensor(honest)
    assert bool((found >= good.amin(0)).all() and (found <= good.amax(0)).all())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 2**100, width=32), min_size=3, max_size=3), min_size=5, max_size=9),
    st.sampled_from(RULES),
)
def test_variances_are_never_negative(models, rule):
    model, _ = fold_of(rule, models, [REPORTS[0]] * len(models)).result()
    assert bool((model["bn.running_var"] >= 0).all()) and all(bool(value.isfinite().all()) for value in model.values())


@pytest.mark.parametrize("rule", RULES)
def test_what_overflows_when_it_is_decoded_does_no_harm(rule):
    reports = [([[1.0, 1.0], [1.0, k / 10]], [1, 1]) for k in range(7)]
    reports[3] = ([[torch.inf, torch.nan], [-torch.inf, 1.0]], [1, 1])
    model, folded = fold_of(rule, [[1.0, float(k), 1.0] for k in range(7)], reports).result()
    assert all(bool(value.isfinite().all()) for value in [*model.values(), *folded.values()])
    assert float(folded["means"].abs().max()) < 2


def test_means_go_by_counts_of_their_own():
    """A class that one client does not count for its gradients is still compared in its means."""
    counts, all_ones = torch.tensor([[1], [1], [0]]), torch.ones(3, 1, dtype=torch.int64)
    means = torch.tensor([[[1.0]], [[2.0]], [[90.0]]])
    _, one = robust.trimmed(torch.zeros(3, 0), {"counts": counts, "means": means, "mean_counts": all_ones}, 3)
    assert one["means"].tolist() == [[[2.0]]]
    _, one = robust.trimmed(torch.zeros(3, 0), {"counts": counts, "means": means}, 3)
    assert one["means"].tolist() == [[[1.5]]]


# attacks


def test_points_of_a_refitted_classifier_are_those_of_their_holders(tiny_source):
    """A client reports `point_counts` beside them, and no others where nothing is matched."""
    federation = Federation(configure(**TINY, refit="means", M=0, uplink="off"), tiny_source)
    assert {
        "report/points",
        "report/point_counts",
    } <= federation.upload.keys() and "report/counts" not in federation.upload
    points, held = torch.full((5, 2, 3), 10.0), torch.tensor([[4, 2], [4, 2], [4, 2], [4, 0], [4, 0]])
    points[held == 0] = 0.0
    _, one = robust.trimmed(torch.zeros(5, 0), {"points": points, "point_counts": held}, 1)
    torch.testing.assert_close(one["points"], torch.full((1, 2, 3), 10.0))


def uploads(source, **keys):
    """What client k sends in round 1 for each k, who is hostile, and what was received."""
    federation = Federation(configure(**(SIX | {"local_steps": 2} | keys)), source)
    sent = federation.sent()
    return [federation.trainer.update(1, k, sent, {})[0] for k in range(6)], federation.hostile, sent


@pytest.mark.parametrize("attack", ["label-flip", *ON_MODELS, "poison"])
def test_only_hostile_clients_spoil_what_they_send(tiny_source, attack):
    keys = {"method": "fedgmkd", "attack_share": 0.4, "attack_scale": 3.0}
    honest, _, sent = uploads(tiny_source, **keys)
    spoilt, hostile, _ = uploads(tiny_source, attack=attack, **keys)
    assert len(hostile) == 3
    for k, (before, after) in enumerate(zip(honest, spoilt, strict=True)):
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        kinds = {name.split("/")[0] for name in changed}
        if k not in hostile:
            assert not changed
        elif attack == "label-flip":
            assert {"model", "report", "loss"} <= kinds
        elif attack == "poison":
            assert changed == {"report/means", "report/soft"}
            for name in changed:
                torch.testing.assert_close(after[name][1], 3 * before[name][0])
        else:
            assert kinds == {"model"}
            name = "model/classifier.weight"
            step, sent_step = before[name] - sent[name], after[name] - sent[name]
            if attack == "gaussian":
                size = float(sent_step.square().mean().sqrt() / step.square().mean().sqrt())
                assert (
                    2.5 < size < 3.5 and abs(float(torch.cosine_similarity(step.ravel(), sent_step.ravel(), 0))) < 0.2
                )
            else:
                torch.testing.assert_close(sent_step, (3 if attack == "scale" else -3) * step, atol=1e-5, rtol=1e-3)
            assert all(bool((value >= 0).all()) for name, value in after.items() if name.endswith("running_var"))


def test_flipped_labels_are_those_of_the_hostile_alone(tiny_source):
    honest, flipped = (Federation(configure(**SIX, attack=kind), tiny_source) for kind in ("off", "label-flip"))
    assert flipped.hostile
    for k, (a, b) in enumerate(zip(honest.clients, flipped.clients, strict=True)):
        assert torch.equal(b.train.y, 3 - a.train.y if k in flipped.hostile else a.train.y)
        assert torch.equal(a.train.x, b.train.x) and torch.equal(a.held_out.y, b.held_out.y)


def test_who_is_hostile_comes_from_the_seed_and_small_shares_are_part_of_larger():
    drawn = [hostile_clients(configure(attack="scale", attack_share=share), 20) for share in (0, 0.1, 0.4)]
    assert [len(clients) for clients in drawn] == [0, 2, 8] and drawn[1] < drawn[2]
    few = [hostile_clients(configure(attack="scale", attack_share=share), 4) for share in (0, 0.1, 0.25, 0.3)]
    assert [len(clients) for clients in few] == [0, 1, 1, 2]  # rounded up, as those that a defence reckons with
    assert drawn[2] != hostile_clients(configure(attack="scale", attack_share=0.4, seed=1), 20)
    assert not hostile_clients(configure(attack_share=0.4), 20)


# whole rounds


SWITCHES = [
    {"hpcl": "global", "hpal": "global"},
    {"uplink": "probabilities"},
    {"retrain_classifier": True},
    {"method": "fedproto", "exchange": "prototypes", "attack": "poison"},
    {"method": "fedtgp", "exchange": "classifier"},
    {"method": "fedgmkd", "scenario": "shards", "clients": 6, "shards_per_client": 1},  # clients of one class each
]


@pytest.mark.parametrize("keys", [{"method": method} for method in TOGETHER] + SWITCHES, ids=str)
def test_every_method_with_every_rule(tiny_source, keys):
    """Also one report that stands for all, which is what median and trimmed mean make."""
    config = configure(
        **(SIX | {"rounds": 1, "evaluate_every": 9, "local_steps": 1, "attack": "scale", "robust": "clip"} | keys)
    )
    with Federation(config, tiny_source) as federation:
        chosen, start = federation.sample(1), (federation.model, federation.state)
        federation.engine = Replay(list(federation.engine.train(1, chosen, federation.sent(), {})), federation.engine)
        for rule in RULES:
            federation.round, (federation.model, federation.state) = 0, start
            federation.config = config.replace(robust=rule)
            record = federation.next_round()
            assert record["aggregated"] and not record["refused"] and record["hostile"] == sorted(federation.hostile)
            assert len(record.get("left_out", [])) == {"krum": 5, "multikrum": 1}.get(rule, 0)
            assert ("clipped" in record) == (rule == "clip")
            assert {name: (v.shape, v.dtype) for name, v in federation.model.items()} == {
                name: (v.shape, v.dtype) for name, v in start[0].items()
            }
            assert all(bool(v.isfinite().all()) for v in [*federation.model.values(), *federation.state.values()])


class Replay:
    """An engine whose clients have trained already."""

    def __init__(self, answers, engine):
        self.answers, self.evaluate, self.close, self.restarted = answers, engine.evaluate, engine.close, []

    def train(self, round, clients, sent, memories):
        yield from self.answers


@pytest.mark.parametrize(
    "rule, came, words",
    [
        (
            "krum",
            2,
            "2 of 6 .* of whom robust_share=0.1 says 1 may be hostile, and it needs 5",
        ),  # of two, either may be the nearest
        ("median", 2, "2 of 6 clients sent a valid upload, and it needs 3"),  # half of it would be the hostile one's
        ("multikrum", 4, "4 of 6 .* of whom robust_share=0.1 says 1 may be hostile, and it needs 5"),
        ("multikrum", 5, None),
        ("off", 2, None),
    ],
)
def test_a_round_with_too_few_uploads_changes_nothing_and_says_why(tiny_source, rule, came, words):
    config = configure(
        **(SIX | {"method": "fedavg", "local_steps": 1, "evaluate_every": 9, "patience": 1}), robust=rule
    )
    with Federation(config, tiny_source) as federation:
        answers = list(federation.engine.train(1, federation.sample(1), federation.sent(), {}))
        lost = [dataclasses.replace(answer, error="it did not answer") for answer in answers[came:]]
        federation.engine, before = Replay(answers[:came] + lost, federation.engine), federation.model
        rounds = federation.rounds()
        record = next(rounds)
        assert record["aggregated"] == (words is None) == (federation.model is not before)
        if words is None:
            assert "not_aggregated" not in record
        else:
            assert re.search(f"^robust={rule}: {words}$", record["not_aggregated"])
            with pytest.raises(FederationStalled, match=re.escape(record["not_aggregated"])):
                next(rounds)


@pytest.mark.parametrize("rule", ["median", "multikrum"])
def test_same_bits_for_workers_and_after_resume(tiny_source, tmp_path, rule):
    keys = SIX | {"robust": rule, "attack": "gaussian", "local_steps": 2, "rounds": 3}
    whole = runs.run(**keys, out=str(tmp_path / "whole"), source=tiny_source)
    pooled = runs.run(**(keys | {"workers": 2}), out=str(tmp_path / "pooled"), source=tiny_source)
    runs.run(**(keys | {"rounds": 1}), out=str(tmp_path / "part"), source=tiny_source)
    resumed = runs.resume(tmp_path / "part", source=tiny_source, rounds=3)
    assert json.dumps(whole.history) == json.dumps(pooled.history) == json.dumps(resumed.history)
    names = [folder / "model.safetensors" for folder in (whole.folder, pooled.folder, resumed.folder)]
    assert len({name.read_bytes() for name in names}) == 1
    page = (whole.folder / "report.html").read_text(encoding="utf-8")
    assert "Hostile clients" in page


def test_the_mean_breaks_and_a_defence_holds(tiny_source):
    keys = SIX | {"method": "fedavg", "local_epochs": 4, "rounds": 2, "evaluate_every": 2}

    def accuracy(**more):
        with Federation(configure(**(keys | more)), tiny_source) as federation:
            *_, last = federation.rounds()
            return last["accuracy"]["AVG"]

    assert accuracy(attack="sign-flip") < 40 < 80 < accuracy()
    assert accuracy(attack="sign-flip", robust="trimmed") > 80


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"robust": "krum", "robust_share": 0.4}, "6 clients take part in a round, of whom .* 3 may be .* needs 9"),
        ({"robust": "median", "participation": 0.3}, "2 clients take part in a round, and it needs 3"),
        ({"robust": "median", "method": "local"}, "nothing is aggregated"),
        ({"robust": "median", "memory_budget": 1e-3}, "6 uploads of a round in main memory"),
        ({"robust_share": 0.5}, "less than 0.5"),
        ({"attack": "poison", "method": "fedavg"}, "fedavg reports nothing"),
        ({"attack": "scale", "method": "fedproto", "exchange": "prototypes"}, "try poison"),
        ({"attack": "scale", "method": "centralised"}, "no client depends on another"),
        ({"attack": "scale", "data": "sites", "engine": "flower", "evaluation": "federated"}, "clients are real"),
    ],
)
def test_what_is_refused_and_why(tiny_source, keys, words):
    with pytest.raises(ConfigError, match=words):
        Federation(configure(**(SIX | keys)), tiny_source)
