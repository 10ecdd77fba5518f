"""The same federation with several methods and seeds, and one table of means and standard deviations."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import nearest
from .config import Config, configure, parse
from .errors import ConfigError, RunError, UserError
from .evaluation import AVG, differs, headline
from .federation import check_engine, choose_exchange
from .files import write_atomically
from .matrix import Say, fingerprint, found_in_place, is_done, run_all
from .report.curves import draw_curves
from .report.page import write_report
from .runs import Result, new_folder

CLASSES = "balanced"  # in a record: accuracies where every class counts the same
# the paper's methods in its order
ALL = ("fedavg", "fedprox", "moon", "fedproto", "fedtgp", "fedgmkd", "fedrcl", "fedsa", "fedhpro")


@dataclass(frozen=True)
class Entry:
    """A row: a method with settings of its own, written `fedhpro:M=0,I=1`."""

    label: str
    keys: dict[str, Any]


def entries(names: Sequence[str], common: dict[str, Any], control: bool = True) -> list[Entry]:
    """The rows asked for. After a FedHPro that matches gradients comes its control, M=0, unless it is there anyway."""
    found = [_entry(name) for name in names]
    configs = [configure(**(common | entry.keys)) for entry in found]  # spelt in two ways a setting is still one
    for number, (entry, config) in enumerate(zip(found, configs, strict=True)):
        if (first := configs.index(config)) < number:
            raise ConfigError(f"a method is given twice with the same settings: {found[first].label} and {entry.label}")
    for position, entry in reversed(list(enumerate(found))) if control else ():
        if configs[position].method == "fedhpro" and configs[position].parameters["M"] > 0:
            frozen = Entry(label_of("fedhpro", entry.keys | {"M": 0}), entry.keys | {"M": 0})
            if (config := configure(**(common | frozen.keys))) not in configs:
                found.insert(position + 1, frozen)
                configs.append(config)
    return found


def _entry(text: str) -> Entry:
    method, _, settings = text.partition(":")
    keys = parse(settings.split(",")) if settings else {}
    for name in ("method", "seed", "out"):
        if name in keys:
            raise ConfigError(f"{text}: {name} is not a setting of a row: methods and --seeds and --out say it")
    return Entry(label_of(method, keys), {"method": method} | keys)


def label_of(method: str, keys: dict[str, Any]) -> str:
    return " ".join([method, *(f"{name}={value}" for name, value in keys.items() if name != "method")])


def check(configs: Iterable[Config]) -> None:
    """What is wrong with one of them and shows without its data does so before another is trained."""
    for config in configs:
        if config.evaluation == "off":
            raise ConfigError("evaluation=off leaves a comparison nothing to show: choose central or federated")
        check_engine(config)
        nearest.check(config, choose_exchange(config, config.build_method()))


def compare(
    rows: Sequence[Entry],
    seeds: Sequence[int],
    common: dict[str, Any],
    start: Callable[[Config, str], Result],
    parallel: int = 1,
    say: Say = lambda config, status: None,
) -> Comparison:
    """Run every row with every seed, seed by seed; one that fails does not keep the others from running.

    One at a time they go through `start`, in this process, and `say` hears of failures; of several at once it hears
    how each ended.
    """
    names = _folder_names(rows, common)
    folder = Path(common["out"]) if "out" in common else new_folder("compare")
    configs = [
        (row, configure(**(common | row.keys | {"seed": seed, "out": str(folder / f"{name}-seed{seed}")})))
        for seed in seeds
        for row, name in zip(rows, names, strict=True)
    ]
    whole = True
    if parallel > 1:
        whole = run_all([config for _, config in configs], parallel, say)
    else:
        for number, (row, config) in enumerate(configs, start=1):
            title = f"{number} of {len(configs)}: {row.label}, seed {config.seed}"
            try:
                if not is_done(config) and start(config, title).status != "finished":
                    whole = False
                    break
            except UserError as error:  # the others go on
                say(config, f"failed: {error}")
    results: dict[str, list[Result]] = {row.label: [] for row in rows}
    for row, config in configs:
        if (result := found_in_place(config)) is not None:
            results[row.label].append(result)
    if whole and not any(results.values()):
        raise RunError("none of the runs could start, each for the reason above")
    return Comparison(folder, list(seeds), results, whole)


@dataclass(frozen=True)
class Comparison:
    folder: Path
    seeds: list[int]
    results: dict[str, list[Result]]
    whole: bool = True  # False: it was interrupted

    @property
    def finished(self) -> int:
        return sum(result.status == "finished" for results in self.results.values() for result in results)

    def rows(self) -> list[dict[str, Any]]:
        """Per method: final accuracy of each domain, and final, best and last5 of AVG, as (mean, std) over seeds; where
        test sets have more of some classes, also the mean of the classes' own accuracies.
        """
        found = []
        for label, results in self.results.items():
            done = [result for result in results if result.accuracy and result.status == "finished"]
            if not done:
                continue
            tested = {  # of models at home, who never took part has none
                key: _spread([result.accuracy[key] for result in done])
                for key in done[0].accuracy
                if all(key in result.accuracy for result in done)
            }
            row: dict[str, Any] = {"method": label, "seeds": [result.config.seed for result in done]}
            row |= {AVG: tested.pop(AVG), "domains": tested}  # apart: a domain may have any name
            for name in ("best", "last5"):
                row[name] = _spread([headline(result.history)[name] for result in done])
            if of_classes := [score["final"] for result in done if (score := headline(result.history, AVG, CLASSES))]:
                row[CLASSES] = _spread(of_classes)
            found.append(row)
        if not any(differs(row[CLASSES][0], row[AVG][0]) for row in found if CLASSES in row):
            found = [{key: value for key, value in row.items() if key != CLASSES} for row in found]  # all classes alike
        return found

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Titles, the domains of any row before the means over them, and a line for each row."""
        rows = self.rows()
        domains = list(dict.fromkeys(name for row in rows for name in row["domains"]))
        means = [key for key in TITLES if any(key in row for row in rows)]
        lines = []
        for row in rows:
            few = len(row["seeds"]) < len(self.seeds)
            name = f"{row['method']} ({len(row['seeds'])} of {len(self.seeds)} seeds)" if few else row["method"]
            values = [row["domains"].get(domain) for domain in domains] + [row.get(key) for key in means]
            lines.append([name, *map(show, values)])
        return ["method", *domains, *(TITLES[key] for key in means)], lines

    def markdown(self) -> str:
        titles, lines = self.cells()
        if not lines:
            return "no run is finished and has an evaluated round\n"
        rule = "|---" + "|---:" * (len(titles) - 1) + "|"
        titled, *below = ("| " + " | ".join(line) + " |" for line in (titles, *lines))
        return "\n".join([titled, rule, *below]) + "\n"

    def save(self) -> None:
        write_atomically(self.folder / "comparison.md", self.markdown())
        write_atomically(self.folder / "comparison.json", json.dumps(self.rows(), indent=2) + "\n")
        folders = [result.folder for results in self.results.values() for result in results if result.history]
        if folders:
            write_report(folders, self.folder / "report.html", tsne=False)
        first = {label: results[0].folder for label, results in self.results.items() if results and results[0].accuracy}
        if len(first) > 1:
            draw_curves(list(first.values()), self.folder / "curves.png", list(first))


TITLES = {AVG: "AVG final", "best": "AVG best", "last5": "AVG last five", CLASSES: "mean of classes, final"}


def show(spread: tuple[float, float | None] | None) -> str:
    if spread is None:
        return "–"
    mean, std = spread
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; a single seed has none."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def _folder_names(rows: Sequence[Entry], common: dict[str, Any]) -> list[str]:
    """The labels without what a file system may not like, and where that leaves two alike, told apart by a hash."""
    names = ["".join(letter if letter.isalnum() else "-" for letter in row.label).strip("-") for row in rows]
    return [
        name if names.count(name) == 1 else f"{name}-{fingerprint(configure(**(common | row.keys)))}"
        for row, name in zip(rows, names, strict=True)
    ]


def table(comparison: Comparison) -> Any:
    from rich.markup import escape
    from rich.table import Table

    titles, lines = comparison.cells()
    seeds = ", ".join(map(str, comparison.seeds))
    found = Table(title=f"accuracy in %, final round unless named; mean ± std over seeds {seeds}")
    found.add_column("method", style="bold", overflow="fold", min_width=12)  # broken rather than cut short
    for title in titles[1:]:
        found.add_column(escape(title), justify="right", style="green" if title == TITLES[AVG] else "")
    for line in lines:
        found.add_row(*map(escape, line))
    return found
