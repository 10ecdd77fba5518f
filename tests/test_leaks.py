"""The attacks of `fedhpro bench leaks`: they find what is there, and nothing where there is nothing."""

import io
import json

import pytest
import torch
from rich.console import Console

from fedhpro.bench import leaks
from fedhpro.bench.leaks import Asked, auc, clipped_with_noise


def test_auc_is_how_often_a_member_scores_above_a_stranger():
    own, other = torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0])
    assert auc(own, other) == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    infinite = torch.tensor([-torch.inf, -torch.inf])
    assert auc(infinite, infinite) == 0.5


def test_noise_is_measured_by_the_clip_and_the_number_of_groups():
    rng = torch.Generator().manual_seed(0)
    values = [torch.full((100_000,), scale) for scale in (0.5, 1.0, 4.0)]
    clip = float(values[1].norm())
    clipped = clipped_with_noise(values, 0.0, rng)
    assert [float(value.norm()) for value in clipped] == pytest.approx([clip / 2, clip, clip], rel=1e-4)
    noisy = clipped_with_noise(values, 0.1, rng)
    assert float((noisy[0] - values[0]).std()) == pytest.approx(0.1 * 2**0.5 * clip, rel=0.02)


def test_the_mean_of_one_sample_is_that_sample():
    """Why a class with a single sample gives it away: its own point is what was sent."""
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    asked = Asked(z, torch.zeros(6, 2), torch.zeros(6), torch.zeros(2, 4))
    prototypes = leaks.VIEWS[3]
    scores = prototypes.scores(z[:1].repeat(2, 1), torch.zeros(6, dtype=torch.int64), asked, asked)
    for score in scores.values():
        assert auc(score[:1], score[1:]) == 1


@pytest.fixture
def found(tiny_source):
    """Three clients and three of the attacker, on two rounds of squares."""
    patch = pytest.MonkeyPatch()
    patch.setattr(leaks, "load", lambda _: tiny_source)
    for name, value in {"CLIENTS": 3, "THEIRS": range(3), "OURS": range(3, 6), "EVERYBODY": range(6)}.items():
        patch.setattr(leaks, name, value)
    patch.setattr(leaks, "NOISE", {"none": None, "z = 1": 1.0})
    yield leaks.averaged({0: leaks.one_seed(0, rounds=2)}, rounds=2)
    patch.undo()


def test_classes_show_in_rows_that_are_zero_without_them_and_not_in_noise():
    attack, rng, noise = object.__new__(leaks.Attack), torch.Generator().manual_seed(0), []
    for _ in range(6):
        attack.counts = torch.randint(0, 3, (2 * leaks.CLIENTS, 10), generator=rng)
        rows = torch.randn(2 * leaks.CLIENTS, 10, 8, generator=rng)
        assert attack.classes(rows * (attack.counts > 0)[:, :, None])["which_classes_auc"] == 1
        noise.append(attack.classes(rows)["which_classes_auc"])  # of 200 pairs each
    assert sum(noise) / len(noise) == pytest.approx(0.5, abs=0.08)


def test_every_view_is_attacked_with_and_without_noise(found):
    rows = {(row["view"], row["noise"]): row for row in found["rows"]}
    assert len(rows) == 8
    for view in ("class gradients", "probabilities", "prototypes", "model"):
        assert rows[view, "none"] != rows[view, "z = 1"]
    for row in rows.values():
        assert 0 <= row["membership_auc"] <= 1 and 0 <= row["membership_in_sum_auc"] <= 1


def test_tables_are_for_people_and_for_json(found):
    console = Console(file=io.StringIO(), width=100)
    for row in found["rows"]:
        for bucket in leaks.BUCKETS:
            row["membership_by_count"].setdefault(bucket, 0.5)  # so few samples fill no bucket
    leaks.show(found, console)
    assert "class gradients  none" in console.file.getvalue()
    assert leaks.markdown(found).count("\n| ") == 2 + 8
    json.dumps(found)
