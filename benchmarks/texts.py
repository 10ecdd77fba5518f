"""Two numbers of docs/text.md: what weight decay does to words that a client lacks, and what cutting padding saves.

    python benchmarks/texts.py

The second needs AG News (docs/data.md) and is left out without it.
"""

from __future__ import annotations

import time

import torch

from fedhpro.config import configure
from fedhpro.data import batches
from fedhpro.errors import DataError
from fedhpro.federation import Federation


def absent_words(weight_decay: float, client: int = 0) -> str:
    """The mean magnitude of their embeddings before and after a client's first round on docs-lite."""
    with Federation(configure(data="docs-lite", method="fedavg", workers=0, weight_decay=weight_decay)) as federation:
        assert federation.engine is not None
        before = federation.model["embedding.weight"].clone()
        absent = torch.ones(len(before), dtype=torch.bool)
        absent[federation.clients[client].train.x.unique()] = False
        absent[0] = False  # padding
        (answer,) = federation.engine.train(1, [client], federation.sent(), {})
        after = answer.upload["model/embedding.weight"]
        sizes = [float(table[absent].abs().mean()) for table in (before, after)]
    return f"{int(absent.sum())} of {len(absent)} words: {sizes[0]:.2f} to {sizes[1]:.2f}"


def seconds_of_a_round() -> dict[str, float]:
    """On AG News, the faster of two, with padding cut behind the longest text of a batch and with all of it."""
    keys = {"data": "ag-news", "clients": 50, "participation": 0.04, "local_epochs": 2, "evaluate_every": 100}
    cut, found = batches.trimmed, dict[str, float]()
    with Federation(configure(**keys, rounds=100, method="fedavg", workers=0)) as federation:
        federation.next_round()
        for name, way in (("cut", cut), ("whole", lambda x: x), ("cut", cut), ("whole", lambda x: x)):
            batches.trimmed = way
            federation.round, started = 0, time.perf_counter()
            federation.next_round()
            found[name] = min(found.get(name, float("inf")), time.perf_counter() - started)
    batches.trimmed = cut
    return found


if __name__ == "__main__":
    for decay in (1e-5, 0.0):
        print(f"weight_decay={decay:g}: {absent_words(decay)}")
    try:
        print({name: round(seconds, 2) for name, seconds in seconds_of_a_round().items()})
    except DataError as error:
        print(error)
