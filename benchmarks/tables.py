"""Tables and curves of the docs' pages of results from the files that matrix.py and heads.py leave.

    python benchmarks/tables.py results/office-caltech.jsonl results/digits.jsonl [--figure docs/results.png]
                                                                                  [--matching docs/matching.png]
    python benchmarks/tables.py results/*-confirm.jsonl --against fedhpro fedhpro-M0
    python benchmarks/tables.py results/office-caltech.jsonl --rounds-to 40 50 60 --fairness
    python benchmarks/tables.py results/cifar10-lt-100.jsonl --swings 20
    python benchmarks/tables.py results/cifar10-labels-paper.jsonl@30
    python benchmarks/tables.py results/heads.jsonl

Means and sample standard deviations over seeds, in per cent, of runs that reached their last round; last5 is the mean
of the last five evaluations. Gains over FedAvg, and differences to other runs (--against, with their standard errors,
then those of each seed), are taken seed by seed. Several files of one group, as of a setting and its rivals, can be
given as one: a.jsonl+b.jsonl. Of runs that were cut off: a.jsonl@30 is as if round 30 had been their last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedhpro.comparison import show
from fedhpro.config import configure
from fedhpro.data.catalog import CATALOG
from fedhpro.evaluation import fairness, rounds_to_accuracy

PAPER = {  # Table "Domain Skew" of its appendix, AVG
    "office-caltech": {
        "fedavg": 55.42, "fedprox": 56.62, "moon": 52.79, "fedproto": 58.26, "fedtgp": 59.39, "fedgmkd": 59.91,
        "fedrcl": 55.68, "fedsa": 60.57, "fedhpro": 64.52,
    },
    "digits": {
        "fedavg": 78.82, "fedprox": 79.01, "moon": 76.74, "fedproto": 80.41, "fedtgp": 81.67, "fedgmkd": 81.83,
        "fedrcl": 79.67, "fedsa": 82.54, "fedhpro": 84.80,
    },
    "cifar10-lt-10": {  # and its table for quantity skew
        "fedavg": 75.54, "fedprox": 75.15, "moon": 76.11, "fedproto": 75.81, "fedtgp": 76.27, "fedgmkd": 76.83,
        "fedrcl": 76.60, "fedsa": 76.75, "fedhpro": 78.62,
    },
    "cifar10-lt-50": {
        "fedavg": 69.05, "fedprox": 69.23, "moon": 69.70, "fedproto": 69.43, "fedtgp": 71.36, "fedgmkd": 71.21,
        "fedrcl": 71.55, "fedsa": 72.30, "fedhpro": 74.69,
    },
    "cifar10-lt-100": {
        "fedavg": 60.79, "fedprox": 60.86, "moon": 60.91, "fedproto": 60.37, "fedtgp": 61.94, "fedgmkd": 62.13,
        "fedrcl": 62.41, "fedsa": 62.48, "fedhpro": 64.75,
    },
}  # fmt: skip
CURVES = {"fedavg": "#999999", "fedrcl": "#D55E00", "fedsa": "#009E73", "fedhpro": "#0072B2", "fedhpro-M0": "#56B4E9",
          "fedhpro-I1-M0": "#CC79A7", "fedhpro-I1-M0-blocks": "#E69F00", "fedhpro-plus": "#882255",
          "fedhpro-plus-vote": "#000000", "fedavg-balanced": "#000000", "released": "#E69F00",
          "fedproto": "#CC79A7"}  # fmt: skip
Runs = dict[str, dict[int, dict[str, Any]]]  # name -> seed -> what matrix.py kept


def read(path: Path) -> Runs:
    found: Runs = {}
    files, _, cut = str(path).partition("@")
    for line in "".join(Path(part).read_text() for part in files.split("+")).splitlines():
        run = json.loads(line)
        name, seed = run["run"].rsplit("-seed", 1)
        length = {key: run["keys"][key] for key in ("preset", "rounds", "data") if key in run["keys"]}
        last = int(cut) if cut else configure(**length).rounds
        run["rounds"] = [each for each in run["rounds"] if each["round"] <= last]
        if run["rounds"] and run["rounds"][-1]["round"] == last:
            found.setdefault(name, {})[int(seed)] = run
    return found


def final(run: dict[str, Any], domain: str = "AVG") -> float:
    return run["rounds"][-1]["accuracy"][domain]


def last5(run: dict[str, Any]) -> float:
    return statistics.fmean(each["accuracy"]["AVG"] for each in run["rounds"][-5:])


def spread(values: list[float]) -> str:
    return show((statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None))


def table(path: Path) -> str:
    runs, paper = read(path), PAPER.get(path.stem, {})
    if not runs:
        return "no run has got so far"
    first = next(iter(next(iter(runs.values())).values()))
    domains = [domain for domain in first["rounds"][-1]["accuracy"] if domain != "AVG"]
    titles = ["method", *domains, "AVG final", "AVG last5", "over FedAvg", "seeds"]
    titles += ["paper: AVG", "over FedAvg"] if paper else []
    lines = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    for name, seeds in runs.items():
        base = runs.get("fedavg", {})
        gains = [final(run) - final(base[seed]) for seed, run in seeds.items() if seed in base and name != "fedavg"]
        cells = [name, *(spread([final(run, domain) for run in seeds.values()]) for domain in domains)]
        cells += [spread([final(run) for run in seeds.values()]), spread([last5(run) for run in seeds.values()])]
        cells += [f"{statistics.fmean(gains):+.2f}" if gains else "", str(len(seeds))]
        if paper:
            there = name in paper
            cells += [f"{paper[name]:.2f}" if there else ""]
            cells += [f"{paper[name] - paper['fedavg']:+.2f}" if there and name != "fedavg" else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def paired(runs: dict[int, Any], others: dict[int, Any], measure: Callable[[Any], float] = final) -> list[float]:
    """By how much the ones are above the others, for each seed that both have."""
    return [measure(runs[seed]) - measure(others[seed]) for seed in sorted(runs.keys() & others.keys())]


def with_error(gaps: list[float]) -> str:
    """Their mean, and its standard error where there are several."""
    error = f" ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.2f}" if len(gaps) > 1 else ""
    return f"{statistics.fmean(gaps):+.2f}{error}"


def differences(path: Path, others: list[str]) -> str:
    runs = read(path)
    others = [other for other in others if other in runs]
    lines = [f"| final minus that of | {' | '.join(others)} |", "|---" * (len(others) + 1) + "|"]
    for name, seeds in runs.items():
        cells = []
        for other in others:
            gaps = paired(seeds, runs[other])
            each = ", ".join(f"{gap:+.1f}" for gap in gaps)
            cells.append(f"{with_error(gaps)} ({each})" if gaps and name != other else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def matched(path: Path) -> list[str]:
    """Rows: each run that was made with frozen hyper-prototypes too (NAME-M0), minus that one, paired by seed."""
    runs, rows = read(path), []
    for name in [name for name in runs if f"{name}-M0" in runs or (name == "fedhpro" and "M0" in runs)]:
        frozen = runs.get(f"{name}-M0") or runs["M0"]
        gaps, later = (paired(runs[name], frozen, measure) for measure in (final, last5))
        if gaps:
            rows.append(f"| {path.stem} | {name} | {len(gaps)} | {with_error(gaps)} | {with_error(later)} |")
    return rows


def rounds_to(path: Path, wanted: list[float]) -> str:
    """The first evaluated round with each accuracy, mean over the seeds; in brackets how many of them reach it."""
    lines = [f"| rounds to | {' | '.join(f'{each:g} %' for each in wanted)} |", "|---" + "|---:" * len(wanted) + "|"]
    for name, seeds in read(path).items():
        cells = []
        for each in wanted:
            found = [r for run in seeds.values() if (r := rounds_to_accuracy(run["rounds"], each))]
            missing = f" ({len(found)} of {len(seeds)})" if len(found) < len(seeds) else ""
            cells.append(f"{statistics.fmean(found):.0f}{missing}" if found else "never")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def swings(path: Path, last: int) -> str:
    """Of the last evaluations: mean, lowest and highest of all seeds."""
    lines = [f"| last {last} evaluations | mean | lowest | highest |", "|---|---:|---:|---:|"]
    for name, seeds in read(path).items():
        each = [[record["accuracy"]["AVG"] for record in run["rounds"][-last:]] for run in seeds.values()]
        cells = [spread(list(map(statistics.fmean, each))), f"{min(map(min, each)):.1f}", f"{max(map(max, each)):.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fairness_table(path: Path) -> str:
    """Over the clients: the accuracy of the final global model on the test set of the client's own domain."""
    lines = ["| method | worst 10 % | best 10 % | mean | standard deviation |", "|---|---:|---:|---:|---:|"]
    for name, seeds in read(path).items():
        found = []
        for run in seeds.values():
            scores = {domain.rstrip("*"): score for domain, score in run["rounds"][-1]["accuracy"].items()}
            parts = CATALOG[run["keys"]["data"]].parts
            found.append(fairness([scores[part.name] for part in parts for _ in range(part.clients)]))
        cells = [spread([each[key] for each in found]) for key in ("worst10", "best10", "mean", "std")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def heads_table(path: Path) -> str:
    """Means over the seeds: a column for each data and method."""
    columns: dict[str, list[dict[str, float]]] = {}
    for line in path.read_text().splitlines():
        run = json.loads(line)
        column = f"{run['data']} {run['run'].rsplit('-seed', 1)[0]}"
        columns.setdefault(column, []).append(run["heads"] | run.get("hyper", {}))
    rows = dict.fromkeys(name for runs in columns.values() for name in runs[0])
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for row in rows:
        cells = [
            f"{statistics.fmean(run[row] for run in runs):.4g}" if row in runs[0] else "" for runs in columns.values()
        ]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(paths: list[Path], target: Path, label: str, plot: Callable[[Any, Runs], None]) -> None:
    """Curves over the rounds, a panel for each file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(10.0, 5.0 * len(paths)), 3.8), layout="constrained")
    for axes, path in zip(figure.subplots(1, len(paths), squeeze=False)[0], paths, strict=True):
        plot(axes, read(path))
        axes.set(title=path.stem, xlabel="round", ylabel=label)
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=100)


def over_rounds(seeds: dict[int, dict[str, Any]], group: str, key: str) -> tuple[list[int], list[list[float]]]:
    """The evaluated rounds, and in each of them the values of all seeds."""
    histories = [run["rounds"] for run in seeds.values()]
    values = [[record[group][key] for record in same] for same in zip(*histories, strict=True)]
    return [record["round"] for record in histories[0]], values


def plot_accuracy(axes: Any, runs: Runs) -> None:
    """Means over the seeds; where every round is evaluated also over two rounds, since some methods alternate."""
    place: dict[str, Any] = {"loc": "lower right"}
    for name, colour in CURVES.items():
        if name in runs:
            rounds, values = over_rounds(runs[name], "accuracy", "AVG")
            means = list(map(statistics.fmean, values))
            axes.fill_between(rounds, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.15, lw=0)
            if rounds[1] == rounds[0] + 1:
                axes.plot(rounds, means, color=colour, alpha=0.3, lw=0.7)
                rounds, means = rounds[1:], [(this + last) / 2 for last, this in pairwise(means)]
                place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
            axes.plot(rounds, means, color=colour, label=name)
    axes.legend(fontsize=8, **place)


def plot_matching(axes: Any, runs: Runs) -> None:
    lines = {name: {"": ("L_GM", "-")} for name in CURVES if "-M0" in name}
    lines = {"fedhpro": {", before matching": ("L_GM_start", "--"), ", after it": ("L_GM", "-")}} | lines
    for name in [name for name in lines if name in runs]:
        for suffix, (key, line) in lines[name].items():
            rounds, values = over_rounds(runs[name], "server", key)
            axes.plot(rounds, list(map(statistics.fmean, values)), line, color=CURVES[name], label=name + suffix)
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
    axes.legend(loc="upper left", fontsize=8, ncols=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--against", nargs="+", default=[])
    parser.add_argument("--rounds-to", nargs="+", type=float, default=[], help="per cent")
    parser.add_argument("--fairness", action="store_true")
    parser.add_argument("--swings", type=int, default=0, metavar="N", help="over the last N evaluations")
    parser.add_argument("--matched", action="store_true", help="only matched hyper-prototypes minus frozen ones")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--matching", type=Path, help="a figure of L_GM")
    options = parser.parse_args()
    if options.matched:
        print("| results | run | seeds | final, matched minus frozen | last five |\n|---|---|---:|---:|---:|")
        print("\n".join(row for path in options.files for row in matched(path)))
        return
    for path in options.files:
        print(f"\n{path.stem}\n\n" + (heads_table(path) if path.stem == "heads" else table(path)))
        if options.against:
            print("\n" + differences(path, options.against))
        if options.rounds_to:
            print("\n" + rounds_to(path, options.rounds_to))
        if options.fairness:
            print("\n" + fairness_table(path))
        if options.swings:
            print("\n" + swings(path, options.swings))
    if options.figure:
        draw(options.files, options.figure, "test accuracy, mean of the domains, %", plot_accuracy)
    if options.matching:
        draw(options.files, options.matching, "L_GM (Eq 8), mean of the classes", plot_matching)


if __name__ == "__main__":
    main()
