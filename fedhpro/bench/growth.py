"""How a round grows, in time and memory: with the clients, the classes, the features and the samples of a client.

Every case is a run of its own in a fresh process, so that its peak memory is its own: that of the whole process tree,
in which a page shared by n processes counts 1/n for each (PSS, five times a second; on Linux only). All samples are one
and the same image: what is measured is the federation, not its data. Seconds are those of the fastest round, without
the first and without evaluation; CPU seconds are those of all its processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console

from .. import runs
from ..callbacks import Callback
from ..config import configure
from ..data.sources import Domain, Source, Split
from .machine import memory, tree

Case = dict[str, Any]
START: Case = {"clients": 10, "classes": 10, "features": 128, "samples": 32}
FULL: dict[str, tuple[int, ...]] = {
    "clients": (10, 100, 1_000, 10_000),
    "classes": (10, 50, 100, 200, 397),
    "features": (64, 128, 256, 512, 1_024, 2_048),
    "samples": (16, 64, 256, 1_024),
}
QUICK = {"clients": (100, 10_000), "classes": (10, 100), "features": (64, 512), "samples": (16, 64)}
TAKE_PART = 100  # clients in a round, where there are more
ROUNDS = 4
MIDDLE = slice(1, -1)  # the first round warms up, the last is evaluated


def growth(quick: bool = False) -> dict[str, Any]:
    return {"rows": [measure(case) for case in cases(quick)]}


def cases(quick: bool) -> Iterator[Case]:
    for axis, values in (QUICK if quick else FULL).items():
        for value in values:
            for method in ("fedhpro",) if quick else ("fedavg", "fedhpro"):
                case = START | {"axis": axis, "method": method, "rounds": ROUNDS} | {axis: value}
                yield case | ({"samples": 16} if axis == "clients" else {})
    # each round, other clients come to remember a model; it is the memory's growth with them that is looked at
    for rounds in () if quick else (3, 9):
        yield START | {"axis": "memories", "method": "moon", "rounds": rounds, "clients": 100 * rounds, "samples": 2}


def measure(case: Case) -> Case:
    """Run one case in a process of its own and watch the memory of all its processes."""
    command = [sys.executable, "-m", "fedhpro.bench.growth", json.dumps(case)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        peak = 0
        while child.poll() is None:
            peak = max(peak, memory(child.pid))
            time.sleep(0.2)  # more often, and looking would slow down what is looked at
        assert child.stdout is not None
        output = child.stdout.read()
    if child.returncode:
        raise RuntimeError(f"{case} ended with exit code {child.returncode}")
    return case | json.loads(output) | {"peak_mb": round(peak / 10**6) or None}


def run_case(case: Case) -> Case:
    """In the process of the case."""
    clients, classes, samples = case["clients"], case["classes"], case["samples"]
    part = min(1.0, TAKE_PART / clients)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = configure(
            method=case["method"], rounds=case["rounds"], participation=part, local_epochs=1, dim=case["features"],
            evaluate_every=case["rounds"], out=f"{folder}/run",
        )  # fmt: skip
        clock = Clock()
        result = runs.run(config, callbacks=[clock], source=one_image(clients, samples, classes))
        lines = (result.folder / "timings.jsonl").read_text(encoding="utf-8").splitlines()
        memories = sum(path.stat().st_size for path in result.folder.glob("memories/*"))
    seconds = min([json.loads(line)["seconds"] for line in lines][MIDDLE])
    cpu = min([after - before for before, after in itertools.pairwise(clock.cpu)][MIDDLE])
    per_round = len(result.history[0]["clients"])
    return {
        "per_round": per_round,
        "setup_seconds": round(clock.began - started, 2),
        "round_seconds": round(seconds, 3),
        "client_seconds": round(seconds / per_round, 4),
        "round_cpu_seconds": round(cpu, 2) or None,
        **({"memories_mb": round(memories / 10**6)} if memories else {}),
    }


class Clock(Callback):
    """When everything was ready for the first round, and the CPU seconds until then and until the end of each round."""

    def start(self, federation: Any, result: Any) -> None:
        self.began = time.perf_counter()
        self.cpu = [cpu_seconds(os.getpid())]

    def round(self, record: dict[str, Any]) -> None:
        self.cpu.append(cpu_seconds(os.getpid()))


def one_image(clients: int, samples: int, classes: int) -> Source:
    """As many samples as are needed, all of them one image in memory, with random labels."""
    rng = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (1, 3, 32, 32), generator=rng).to(torch.uint8)

    def split(count: int) -> Split:
        return Split(image.expand(count, -1, -1, -1), torch.randint(0, classes, (count,), generator=rng))

    domain = Domain("all", split(clients * samples), split(0), split(100), real=False, about="one image")
    return Source("one-image", (domain,), tuple(map(str, range(classes))), {"all": (clients, samples)})


def cpu_seconds(pid: int) -> float:
    """What the cores spent on a process tree until now: other people's work on the machine does not show in it."""
    ticks = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # user and system
    return ticks / os.sysconf("SC_CLK_TCK")


def show(found: dict[str, Any], console: Console) -> None:
    for row in found["rows"]:
        console.print("  ".join(f"{name} {value}" for name, value in row.items()), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    print(json.dumps(run_case(json.loads(sys.argv[1]))))
