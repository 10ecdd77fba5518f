"""Many runs side by side on one machine, each in a process of its own, until a deadline; what is done stays.

    python benchmarks/matrix.py JOBS.json OUT --parallel 6 --seconds 500
    python benchmarks/matrix.py results/jobs.json OUT --beside results       only what is not in results yet

JOBS.json is a list of {"into": GROUP, "keys": {keys of all runs}, "seeds": [0, 1, 2], "runs": {NAME: {its own keys}}}.
All runs of a group's first seed come first, so that a deadline leaves whole seeds; jobs may be added while runs go on.
OUT/runs/GROUP/NAME-seedN is the run folder; a run that a deadline cut off goes on from its last checkpoint when the
command is given again. OUT/GROUP.jsonl has a line for each run: its keys, and the accuracies, losses and logs of the
server at the evaluated rounds (--seconds 0: only writes these, and says how many runs are left).
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tables import read

from fedhpro.evaluation import differs
from fedhpro.matrix import gpu_share, use_of_gpu
from fedhpro.runs import RunFolder


def one(name: str, keys: dict[str, Any], out: Path, share: tuple[int, int] | None = None) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    use_of_gpu(share[0] if share else None)
    if keys.get("engine") != "cuda":
        keys = {"workers": 0} | keys  # these processes may have no others
    elif share:
        keys = {"workers": share[1]} | keys
    import torch

    torch.set_num_threads(1)
    import fedhpro

    if keys.get("method") in ("awake", "frames", "informed"):
        importlib.import_module(keys["method"])  # registers it

    folder = out / "runs" / name
    if (folder / "config.toml").exists():
        done = fedhpro.resume(folder)
    else:
        done = fedhpro.run({"checkpoint_every": 20, "keep_checkpoints": 1} | keys | {"out": str(folder)})
    print(f"{name}: {done.headline} {done.accuracy}", flush=True)


def jobs_of(path: Path) -> dict[str, dict[str, Any]]:
    """GROUP/NAME-seedN -> keys of the run."""
    return {
        f"{group['into']}/{name}-seed{seed}": group["keys"] | keys | {"seed": seed}
        for group in json.loads(path.read_text())
        for seed in group["seeds"]
        for name, keys in group["runs"].items()
    }


def kept(folder: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """Of a run, finished or not."""
    opened = RunFolder(folder)
    rounds = [
        {key: rounded(record[key]) for key in ("round", "accuracy", "loss", "server") if record.get(key)} | ways(record)
        for record in opened.records()
        if "accuracy" in record
    ]
    seconds = sum(timing["seconds"] for timing in opened.records(opened.timings))
    return {"run": folder.name, "keys": keys, "rounds": rounds, "seconds": round(seconds, 1)}


def ways(record: dict[str, Any]) -> dict[str, Any]:
    """AVG of each way to predict, where there are several, and of the classes' means, where these are others."""
    found = {name: rounded(scores["AVG"]) for name, scores in record["heads"].items()}
    heads = {"heads": found} if len(found) > 1 else {}
    of_classes = record.get("balanced", record["accuracy"])["AVG"]
    return heads | ({"balanced": rounded(of_classes)} if differs(of_classes, record["accuracy"]["AVG"]) else {})


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def measured(jobs: dict[str, dict[str, Any]], results: Path) -> set[str]:
    """Those of the jobs that have a line in this folder already, up to their last round."""
    files = {path.stem: path for path in results.glob("*.jsonl")}
    groups = {name.split("/")[0] for name in jobs} & files.keys()
    return {
        f"{group}/{name}-seed{seed}" for group in groups for name, runs in read(files[group]).items() for seed in runs
    }


def collect(jobs: dict[str, dict[str, Any]], out: Path) -> int:
    groups: dict[str, list[str]] = {}
    for name, keys in jobs.items():
        if (out / "runs" / name / "metrics.jsonl").exists():
            groups.setdefault(name.split("/")[0], []).append(json.dumps(kept(out / "runs" / name, keys)) + "\n")
    for group, lines in groups.items():
        (out / f"{group}.jsonl").write_text("".join(lines))
    return sum(map(len, groups.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--beside", type=Path, metavar="RESULTS", help="leave out runs that this folder has a line of")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # which ends the runs too
    context, share = multiprocessing.get_context("spawn"), gpu_share(options.parallel)
    jobs, waiting = jobs_of(options.jobs), list[str]()
    before = measured(jobs, options.beside) if options.beside else set[str]()
    started, running, begun = time.monotonic(), list[tuple[Any, str]](), Counter[str]()
    while True:
        jobs = jobs_of(options.jobs)
        whole = before | {name for name in jobs if (options.out / "runs" / name / "result.json").exists()}
        todo = [name for name in jobs if name not in whole]
        running = [(process, name) for process, name in running if process.is_alive()]
        busy = {name for _, name in running}
        waiting = [name for name in todo if name not in busy and begun[name] < 2]  # one that failed has another try
        if not (waiting or running) or time.monotonic() - started >= options.seconds:
            break
        if waiting and len(running) < options.parallel:
            name = waiting[0]
            process = context.Process(target=one, args=(name, jobs[name], options.out, share), daemon=True)
            process.start()
            begun[name] += 1
            running.append((process, name))
        else:
            time.sleep(0.5)
    for process, name in running:
        print(f"{name}: cut off by the deadline", flush=True)
        process.kill()
    count = collect(jobs, options.out)
    print(f"{count} runs in {time.monotonic() - started:.0f} s, {len(waiting)} not started", flush=True)


if __name__ == "__main__":
    main()
