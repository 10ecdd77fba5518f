"""Seconds a round of the main job: workers, and FedHPro's own cost beside FedAvg's. Ratios are within one run."""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.console import Console

from ..config import available_cores, configure
from ..data import load
from ..federation import Federation


def rounds(quick: bool = False) -> dict[str, Any]:
    count, cores = 2 if quick else 4, available_cores()  # the first warms up and is left out
    cases: dict[str, dict[str, Any]] = {
        "fedavg, in this process": {"method": "fedavg", "workers": 0},
        "fedavg, 1 worker": {"method": "fedavg", "workers": 1},
        "fedavg": {"method": "fedavg"},
        "fedhpro": {"method": "fedhpro"},
        "fedhpro M=0": {"method": "fedhpro", "M": 0},
        "fedhpro without margin": {"method": "fedhpro", "margin": "off"},
        "fedavg, 64 filters": {"method": "fedavg", "width": 64},
        "fedavg, 64 filters, bf16": {"method": "fedavg", "width": 64, "precision": "bf16"},
    }
    seconds = {name: seconds_per_round(count, **({"workers": cores} | keys)) for name, keys in cases.items()}
    return {"rounds": count - 1, "seconds": {name: round(value, 4) for name, value in seconds.items()}}


def seconds_per_round(count: int, **keys: Any) -> float:
    with Federation(configure(rounds=count, **keys), load("digits-lite")) as federation:
        times = []
        for _ in range(count):
            started = time.perf_counter()
            federation.next_round()
            times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def show(found: dict[str, Any], console: Console) -> None:
    base, cores = found["seconds"]["fedavg"], found["machine"]["cores"]
    console.print(f"digits-lite, the main job's settings, {cores} workers; 1.00 is FedAvg", highlight=False)
    for name, seconds in found["seconds"].items():
        console.print(f"  {name:30} {seconds:6.2f} s a round   {seconds / base:5.2f}", highlight=False)
