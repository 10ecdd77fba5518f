"""One page of experiments: the paper's tables and figures, ours beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import tables
from ..evaluation import AVG
from ..measures import title
from ..reproduce import Outcome, Row, Setting
from .charts import Series, line_chart, stacked_bars
from .embedding import draw_embedding
from .markup import Markup, join, table, tag
from .page import document
from .reading import Group
from .sections import series


def experiments_page(outcomes: Sequence[Outcome], folder: Path) -> str:
    """A section for each; links go to the reports of the runs, relative to the folder of the page."""
    names = [tag("a", found.experiment.title, href=f"#{found.experiment.name}") for found in outcomes]
    contents = tag("ul", *(tag("li", name) for name in names)) if len(names) > 1 else ""
    heading = outcomes[0].experiment.title if len(outcomes) == 1 else f"{len(outcomes)} experiments beside the paper's"
    runs = {run.folder for found in outcomes for run in found.runs.values()}
    header = tag("header", tag("h1", heading), tag("p", f"{len(runs)} runs, shared where they are the same"))
    sections = (_section(found, folder, titled=len(outcomes) > 1) for found in outcomes)
    return document(f"fedhpro: {heading}", tag("main", header, contents, *sections))


def _section(outcome: Outcome, folder: Path, titled: bool) -> Markup:
    experiment = outcome.experiment
    parts = [tag("h2", experiment.title)] if titled else []
    if experiment.stand_in:
        parts.append(tag("aside", experiment.stand_in, class_="skipped"))
    parts += [_table(outcome, tables.lines(outcome)), tag("p", tables.meaning(outcome), class_="note")]
    if any(cell.best for cell in outcome.cells):
        words = "Best round (chosen on the test set, so optimistic) / mean of the last five evaluations"
        parts.append(tag("details", tag("summary", words), _table(outcome, tables.other_lines(outcome))))
    if outcome.words:
        words = "Differences, paired over seeds; not corrected for the number of comparisons"
        parts += [tag("h3", words), tag("ul", *(tag("li", words) for words in outcome.words))]
    if experiment.figure and outcome.runs:
        parts.append(FIGURES[experiment.figure](outcome))
    parts += [tag("p", paragraph, class_="note") for paragraph in experiment.about.split("\n\n")]
    if outcome.problems:
        left_out = [tag("p", problem) for problem in outcome.problems]
        parts.append(tag("aside", tag("strong", "Left out"), *left_out, class_="skipped"))
    links = [
        tag("li", tag("a", ", ".join((row, setting, f"seed {seed}")), href=_way(folder, run.folder / "report.html")))
        for (row, setting, seed), run in outcome.runs.items()
    ]
    parts.append(tag("details", tag("summary", f"reports of the {len(links)} runs"), tag("ul", *links)))
    return tag("section", *parts, id=experiment.name, class_="experiment")


def _way(start: Path, end: Path) -> str:
    return Path(os.path.relpath(end, start)).as_posix()


def _table(outcome: Outcome, lines: Sequence[Sequence[str]]) -> Markup:
    small = [[tag("small", cell) for cell in line] if line[0] == "paper" else list(line) for line in lines]
    return table(["", *tables.heads(outcome)], small)


# Figures


def _groups(outcome: Outcome, setting: Setting) -> list[Group]:
    """The rows of a setting that have runs."""
    found = []
    for number, row in enumerate(outcome.experiment.rows):
        runs = [run for (r, s, _), run in outcome.runs.items() if (r, s) == (row.name, setting.name)]
        found += [Group(number, row.name, runs)] if runs else []
    return found


def _curves(outcome: Outcome) -> Markup:
    charts = []
    for setting in outcome.experiment.settings:
        lines = [series(group, "accuracy", AVG, group.label, group.number, None) for group in _groups(outcome, setting)]
        charts.append(line_chart(f"{setting.name}: average accuracy", lines, unit="%"))
    return tag("div", *charts, class_="grid")


def _matching(outcome: Outcome) -> Markup:
    charts = []
    for row in outcome.experiment.rows:
        lines = []
        for look, setting in enumerate(outcome.experiment.settings):
            own = [group for group in _groups(outcome, setting) if group.label == row.name]
            lines += [series(group, "server", "L_GM", setting.name, look, None) for group in own]
        charts.append(line_chart(f"{row.name}: L_GM after the steps of the round", lines))
    return tag("div", *charts, class_="grid")


def _sweep(outcome: Outcome) -> Markup:
    """Over x of the settings, a line for each row; or over x of the rows, a line for each setting."""
    means = {(cell.row, cell.setting): cell.mean for cell in outcome.cells if cell.column == AVG}
    rows, settings = outcome.experiment.rows, outcome.experiment.settings
    if any(setting.x is not None for setting in settings):
        lines = [
            _line(row.name, look, [(s.x, means.get((row.name, s.name))) for s in settings])
            for look, row in enumerate(rows)
        ]
        return tag("div", line_chart("average accuracy", lines, unit="%", x=_quantity(settings)), class_="grid")
    charts = []
    for name in dict.fromkeys(row.line for row in rows if row.x is not None):
        own = [row for row in rows if row.x is not None and row.line == name]
        lines = [
            _line(setting.name, look, [(row.x, means.get((row.name, setting.name))) for row in own])
            for look, setting in enumerate(settings)
        ]
        charts.append(line_chart(name or "average accuracy", lines, unit="%", x=_quantity(own)))
    return tag("div", *charts, class_="grid")


def _line(label: str, look: int, points: Sequence[tuple[float | None, float | None]]) -> Series:
    return Series(label, look, sorted((x, y) for x, y in points if x is not None and y is not None))


def _quantity(parts: Sequence[Row | Setting]) -> str:
    """What is varied: "tau=0.05" is of tau."""
    return parts[0].name.partition("=")[0].split()[-1]


def _bars(outcome: Outcome) -> Markup:
    charts = []
    for setting, column in outcome.experiment.columns():
        if not column.startswith("distance."):
            continue
        cells = [c for c in outcome.cells if (c.setting, c.column) == (setting.name, column) and c.mean is not None]
        bars = [(cell.row, None, {"L2": cell.mean}) for cell in cells if cell.mean is not None]
        if column != "distance.geometry":  # too small a number for bars with one decimal
            charts.append(stacked_bars(f"{setting.name}: {title(column)}", bars, ""))
    return tag("div", *charts, class_="grid")


def _tsne(outcome: Outcome) -> Markup:
    parts = []
    for setting in outcome.experiment.settings:
        drawn = [_embedding(group.label, group.first.folder, group) for group in _groups(outcome, setting)]
        parts.append(join(tag("h3", setting.name), tag("div", *drawn, class_="grid")))
    return join(*parts)


_drawn: dict[tuple[str, Path], Markup] = {}


def _embedding(label: str, folder: Path, group: Group) -> Markup:
    """Figures share runs, and a t-SNE takes seconds."""
    if (label, folder) not in _drawn:
        _drawn[label, folder] = draw_embedding(Group(0, label, group.runs), True)
    return _drawn[label, folder]


FIGURES: dict[str, Callable[[Outcome], Markup]] = {
    "curves": _curves,
    "L_GM": _matching,
    "sweep": _sweep,
    "bars": _bars,
    "tsne": _tsne,
}
