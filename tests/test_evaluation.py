"""Evaluation: accuracies by hand-counted confusion matrices, and the three names of a run's result."""

import pytest
import torch

from fedhpro.evaluation import (
    accuracy,
    balanced_accuracy,
    class_accuracies,
    client_summary,
    domain_accuracies,
    headline,
)


def confusion(right, wrong):
    return torch.tensor([[right, wrong], [0, 0]])


def records(*values):
    """A history with one record per round; None where a round was not evaluated."""
    return [
        {"round": number} | ({} if value is None else {"accuracy": {"AVG": value, "mnist": -value}})
        for number, value in enumerate(values, start=1)
    ]


def test_accuracy():
    assert accuracy(torch.tensor([[3, 1], [2, 4]])) == 70.0
    assert accuracy(torch.eye(3, dtype=torch.int64)) == 100.0
    assert accuracy(torch.zeros(2, 2, dtype=torch.int64)) == 0.0


def test_class_accuracies_are_by_true_class():
    assert class_accuracies(torch.tensor([[3, 1, 0], [0, 0, 0], [1, 1, 0]])) == [75.0, None, 0.0]


def test_domain_accuracies_are_means_over_models_and_avg_over_domains():
    found = [("mnist", confusion(1, 1)), ("uci", confusion(100, 0)), ("mnist", confusion(90, 10))]
    assert domain_accuracies(found) == {"mnist": 70.0, "uci": 100.0, "AVG": 85.0}


def test_client_summary():
    summary = client_summary({4: 50.0, 0: 100.0}, {0: 30, 4: 10})
    assert summary == {
        "clients": {"4": 50.0, "0": 100.0},
        "samples": {"4": 10, "0": 30},
        "mean": 75.0,
        "weighted": 87.5,
        "worst": 50.0,
    }


@pytest.mark.parametrize(
    "values,expected",
    [
        ([10, 20, 30, 40, 50, 60, 55], {"final": 55, "best": 60, "best_round": 6, "last5": 47.0}),
        ([40, 60, 60, 50], {"final": 50, "best": 60, "best_round": 2, "last5": 52.5}),  # earliest of ties, fewer than 5
        ([None, 10, None, 30, None], {"final": 30, "best": 30, "best_round": 4, "last5": 20.0}),
        ([1, None, 2, None, 3, 4, 5, 6], {"final": 6, "best": 6, "best_round": 8, "last5": 4.0}),  # five evaluations
        ([0.0], {"final": 0.0, "best": 0.0, "best_round": 1, "last5": 0.0}),
        ([None, None], {}),
        ([], {}),
    ],
)
def test_headline(values, expected):
    assert headline(records(*values)) == expected


def test_headline_of_a_domain():
    assert headline(records(3, 1, 2), "mnist") == {"final": -2, "best": -1, "best_round": 2, "last5": -2.0}


def test_balanced_accuracy_weighs_classes_alike():
    confusion = torch.tensor([[90, 0, 0], [10, 0, 0], [0, 0, 0]])  # a majority class, and one without test samples
    assert accuracy(confusion) == 90
    assert balanced_accuracy(confusion) == 50
    assert domain_accuracies([("a", confusion)], balanced_accuracy) == {"a": 50, "AVG": 50}
