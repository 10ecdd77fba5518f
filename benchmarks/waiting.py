"""Seconds and CPU seconds of a Digits round on a GPU, with threads that sleep while they wait, and that spin.

    python benchmarks/waiting.py >> results/gpu-waiting.jsonl

"old" is how the engine was: events that spin, launches without a pace and, for MOON, memories written before the next
answer is taken. Samples are random, as in `fedhpro bench gpu`.
"""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import torch

from fedhpro.bench.gpu import DIGITS, source
from fedhpro.config import configure
from fedhpro.engines import cuda
from fedhpro.federation import Federation

KEYS: dict[str, Any] = {"preset": "paper", "engine": "cuda", "precision": "bf16", "scenario": "domains"}
KEYS |= {"method": "fedavg", "rounds": 10**6, "evaluate_every": 10**6}
EVENT, PACE, WRITERS, CAPTURED = torch.cuda.Event, cuda.PACE, cuda.Graphs.writers, cuda.Seat.captured


def rounds(what: str, **keys: Any) -> None:
    """The first, which captures, and the fastest of three more."""
    seconds, cpu = list[float](), list[float]()
    with Federation(configure(**(KEYS | keys)), source(DIGITS)) as federation:
        for _ in range(4):
            torch.cuda.synchronize()
            started, used = time.perf_counter(), time.process_time()
            record = federation.next_round()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
            assert not record["refused"], record["refused"]
    gc.collect()
    torch.cuda.empty_cache()
    found = {"first": round(seconds[0], 2), "round_s": round(min(seconds[1:]), 4), "cpu_s": round(min(cpu[1:]), 3)}
    print(json.dumps({"what": what} | found), flush=True)


def spinning(on: bool) -> None:
    torch.cuda.Event = (lambda blocking=False: EVENT()) if on else EVENT  # type: ignore[assignment, misc]
    cuda.PACE, cuda.Graphs.writers = (10**9, 0) if on else (PACE, WRITERS)


if __name__ == "__main__":
    for method, name in (("fedavg", ""), ("moon", "moon-")):
        spinning(True)
        rounds(f"{name}old", method=method)
        spinning(False)
        rounds(f"{name}new", method=method)
    cuda.Seat.captured = lambda self, work, what, tuned: CAPTURED(self, work, what, False)  # type: ignore[method-assign]
    rounds("untuned")
    cuda.Seat.captured = CAPTURED  # type: ignore[method-assign]
    for slots in (14, 16, 20):
        rounds(f"slots{slots}", workers=slots)
