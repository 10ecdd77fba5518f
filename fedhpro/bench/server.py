"""Seconds of the server's own work with FedHPro on one core: Eq 6 to 9, and the re-training of preset `released`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console

from .. import equations as eq
from ..engines.cpu import one_thread
from ..methods import fedhpro_released as released

I, D, M = 5, 512, 30


@one_thread()
@torch.no_grad()
def server(quick: bool = False) -> dict[str, Any]:
    """Best and median seconds of each case."""
    times = 3 if quick else 9
    rng = torch.Generator().manual_seed(0)
    cases: dict[str, Callable[[], object]] = {}
    for C in (10, 100) if quick else (10, 100, 397):
        S, W, b = torch.randn(C, I, D, generator=rng), torch.randn(C, D, generator=rng) * D**-0.5, torch.zeros(C)
        z, y = torch.relu(torch.randn(4 * C, D, generator=rng)), torch.arange(4 * C) % C
        target, counts = eq.class_gradients(z, y, W, b)
        cases[f"match, C={C}"] = partial(eq.match, S, target, counts > 0, W, b, M)
    for K in (10, 100):
        gradients, held = torch.randn(K, 100, D, generator=rng), torch.ones(K, 100, dtype=torch.int64)
        cases[f"mean of {K} clients' gradients, C=100"] = partial(eq.mean_gradients, gradients, held)
    cases["re-training of preset released, C=10, d=256"] = _retraining(rng)
    found = dict[str, dict[str, float]]()
    for name, case in cases.items():
        case()
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            case()
            seconds.append(time.perf_counter() - started)
        found[name] = {"best": round(min(seconds), 5), "median": round(statistics.median(seconds), 5)}
    about = f"I={I}, d={D} unless named, M={M}, float32, one torch thread, {times} times"
    return {"about": about, "seconds": found}


def _retraining(rng: torch.Generator, C: int = 10, d: int = 256, clients: int = 10) -> Callable[[], object]:
    h = torch.nn.Linear(d, C)
    with torch.no_grad():
        h.weight.copy_(torch.randn(C, d, generator=rng) * d**-0.5)
        h.bias.zero_()
    state = {
        "synthetic": torch.randn(C, 50, d, generator=rng),
        "sent_weight": h.weight.detach(),
        "sent_bias": h.bias.detach(),
    }
    gradients = [
        released.weight_gradients(torch.relu(torch.randn(20 * C, d, generator=rng)), torch.arange(20 * C) % C, h)
        for _ in range(clients)
    ]
    reports = {"weight_gradients": torch.stack(gradients), "counts": torch.full((clients, C), 20)}
    return lambda: released.retrain(state, reports, torch.Generator().manual_seed(0))


def show(found: dict[str, Any], console: Console) -> None:
    console.print(found["about"], highlight=False)
    for name, seconds in found["seconds"].items():
        best, median = seconds["best"], seconds["median"]
        console.print(f"  {name:48} best {best:.4f} s   median {median:.4f} s", highlight=False)
