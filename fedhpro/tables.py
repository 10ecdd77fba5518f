"""An experiment's outcome as Markdown, LaTeX, CSV and JSON: ours, the paper's, and the difference."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .evaluation import AVG
from .files import write_atomically
from .measures import title
from .reproduce import Cell, Outcome

NOTHING = "–"


def save(outcome: Outcome, folder: Path) -> None:
    for ending, form in FORMS.items():
        write_atomically(folder / f"{outcome.experiment.name}.{ending}", form(outcome))


def heads(outcome: Outcome) -> list[str]:
    """Of the columns: the setting where there are several, and what is read from it where that is not its AVG alone."""
    several = len(outcome.experiment.settings) > 1
    return [
        setting.name if setting.columns == [AVG] else f"{setting.name}: {title(column)}" if several else title(column)
        for setting, column in outcome.experiment.columns()
    ]


def lines(outcome: Outcome) -> list[list[str]]:
    """For each row of the experiment what we measured, and under it what the paper has."""
    found = []
    for row, cells in by_row(outcome):
        found.append([row, *(spread(cell) for cell in cells)])
        if any(cell.paper is not None for cell in cells):
            found.append(["paper", *(beside(outcome, cell) for cell in cells)])
    return found


def other_lines(outcome: Outcome) -> list[list[str]]:
    """Of the accuracies: best round, and mean of the last five evaluations."""
    return [
        [row, *(f"{_mean(cell.best)} / {_mean(cell.last5)}" if cell.best else NOTHING for cell in cells)]
        for row, cells in by_row(outcome)
    ]


def by_row(outcome: Outcome) -> list[tuple[str, list[Cell]]]:
    return [(row.name, [c for c in outcome.cells if c.row == row.name]) for row in outcome.experiment.rows]


def spread(cell: Cell) -> str:
    if cell.mean is None:
        return f"{len(cell.final)} of {cell.runs} seeds" if cell.final else NOTHING
    return number(cell.mean) + (f" ± {number(statistics.stdev(cell.final.values()))}" if len(cell.final) > 1 else "")


def beside(outcome: Outcome, cell: Cell) -> str:
    """The paper's number and, unless the data are a stand-in, the difference."""
    if cell.paper is None:
        return NOTHING
    gap = difference(outcome, cell)
    return number(cell.paper) + (f" ({gap:+.2f})" if gap is not None else "")


def difference(outcome: Outcome, cell: Cell) -> float | None:
    if cell.mean is None or cell.paper is None or outcome.experiment.stand_in:
        return None
    return cell.mean - cell.paper


def number(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def _mean(values: Mapping[int, float]) -> str:
    return number(statistics.fmean(values.values()))


def meaning(outcome: Outcome) -> str:
    """What stands in the table."""
    seeds = sorted({seed for cell in outcome.cells for seed in cell.final})
    several = f", mean ± standard deviation over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else ""
    single = f", seed {seeds[0]} alone" if len(seeds) == 1 else ""
    gap = "" if outcome.experiment.stand_in else " (difference: ours - paper's)"
    paper = f"; under ours the paper's number{gap}" if any(cell.paper is not None for cell in outcome.cells) else ""
    return f"Accuracies in per cent after the last round{several}{single}{paper}."


def terminal(outcome: Outcome) -> Any:
    """With a line for each column: a terminal is not as wide as a paper."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=Text(outcome.experiment.title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("", "", "ours", "best", "last five", "paper", "difference"):
        shown.add_column(name, justify="left" if not name else "right")
    for row, cells in by_row(outcome):
        for i, (cell, head) in enumerate(zip(cells, heads(outcome), strict=True)):
            gap = difference(outcome, cell)
            numbers = [_mean(cell.best) if cell.best else "", _mean(cell.last5) if cell.last5 else ""]
            numbers += [number(cell.paper) if cell.paper is not None else "", "" if gap is None else f"{gap:+.2f}"]
            shown.add_row(*map(Text, [row if i == 0 else "", head, spread(cell), *numbers]))
    shown.caption = Text("\n".join(filter(None, [outcome.experiment.stand_in, *outcome.words])))
    shown.caption_justify = "left"
    return shown


def markdown(outcome: Outcome) -> str:
    experiment = outcome.experiment
    parts = [f"# {experiment.title}\n"]
    parts += [f"**{_escaped_md(experiment.stand_in)}**\n"] if experiment.stand_in else []
    parts += [f"{meaning(outcome)}\n", _md(heads(outcome), lines(outcome))]
    if any(cell.best for cell in outcome.cells):
        parts += ["Best round (chosen on the test set, so optimistic) / mean of the last five evaluations:\n"]
        parts += [_md(heads(outcome), other_lines(outcome))]
    if outcome.words:
        parts += ["Paired over seeds, not corrected for the number of comparisons:\n"]
        parts += ["\n".join(f"- {_escaped_md(words)}" for words in outcome.words) + "\n"]
    parts += [f"{_escaped_md(experiment.about)}\n"] if experiment.about else []
    if outcome.problems:
        parts += ["Left out:\n", "\n".join(f"- {_escaped_md(problem)}" for problem in outcome.problems) + "\n"]
    return "\n".join(parts)


def _md(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    every = [["", *head], *rows]
    text = ["| " + " | ".join(_escaped_md(cell) for cell in row) + " |" for row in every]
    return "\n".join([text[0], "|---" + "|---:" * len(head) + "|", *text[1:]]) + "\n"


def _escaped_md(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def latex(outcome: Outcome) -> str:
    """A tabular for booktabs, with the words as a comment above it."""
    notes = [outcome.experiment.title, outcome.experiment.stand_in, meaning(outcome), *outcome.words, *outcome.problems]
    comments = [f"% {' '.join(note.split())}" for note in notes if note]
    columns = "l" + "r" * len(heads(outcome))
    caption = outcome.experiment.title + (" (quick: stand-in data)" if outcome.experiment.stand_in else "")
    body = [" & ".join(_escaped_tex(cell) for cell in row) + r" \\" for row in [["", *heads(outcome)], *lines(outcome)]]
    inside = [r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule"]
    frame = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escaped_tex(caption)}}}",
        rf"\begin{{tabular}}{{{columns}}}",
    ]
    return "\n".join([*comments, *frame, *inside, r"\end{tabular}", r"\end{table}"]) + "\n"


TEX = {c: f"\\{c}" for c in "&%$#_{}"}
TEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}"}
TEX |= {">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$", "†": r"$\dagger$", "–": "--"}


def _escaped_tex(text: str) -> str:
    return "".join(TEX.get(letter, letter) for letter in text)


def records(outcome: Outcome) -> list[dict[str, Any]]:
    """One for each cell."""
    return [
        {
            "experiment": outcome.experiment.name,
            "quick": bool(outcome.experiment.stand_in),
            "row": cell.row,
            "setting": cell.setting,
            "column": cell.column,
            "seeds": len(cell.final),
            "runs": cell.runs,
            "mean": cell.mean,
            "std": statistics.stdev(cell.final.values()) if len(cell.final) > 1 else None,
            "best": statistics.fmean(cell.best.values()) if cell.best else None,
            "last5": statistics.fmean(cell.last5.values()) if cell.last5 else None,
            "paper": cell.paper,
            "difference": difference(outcome, cell),
        }
        for cell in outcome.cells
    ]


def as_csv(outcome: Outcome) -> str:
    rows, text = records(outcome), io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_json(outcome: Outcome) -> str:
    experiment = outcome.experiment
    about = {"name": experiment.name, "title": experiment.title, "stand_in": experiment.stand_in or None}
    values = [record | {"values": cell.final} for record, cell in zip(records(outcome), outcome.cells, strict=True)]
    folders = [{"row": r, "setting": s, "seed": n, "run": str(run.folder)} for (r, s, n), run in outcome.runs.items()]
    found = about | {"cells": values, "words": outcome.words, "problems": outcome.problems, "runs": folders}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


FORMS: dict[str, Callable[[Outcome], str]] = {"md": markdown, "tex": latex, "csv": as_csv, "json": as_json}
