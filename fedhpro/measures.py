"""What a column of an experiment is: one number of a finished run, in words and in code."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .accounting import VALUES
from .config import closest
from .errors import ConfigError, RunError
from .evaluation import AVG, fairness, rounds_to_accuracy, speed_up
from .files import write_atomically
from .heads import NAMES, heads
from .probe import Probe, local_accuracies, probe
from .report.reading import Run

Values = dict[str, float]  # final; of accuracies also best and last5
LOCAL, HEADS = "local_models.json", "heads.json"  # in a run folder: they take some training to know

TITLES = {
    "balanced": "mean of the classes",
    "values_up_e7": "values up / 10^7",
    "mb_up": "MB up",
    "flops_e10": "FLOPs / 10^10",
    "flops_ratio": "FLOPs, ratio to FedAvg",
    "seconds": "seconds",
    "seconds_ratio": "seconds, ratio to FedAvg",
    "distance.printed": "distance, as printed",
    "distance.own": "distance, own space",
    "distance.geometry": "distance, geometry",
}
SPREAD = {"worst10": "worst 10 %", "best10": "best 10 %", "mean": "mean", "std": "std"}
OF_ROUNDS = re.compile(r"(R|speedup)(\d+)")
WAYS = {"global": "global model, own domain", "local": "own model, all domains"}


def check(column: str, domains: Sequence[str]) -> None:
    """Before anything runs. Without domains (those of one's own data are not known yet) any other name may be one."""
    known = [AVG, *TITLES, "L_GM", "L_GM_start", *(f"fair.{way}.{part}" for way in WAYS for part in SPREAD)]
    known += [f"head.{name}" for name in NAMES] + [*domains]
    if column not in known and not OF_ROUNDS.fullmatch(column) and (domains or "." in column):
        raise ConfigError(f"there is no column {column!r}{closest(column, known)}")


def title(column: str) -> str:
    """The column's name in a table."""
    if found := OF_ROUNDS.fullmatch(column):
        return f"rounds to {found[2]} %" if found[1] == "R" else f"speed-up at {found[2]} %"
    if column.startswith("fair."):
        _, way, part = column.split(".")
        return f"{SPREAD[part]} ({WAYS[way]})"
    return TITLES.get(column, column.removeprefix("head."))


def measured(column: str, run: Run, peers: Mapping[str, Run] | None = None) -> Values:
    """Nothing where the run does not have it. `peers`: of the same federation and seed, by method."""
    peers = peers or {}
    if found := OF_ROUNDS.fullmatch(column):
        return _final(_rounds(run, int(found[2])) if found[1] == "R" else _speed_up(run, peers, int(found[2])))
    if column in ("L_GM", "L_GM_start"):
        return _final(list(run.values("server", column).values() or [None])[-1])
    if column == "balanced":
        return _final((run.evaluated[-1].balanced or {}).get(AVG) if run.evaluated else None)
    if column in COSTS:
        return _final(COSTS[column](run))
    if column.endswith("_ratio"):
        cost = COSTS[{"flops_ratio": "flops_e10", "seconds_ratio": "seconds"}[column]]
        ours, theirs = cost(run), cost(peers["fedavg"]) if "fedavg" in peers else None
        return _final(ours / theirs if ours and theirs else None)
    if column.startswith("fair."):
        _, way, part = column.split(".")
        return _final(fairness(_own_domain(run) if way == "global" else _own_model(run))[part])
    if column.startswith("distance."):
        return _final(_distance(column, run, peers))
    if column.startswith("head."):
        return _final(_kept(run, HEADS, heads)[column.removeprefix("head.")])
    name = column if run.headline(column) else f"{column}*"  # rendered instead: see data/sources.py
    found_there = run.headline(name)
    return {key: found_there[key] for key in ("final", "best", "last5")} if found_there else {}


def _final(value: float | None) -> Values:
    return {} if value is None else {"final": float(value)}


def _rounds(run: Run, wanted: int) -> int | None:
    return rounds_to_accuracy([{"round": r.round, "accuracy": r.accuracy} for r in run.evaluated], wanted)


def _speed_up(run: Run, peers: Mapping[str, Run], wanted: int) -> float | None:
    theirs = _rounds(peers["fedavg"], wanted) if "fedavg" in peers else None
    ours = _rounds(run, wanted)
    return speed_up(ours, theirs) if ours and theirs and run.settings.method != "fedavg" else None


# Costs, of a round of all clients that take part


def _values_up(run: Run) -> float | None:
    tensors = run.costs.tensors if run.costs else []
    up = [t for t in tensors if t.direction == "up" and t.tensor.startswith(VALUES)]
    numbers = sum(math.prod(t.shape) for t in up if "float" in t.dtype)
    return numbers * _taking_part(run) / 1e7 if up else None


def _taking_part(run: Run) -> float:
    return sum(len(record.clients) for record in run.history) / len(run.history)


def _flops(run: Run) -> float | None:
    flops = run.costs.flops if run.costs else {}
    parts = [value for name in ("training", "passes") if not isinstance(value := flops.get(name), str | None)]
    return sum(parts) / len(run.history) / 1e10 if parts else None


COSTS = {
    "values_up_e7": _values_up,
    "mb_up": lambda run: sum(record.bytes_up for record in run.history) / len(run.history) / 1e6,
    "flops_e10": _flops,
    "seconds": lambda run: run.costs.seconds["train"] / len(run.history) if run.costs and run.costs.seconds else None,
}

# Fairness


def _own_domain(run: Run) -> list[float]:
    """The global model on the test set of each client's own domain."""
    scores = (run.evaluated[-1].accuracy or {}) if run.evaluated else {}
    if run.holdings is None or any(client.domain not in scores for client in run.holdings.clients):
        raise RunError(f"{run.folder} does not say on which domain each client would be tested")
    return [scores[client.domain] for client in run.holdings.clients]


def _own_model(run: Run) -> list[float]:
    """Each client's own model on all test sets together."""
    return list(_kept(run, LOCAL, local_accuracies))


def _kept(run: Run, name: str, measure: Callable[[Path], Any]) -> Any:
    """What was measured after the run's last round, from a file in its folder; else it is measured now and kept."""
    path, last = run.folder / name, run.history[-1].round
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["round"] == last:
            return kept["accuracies"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = measure(run.folder)
    write_atomically(path, json.dumps({"round": last, "accuracies": found}) + "\n")
    return found


# Figure 2


@functools.lru_cache(32)
def _probe(folder: Path, last_round: int) -> Probe:
    return probe(folder)


def _distance(column: str, run: Run, peers: Mapping[str, Run]) -> float | None:
    own = _probe(run.folder, run.history[-1].round)
    P = own.prototypes.mean(1)
    if column == "distance.own":
        return float((P - own.means).norm(dim=1)[own.present].mean())
    if "centralised" not in peers:
        return None
    central = _probe(peers["centralised"].folder, peers["centralised"].history[-1].round)
    both = own.present & central.present
    if column == "distance.printed":
        return float((P - central.means).norm(dim=1)[both].mean())
    return geometry(P[both], central.means[both])


def geometry(P: Tensor, Q: Tensor) -> float:
    """Root mean square difference of the cosines between classes, both sets centred: no rotation or scale matters."""

    def cosines(X: Tensor) -> Tensor:
        X = torch.nn.functional.normalize(X - X.mean(0), dim=1)
        return X @ X.T

    others = ~torch.eye(len(P), dtype=torch.bool)
    return float((cosines(P) - cosines(Q))[others].square().mean().sqrt())
