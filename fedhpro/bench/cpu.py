"""Seconds a round on a CPU beside fluke, pfl, FedLab and Flower's simulation, and fedhpro's ratio to each.

Every run is a process of its own. Runs are interleaved, one of ours before each of a peer's, so that whatever else the
machine does falls on all of them. The first run of each is not timed: it warms the disk cache, and its memory is taken.
"""

from __future__ import annotations

import io
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..files import write_atomically
from .environments import CORES, PEERS, Failed, Timing, Way, install, time_run

OURS = "fedhpro"
WORKLOADS = {
    "FedAvg, CNN": ("fedavg", "cnn"),
    "FedProto, CNN": ("fedproto", "cnn"),
    "FedAvg, overhead": ("fedavg", "tiny"),
    "FedProto, overhead": ("fedproto", "tiny"),
}
Found = dict[str, Any]


@dataclass
class Entry:
    """An engine, one way to use the cores, and the command for it."""

    engine: str
    way: Way
    command: Sequence[str]
    python_path: str = ""
    timings: list[Timing] = field(default_factory=list)
    peak_mb: float | None = None
    error: str | None = None

    def run(self, rounds: int, warm_up: bool = False) -> None:
        if self.error is not None:
            return
        try:
            timing = time_run([*self.command, f"--rounds={rounds}"], self.way.threads, warm_up, self.python_path)
        except Failed as failure:
            self.error = str(failure)
            return
        if warm_up:
            self.peak_mb = timing.peak_mb
        else:
            self.timings.append(timing)

    def row(self) -> Found:
        row: Found = {"engine": self.engine, "way": str(self.way)}
        if self.error is not None:
            return row | {"error": self.error}
        seconds = [value for timing in self.timings for value in timing.rounds]
        return row | {
            "min": round(min(seconds), 4),
            "median": round(statistics.median(seconds), 4),
            "first": round(statistics.median(timing.first for timing in self.timings), 2),
            "peak_mb": self.peak_mb,
            "seconds": [round(value, 4) for value in seconds],
        }


def cpu(quick: bool = False, say: Callable[[str], None] = print) -> Found:
    repetitions, rounds = (1, 3) if quick else (3, 5)
    pythons: dict[str, Path | str] = {}
    for peer in PEERS:
        say(f"installing {peer.requirement}, unless it is there")
        try:
            pythons[peer.name] = install(peer)
        except Failed as failure:
            pythons[peer.name] = str(failure)
    found: Found = {"versions": [peer.requirement for peer in PEERS], "repetitions": repetitions, "rounds": rounds}
    found["workloads"] = {}
    for title, (method, model) in WORKLOADS.items():
        ours, others = _ours(OURS, method, model), _peers(pythons, method, model)
        if model == "cnn":
            others.insert(0, _ours(f"{OURS}, same module", method, "cnn-torch"))
        for entry in (ours, *others):
            entry.run(2, warm_up=True)
        for repetition in range(1, repetitions + 1):
            for entry in others:
                ours.run(rounds)
                entry.run(rounds)
                if ours.error is not None:
                    raise RuntimeError(ours.error)
                say(f"{title}, {repetition} of {repetitions}: {_progress(ours)}; {_progress(entry)}")
        found["workloads"][title] = [entry.row() for entry in (ours, *others)]
    return found


def _ours(engine: str, method: str, model: str) -> Entry:
    way = Way(CORES, 1)
    command = [sys.executable, "-m", f"{__package__}.ours", method, model, f"--processes={way.processes}"]
    return Entry(engine, way, command, python_path=str(Path(__file__).parents[2]))


def _peers(pythons: dict[str, Path | str], method: str, model: str) -> list[Entry]:
    entries = []
    for peer in PEERS:
        if method in peer.methods:
            python = pythons[peer.name]
            if isinstance(python, str):
                entries.append(Entry(peer.name, peer.ways[0], [], error=python))
            else:
                entries += [Entry(peer.name, way, peer.command(python, way, method, model)) for way in peer.ways]
    return entries


def best(rows: Sequence[Found]) -> list[Found]:
    """The fastest way of each engine, in order of speed; what failed in every way comes last."""
    chosen: dict[str, Found] = {}
    for row in rows:
        before = chosen.get(row["engine"])
        if before is None or row.get("median", float("inf")) < before.get("median", float("inf")):
            chosen[row["engine"]] = row
    return sorted(chosen.values(), key=lambda row: row.get("median", float("inf")))


# rows[0] of a workload is ours
COLUMNS = ("engine", "cores used as", "min", "median", "x ours", "first round", "peak MB")


def cells(row: Found, ours: Found) -> list[str]:
    if "error" in row:
        return [row["engine"], row["way"], row["error"]]
    ratio = row["median"] / ours["median"]
    times = [f"{row['min']:.3f}", f"{row['median']:.3f}", f"{ratio:.2f}", f"{row['first']:.1f}"]
    return [row["engine"], row["way"], *times, "-" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}"]


def show(found: Found, console: Console) -> None:
    for title, rows in found["workloads"].items():
        table = Table(title=f"{title}: seconds a round", title_justify="left")
        for number, column in enumerate(COLUMNS):
            table.add_column(column, justify="left" if number < 2 else "right", no_wrap=number >= 2)
        for row in sorted(rows, key=lambda row: row.get("median", 0)):
            if "error" in row:
                console.print(": ".join(cells(row, rows[0])), style="red", markup=False, soft_wrap=True)
            else:
                table.add_row(*cells(row, rows[0]), style="bold green" if row["engine"] == OURS else "")
        console.print(table)


def markdown(found: Found) -> str:
    """The fastest way of each engine, for a page."""
    lines = []
    for title, rows in found["workloads"].items():
        lines += [f"**{title}**, seconds", "", f"| {' | '.join(COLUMNS)} |", "|---|---|---:|---:|---:|---:|---:|"]
        lines += [f"| {' | '.join(cells(row, rows[0]))} |" for row in best(rows)] + [""]
    return "\n".join(lines)


def draw(found: Found, path: Path) -> None:
    """A panel for each workload: medians as bars, minima as marks on them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.2), layout="constrained")
    panels = figure.subplots(2, 2)
    for axes, (title, rows) in zip(panels.flat, found["workloads"].items(), strict=False):
        bars = [row for row in best(rows) if "error" not in row][::-1]
        colours = ["#0072B2" if row["engine"].startswith(OURS) else "#b8b8b8" for row in bars]
        names = [f"{row['engine']}\n{row['way']}" for row in bars]
        axes.barh(names, [row["median"] for row in bars], color=colours)
        for position, row in enumerate(bars):
            axes.plot([row["min"]] * 2, [position - 0.4, position + 0.4], color="black", linewidth=1)
            label = f" {row['median']:.3g} s, x {row['median'] / rows[0]['median']:.2f}"
            axes.text(row["median"], position, label, va="center", fontsize=8)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("seconds a round: median (bar) and minimum (line)", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_atomically(path, buffer.getvalue())


def _progress(entry: Entry) -> str:
    seconds = "failed" if entry.error is not None else f"{statistics.median(entry.timings[-1].rounds):.3f} s"
    return f"{entry.engine} ({entry.way}) {seconds}"
