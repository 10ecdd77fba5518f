"""Accuracy, loss terms and matching loss over the rounds of one or several runs, as one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..evaluation import AVG
from ..files import write_atomically

if TYPE_CHECKING:
    from .picture import Picture

# colour-blind safe (Okabe and Ito)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8c8c8c")


def draw_curves(runs: Sequence[Path], out: Path, names: Sequence[str] | None = None) -> None:
    write_atomically(out, plot_curves(runs, names)._repr_png_())


def plot_curves(runs: Sequence[Path], names: Sequence[str] | None = None) -> Picture:
    """One run: accuracy per domain, loss terms, L_GM. Several: their AVG accuracy on common axes."""
    from ..runs import RunFolder
    from .picture import Picture  # heavy, and not needed by who only trains

    histories = [RunFolder(run).records() for run in runs]
    if len(runs) == 1:
        history = histories[0]
        figure = Picture(figsize=(12, 3.6), layout="constrained")
        accuracy, loss, matching = figure.subplots(1, 3)
        for name, colour in zip(_keys(history, "accuracy"), COLOURS, strict=False):
            wide = 2.6 if name == AVG else 1.4
            _line(accuracy, history, "accuracy", name, "black" if name == AVG else colour, wide)
        for name, colour in zip(_keys(history, "loss"), COLOURS, strict=False):
            _line(loss, history, "loss", name, colour, 1.8)
        for name, colour in zip(_keys(history, "server"), COLOURS, strict=False):
            _line(matching, history, "server", name, colour, 1.8)
        _dress(accuracy, "accuracy on the test sets", "%")
        for axes, kind, title in (
            (loss, "loss", "loss terms at the clients"),
            (matching, "server", "gradient matching at the server"),
        ):
            if _keys(history, kind):
                _dress(axes, title, "")
                axes.set_yscale("log")
            else:
                axes.set_visible(False)
    else:
        figure = Picture(figsize=(6.4, 4), layout="constrained")
        axes = figure.subplots()
        labels = names or [run.name for run in runs]
        for number, (history, label) in enumerate(zip(histories, labels, strict=True)):
            style = ("-", "--", ":", "-.")[number // len(COLOURS) % 4]
            _line(axes, history, "accuracy", AVG, COLOURS[number % len(COLOURS)], 2.0, label, style)
        _dress(axes, "mean accuracy of the domains, first seed", "%")
    return figure


def _keys(history: Sequence[dict[str, Any]], group: str) -> list[str]:
    return list(dict.fromkeys(key for record in history for key in record.get(group, {})))


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
    rounds, values = zip(*points, strict=True)
    axes.plot(rounds, values, style, color=colour, linewidth=width, label=label or key, marker="o", markersize=2.5)


def _dress(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("round")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
