"""Accuracy, loss terms and matching loss over the rounds of one or several runs, as one PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..evaluation import AVG
from ..files import write_atomically

if TYPE_CHECKING:
    from .picture import Picture

# colour-blind safe (Okabe and Ito)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8c8c8c")


PANELS = {
    "accuracy": "accuracy on the test sets",
    "test_loss": "loss on the test sets",
    "loss": "loss terms at the clients",
    "server": "at the server",
}
VOTE = ("server", "vote")  # of fedhpro-plus


def draw_curves(runs: Sequence[Path], out: Path, names: Sequence[str] | None = None) -> None:
    write_atomically(out, plot_curves(runs, names).png())


def plot_curves(runs: Sequence[Path], names: Sequence[str] | None = None) -> Picture:
    """One run: accuracy and loss per domain, loss terms, L_GM. Several: their AVG accuracy on common axes."""
    from ..runs import RunFolder
    from .picture import Picture  # heavy, and not needed by who only trains

    histories = [RunFolder(run).records() for run in runs]
    if len(runs) == 1:
        history = histories[0]
        shown = {group: title for group, title in PANELS.items() if group == "accuracy" or _keys(history, group)}
        figure = Picture(figsize=(4 * len(shown), 3.6), layout="constrained")
        for axes, (group, title) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
            for name, colour in zip(_keys(history, group), COLOURS, strict=False):
                _line(axes, history, group, name, *(("black", 2.6) if name == AVG else (colour, 1.6)))
            _dress(axes, title, "%" if group == "accuracy" else "")
            axes.set_yscale("log" if group in ("loss", "server") else "linear")
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=8, frameon=False)
    else:
        figure = Picture(figsize=(6.4, 4), layout="constrained")
        axes = figure.subplots()
        labels = names or [run.name for run in runs]
        for number, (history, label) in enumerate(zip(histories, labels, strict=True)):
            style = ("-", "--", ":", "-.")[number // len(COLOURS) % 4]
            _line(axes, history, "accuracy", AVG, COLOURS[number % len(COLOURS)], 2.0, label, style)
        _dress(axes, "mean accuracy of the domains, first seed", "%")
        axes.legend(fontsize=8, frameon=False)
    return figure


def _keys(history: Sequence[dict[str, Any]], group: str) -> list[str]:
    """A loss term that was 0 in every round was not there, and a vote that hardly moves is left to the report."""
    names = dict.fromkeys(key for record in history for key in record.get(group, {}) if (group, key) != VOTE)
    return [key for key in names if group != "loss" or any(record.get(group, {}).get(key) for record in history)]


def _line(
    axes: Any,
    history: Sequence[dict[str, Any]],
    group: str,
    key: str,
    colour: str,
    width: float,
    label: str = "",
    style: str = "-",
) -> None:
    points = [(record["round"], record[group][key]) for record in history if key in record.get(group, {})]
    if group == "loss":  # a term of 0 was not there in that round: the line breaks
        points = [(number, value or math.nan) for number, value in points]
    rounds, values = zip(*points, strict=True)
    axes.plot(rounds, values, style, color=colour, linewidth=width, label=label or key, marker="o", markersize=2.5)


def _dress(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("round")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
