"""From confusion matrices to accuracies: per domain, class and client; and the three ways to name a run's result."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

AVG = "AVG"
HELD_OUT_SAMPLES = "held-out samples"  # of all clients together


def accuracy(confusion: Tensor) -> float:
    """Per cent of the samples on the diagonal."""
    return 100.0 * int(confusion.trace()) / max(1, int(confusion.sum()))


def class_accuracies(confusion: Tensor) -> list[float | None]:
    """Per cent per true class; None for a class without test samples."""
    totals = confusion.sum(1)
    hits = confusion.diagonal()
    return [100.0 * int(h) / int(n) if n else None for h, n in zip(hits, totals, strict=True)]


def balanced_accuracy(confusion: Tensor) -> float:
    """The mean of the classes' accuracies: what a test set with equally many samples of each would give."""
    return mean([score for score in class_accuracies(confusion) if score is not None])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def domain_accuracies(
    found: Sequence[tuple[str, Tensor]], measure: Callable[[Tensor], float] = accuracy
) -> dict[str, float]:
    """Accuracy per domain, the mean over the models tested on it, and AVG, the unweighted mean of the domains."""
    return domain_means([(name, measure(confusion)) for name, confusion in found])


def domain_means(found: Sequence[tuple[str, float]]) -> dict[str, float]:
    domains: dict[str, list[float]] = {}
    for name, value in found:
        domains.setdefault(name, []).append(value)
    means = {name: mean(values) for name, values in domains.items()}
    return means | {AVG: mean(list(means.values()))}


def added_up(found: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """One confusion matrix for each name, of all the models tested under it."""
    sums: dict[str, Tensor] = {}
    for name, confusion in found:
        sums[name] = sums[name] + confusion if name in sums else confusion
    return sums


def client_summary(accuracies: dict[int, float], samples: dict[int, int]) -> dict[str, Any]:
    """Federated evaluation: each client's accuracy on what it holds out."""
    total = sum(samples.values())
    return {
        "clients": {str(k): value for k, value in accuracies.items()},
        "samples": {str(k): samples[k] for k in accuracies},
        "mean": mean(list(accuracies.values())),
        "weighted": sum(value * samples[k] for k, value in accuracies.items()) / max(1, total),
        "worst": min(accuracies.values()),
    }


def headline(history: Sequence[dict[str, Any]], key: str = AVG, group: str = "accuracy") -> dict[str, Any]:
    """final, best (and its round) and last5 (mean of the last five evaluations) of an accuracy."""
    points = [(record["round"], record[group][key]) for record in _complete(history, group) if key in record[group]]
    if not points:
        return {}
    best_round, best = max(points, key=lambda point: (point[1], -point[0]))
    last = [value for _, value in points[-5:]]
    return {"final": points[-1][1], "best": best, "best_round": best_round, "last5": mean(last)}


def differs(of_classes: float | None, accuracy: float) -> bool:
    """Whether the mean of the classes is another number, as where a test set has more of some classes."""
    return of_classes is not None and abs(of_classes - accuracy) > 0.005


def rounds_to_accuracy(history: Sequence[dict[str, Any]], wanted: float) -> int | None:
    """The first round whose average accuracy is at least the wanted one; None where no evaluated round has it."""
    return next((r["round"] for r in _complete(history) if r["accuracy"][AVG] >= wanted), None)


def _complete(history: Sequence[dict[str, Any]], group: str = "accuracy") -> list[dict[str, Any]]:
    """Evaluated rounds with all domains of the last one. Where models stay at the clients only those are tested that
    have taken part, and a mean over fewer domains is another number.
    """
    evaluated = [record for record in history if record.get(group)]
    return [record for record in evaluated if record[group].keys() >= evaluated[-1][group].keys()]


def speed_up(rounds: float, of_fedavg: float) -> float:
    """Of the FedHPro paper: how many per cent fewer rounds than FedAvg needs; below 0 where it needs more."""
    return 100.0 * (of_fedavg - rounds) / of_fedavg


def fairness(accuracies: Sequence[float]) -> dict[str, float]:
    """Over clients: mean, standard deviation (of the population), and the means of the worst and of the best 10 %."""
    ordered, tenth = sorted(accuracies), max(1, round(len(accuracies) / 10))
    spread = {"mean": mean(ordered), "std": statistics.pstdev(ordered)}
    return spread | {"worst10": mean(ordered[:tenth]), "best10": mean(ordered[-tenth:])}
