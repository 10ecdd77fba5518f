"""One class is rare, at every site alike: digits-lite by domain, "seven" or "other" (docs/plus-elsewhere.md).

    python benchmarks/rare.py OUT.jsonl --seeds 5 6 7 --parallel 2

A line for each run: its keys, and of each evaluated round the accuracies and the means of the two classes'. Runs that
are in OUT.jsonl already are not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matrix import rounded

import fedhpro
from fedhpro import data
from fedhpro.data.sources import Source, Split

RARE = 7
PARTS = ("train", "validation", "test")
ROWS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "fedavg-balanced": {"method": "fedavg", "balanced": True},
    "plus": {"method": "fedhpro-plus"},
    "plus-no-vote": {"method": "fedhpro-plus", "agreed": False},
    "plus-no-vote-balanced": {"method": "fedhpro-plus", "agreed": False, "balanced": True},
    "fedhpro": {"method": "fedhpro"},
    "fedrcl": {"method": "fedrcl"},
    "fedsa": {"method": "fedsa"},
}
KEYS = {"data": "digits-lite", "evaluate_every": 3, "workers": 0}


def sevens() -> Source:
    def relabelled(split: Split) -> Split:
        return Split(split.x, (split.y == RARE).long())

    source = data.load("digits-lite")
    domains = [
        dataclasses.replace(domain, **{part: relabelled(getattr(domain, part)) for part in PARTS})
        for domain in source.domains
    ]
    return dataclasses.replace(source, name="sevens", domains=tuple(domains), classes=("other", "seven"))


def one(make: Callable[[], Source], name: str, keys: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        done = fedhpro.run(**keys, source=make(), out=f"{folder}/run")
    rounds = [
        {"round": record["round"], "accuracy": rounded(record["accuracy"]), "balanced": rounded(record["balanced"])}
        for record in done.history
        if "accuracy" in record
    ]
    return {"run": name, "keys": keys, "rounds": rounds}


def main(
    make: Callable[[], Source],
    about: str,
    rows: dict[str, dict[str, Any]],
    keys: dict[str, Any],
    arguments: list[str] | None = None,
) -> None:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7])
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--rows", nargs="+", default=list(rows), choices=list(rows))
    options = parser.parse_args(arguments)
    before = options.out.read_text().splitlines() if options.out.exists() else []
    there = {json.loads(line)["run"] for line in before}
    jobs = {f"{n}-seed{seed}": keys | rows[n] | {"seed": seed} for seed in options.seeds for n in options.rows}
    with multiprocessing.get_context("spawn").Pool(options.parallel, maxtasksperchild=1) as pool:
        answers = [pool.apply_async(one, (make, name, keys)) for name, keys in jobs.items() if name not in there]
        for answer in answers:
            found = answer.get()
            last = found["rounds"][-1]
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
            scores = f"AVG {last['accuracy']['AVG']:.1f}, mean of the classes {last['balanced']['AVG']:.1f}"
            print(f"{found['run']}: {scores}", flush=True)


if __name__ == "__main__":
    main(sevens, str(__doc__), ROWS, KEYS)
