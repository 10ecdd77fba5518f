"""How mixed labels are (docs/plus-elsewhere.md): the least of a federation's clients, with seeds 0 to 2.

    python benchmarks/mixtures.py

Data that is not there (docs/data.md) is left out.
"""

from __future__ import annotations

from typing import Any

import torch

from fedhpro.config import configure
from fedhpro.errors import DataError
from fedhpro.federation import Federation
from fedhpro.methods.mixture import mixture

LABELS = {"data": "digits-lite", "split": "validation", "scenario": "nid1"}
FEDERATIONS: dict[str, dict[str, Any]] = {
    "digits-lite, alpha 0.2": LABELS | {"alpha": 0.2},
    "digits-lite, alpha 0.5": LABELS | {"alpha": 0.5},
    "digits-lite": {"data": "digits-lite"},
    "docs-lite": {"data": "docs-lite"},
    "Office-Caltech": {"preset": "paper", "data": "office-caltech"},
    "Digits": {"preset": "paper", "data": "digits"},
    "CIFAR-10-LT, rho 100": {"preset": "paper", "data": "cifar10", "scenario": "nid1", "alpha": 0.5, "rho": 100},
}


def least(keys: dict[str, Any], seed: int) -> float:
    with Federation(configure(**keys, seed=seed, method="fedavg", workers=0)) as federation:
        classes = len(federation.source.classes)
        labels = [client.train.to(torch.device("cpu")).y for client in federation.clients]
    return min(float(mixture(torch.bincount(y, minlength=classes))) for y in labels)


if __name__ == "__main__":
    for name, keys in FEDERATIONS.items():
        try:
            print(f"{name}: " + ", ".join(f"{least(keys, seed):.2f}" for seed in (0, 1, 2)), flush=True)
        except DataError as error:
            print(f"{name}: {error}")
