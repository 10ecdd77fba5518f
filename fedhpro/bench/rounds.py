"""Seconds per round on this machine: workers, and FedHPro's own cost beside FedAvg's. Ratios are within one run.

make bench        prints a table and writes benchmarks/results/rounds.json
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import time
from pathlib import Path

import torch

from fedhpro.config import available_cores, configure
from fedhpro.data import load
from fedhpro.federation import Federation

ROUNDS = 4  # the first warms up and is left out


def seconds_per_round(**keys: object) -> float:
    with Federation(configure(rounds=ROUNDS, **keys), load("digits-lite")) as federation:
        times = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            federation.next_round()
            times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    cases = {
        "fedavg, in this process": {"method": "fedavg", "workers": 0},
        "fedavg, 1 worker": {"method": "fedavg", "workers": 1},
        "fedavg, 2 workers": {"method": "fedavg", "workers": 2},
        "fedhpro, 2 workers": {"method": "fedhpro", "workers": 2},
        "fedhpro M=0, 2 workers": {"method": "fedhpro", "M": 0, "workers": 2},
        "fedhpro without margin, 2 workers": {"method": "fedhpro", "margin": "off", "workers": 2},
    }
    found = {name: seconds_per_round(**keys) for name, keys in cases.items()}
    base = found["fedavg, 2 workers"]
    print(f"digits-lite, main job's settings, median of {ROUNDS - 1} rounds; 1.00 is FedAvg with 2 workers")
    for name, seconds in found.items():
        print(f"  {name:36} {seconds:6.2f} s a round   {seconds / base:5.2f}")
    machine = {
        "cores": available_cores(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    out = Path(__file__).parent / "results" / "rounds.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"machine": machine, "seconds": found, "peak_mb_parent": peak}, indent=2) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
