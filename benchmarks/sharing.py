"""Several runs on one GPU through MPS: steps a second of all of them, by the share of the GPU that each may use.

    nvidia-cuda-mps-control -d
    python benchmarks/sharing.py 6x100 8x100/1 8x12/1 8x12/2 >> results/gpu-sharing.jsonl

8x12/2: eight processes, each with 12 % of the multiprocessors and two slots (none given: the engine's own choice).
A small share makes the library time its convolutions on few multiprocessors, where the fastest is the one that does
least work; on all of them it is the one that spreads best, which is no use when others want the rest. The Digits
clients in bf16, FedAvg with E = 4, random samples.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import time
from typing import Any

SECONDS = 12.0


def runs(percent: int, slots: int | None, together: Any, found: Any) -> None:
    import torch

    torch.set_num_threads(1)
    from fedhpro.bench.gpu import DIGITS, source
    from fedhpro.config import configure
    from fedhpro.federation import Federation
    from fedhpro.matrix import use_of_gpu

    use_of_gpu(percent)
    keys: dict[str, Any] = {"preset": "paper", "engine": "cuda", "precision": "bf16", "scenario": "domains"}
    keys |= {"method": "fedavg", "local_epochs": 4, "rounds": 10**6, "evaluate_every": 10**6, "workers": slots}
    steps = 4 * sum(-(-n // 64) for n in DIGITS)
    with Federation(configure(**keys), source(DIGITS)) as it:
        it.next_round()
        torch.cuda.synchronize()
        together.wait()
        started, used, done = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - started < SECONDS:
            it.next_round()
            torch.cuda.synchronize()
            done += 1
        seconds = time.perf_counter() - started
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        found.put((done * steps / seconds, (time.process_time() - used) / seconds, processors))


def measure(what: str) -> None:
    match = re.fullmatch(r"(\d+)x(\d+)(?:/(\d+))?", what)
    if match is None:
        sys.exit(f"{what}: expected PROCESSESxPERCENT or PROCESSESxPERCENT/SLOTS, like 8x12/2")
    count, percent, slots = int(match[1]), int(match[2]), match[3] and int(match[3])
    context = multiprocessing.get_context("spawn")
    together, found = context.Barrier(count), context.Queue()
    processes = [
        context.Process(target=runs, args=(percent, slots, together, found), daemon=True) for _ in range(count)
    ]
    for process in processes:
        process.start()
    each = [found.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    rate = sum(one[0] for one in each)
    row = {"what": what, "steps_per_s": round(rate), "ms_per_step": round(1e3 / rate, 4)}
    row |= {"cores": round(sum(one[1] for one in each), 1), "multiprocessors_seen": each[0][2]}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    for what in sys.argv[1:]:
        measure(what)
