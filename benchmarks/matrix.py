"""Many runs side by side on one machine, each in a process of its own, until a deadline; what is done stays.

    python benchmarks/matrix.py JOBS.json OUT --parallel 8 --seconds 500

JOBS.json is a list of {"name": ..., keys of a run}. OUT gets NAME.jsonl (metrics) and NAME.json (result) for each
finished run, and summary.json; runs/NAME is the run folder, also of a run that failed or that the deadline cut off.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any


def one(job: dict[str, Any], out: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # a GPU has a limited number of them for all processes
    import torch

    torch.set_num_threads(1)
    import fedhpro

    keys = {name: value for name, value in job.items() if name != "name"}
    run = out / "runs" / job["name"]
    done = fedhpro.run(keys | {"out": str(run), "checkpoint_every": 10**6})
    shutil.copy(run / "metrics.jsonl", out / f"{job['name']}.jsonl")
    shutil.copy(run / "result.json", out / f"{job['name']}.json")
    print(f"{job['name']}: {done.headline} {done.accuracy}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    started, running = time.monotonic(), list[tuple[Any, str]]()
    waiting = [
        job for job in json.loads(options.jobs.read_text()) if not (options.out / f"{job['name']}.json").exists()
    ]
    while (waiting or running) and time.monotonic() - started < options.seconds:
        running = [(process, name) for process, name in running if process.is_alive()]
        while waiting and len(running) < options.parallel:
            job = waiting.pop(0)
            process = context.Process(target=one, args=(job, options.out), daemon=True)
            process.start()
            running.append((process, job["name"]))
        time.sleep(0.2)
    for process, name in running:
        print(f"{name}: cut off by the deadline", flush=True)
        process.kill()
    results = {
        path.stem: json.loads(path.read_text()) for path in sorted(options.out.glob("*.json")) if path.stem != "summary"
    }
    seconds = round(time.monotonic() - started, 1)
    (options.out / "summary.json").write_text(json.dumps({"seconds": seconds, "runs": results}, indent=1) + "\n")
    print(f"{len(results)} runs in {seconds} s, {len(waiting)} not started", flush=True)


if __name__ == "__main__":
    main()
