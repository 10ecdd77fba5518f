"""Where the time of one client's captured steps goes on a GPU: its kernels, alone, without MPS.

    python benchmarks/kernels.py results/gpu-kernels.json

Microseconds and number for each kernel and grid, over STEPS steps of FedAvg (ResNet-10, 64 filters, batch 64, bf16).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fedhpro.bench.gpu import source
from fedhpro.config import configure
from fedhpro.federation import Federation

STEPS = 40


def kernels() -> list[dict[str, object]]:
    keys = {"preset": "paper", "engine": "cuda", "precision": "bf16", "scenario": "domains", "method": "fedavg"}
    keys |= {"local_epochs": 2, "rounds": 10**6, "evaluate_every": 10**6, "workers": 1}
    with Federation(configure(**keys), source([640, 640])) as federation:  # two clients, ten steps an epoch
        for _ in range(2):
            federation.next_round()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            federation.next_round()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    number, microseconds = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for event in events:
        kind = (event["name"][:160], str(event["args"].get("grid")), str(event["args"].get("block")))
        number[kind] += 1
        microseconds[kind] += event["dur"]
    return [
        {"name": kind[0], "grid": kind[1], "block": kind[2], "n": number[kind], "us": round(us, 1)}
        for kind, us in microseconds.most_common()
    ]


if __name__ == "__main__":
    found = kernels()
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    print(f"{sum(float(row['us']) for row in found) / STEPS:.0f} us a step")  # type: ignore[arg-type]
