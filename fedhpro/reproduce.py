"""The paper's tables and figures: experiments/*.toml as matrices of runs, and what was measured beside what is printed.

An experiment is a table of any rows and columns. A row has keys of a run (a method and its settings); a setting has
keys too (data, scenario) and the columns that are read from its runs. A cell is read from the runs of its row, its
setting and the seeds. docs/reproduce.md explains the files.
"""

from __future__ import annotations

import itertools
import re
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from . import config as configuration
from .config import Config, configure
from .data.catalog import CATALOG
from .data.sources import how_to_get, stored
from .data.sources import load as load_data
from .errors import ConfigError, DataError, RunError, UserError
from .estimate import EMBEDDED
from .evaluation import AVG
from .matrix import placed
from .measures import check, measured, title
from .report.reading import Run, read_run

FOLDER = Path(__file__).parent / "experiments"
Keys = dict[str, Any]


class Changes(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = ""
    keys: Keys = {}
    columns: list[str] = []
    x: float | None = None


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    keys: Keys = {}
    x: float | None = None  # where the part stands in a sweep
    quick: Changes | bool = True  # with --quick: whether it stays, and what changes then

    @property
    def changes(self) -> Keys:
        return self.quick.model_dump(exclude_unset=True) if isinstance(self.quick, Changes) else {}


class Setting(Part):
    columns: list[str] = [AVG]


class Row(Part):
    line: str = ""  # the sweep that it belongs to, where a figure has several
    paper: list[float | None] = []  # for each column of each setting, in their order

    @field_validator("paper", mode="before")
    @classmethod
    def nothing_is_an_empty_string(cls, numbers: Any) -> Any:
        return [None if number == "" else number for number in numbers] if isinstance(numbers, list) else numbers


class Experiment(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    title: str
    about: str = ""
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)
    quick_seeds: list[int] = Field(default=[0], min_length=1)
    keys: Keys = {}
    figure: Literal["curves", "L_GM", "sweep", "tsne", "bars"] | None = None
    pairs: list[tuple[str, str]] | None = None  # rows to compare in words; none: FedHPro with its control and row 1
    settings: list[Setting] = Field(min_length=1)
    rows: list[Row] = Field(min_length=1)
    stand_in: str = ""  # with --quick: what it was run on instead

    def columns(self) -> list[tuple[Setting, str]]:
        return [(setting, column) for setting in self.settings for column in setting.columns]

    def config(self, row: Row, setting: Setting, seed: int) -> Config:
        return configure(**(self.keys | setting.keys | row.keys | {"seed": seed}))

    def compared(self) -> list[tuple[Row, Row]]:
        rows = {row.name: row for row in self.rows}
        if self.pairs is not None:
            return [(rows[a], rows[b]) for a, b in self.pairs if a in rows and b in rows]
        subject = next((r for r in self.rows if r.keys.get("method") == "fedhpro" and r.keys.get("M") != 0), None)
        if subject is None:
            return []
        control = [row for row in self.rows if row.keys == subject.keys | {"M": 0}]
        base = next((row for row in self.rows if row.keys == {"method": "fedavg"}), self.rows[0])
        return [(subject, other) for other in [*control, base] if other is not subject]


def names() -> list[str]:
    body = ("table", "figure")  # before the appendix
    return sorted((path.stem for path in FOLDER.glob("*.toml")), key=lambda name: (not name.startswith(body), name))


def load(name: str) -> Experiment:
    """An experiment of the paper, or one of your own in a TOML file."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        if path.parent == FOLDER:
            raise ConfigError(f"there is no experiment {name!r}{configuration.closest(name, names())}")
        raise ConfigError(f"there is no file {path}")
    try:
        found = Experiment.model_validate({"name": path.stem} | tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for parts in (found.settings, found.rows):
        if len({part.name for part in parts}) < len(parts):
            raise ConfigError(f"{path}: two rows or two settings have the same name")
    known = [row.name for row in found.rows]
    for name in itertools.chain(*(found.pairs or ())):
        if name not in known:
            raise ConfigError(f"{path}: pairs: there is no row {name!r}{configuration.closest(name, known)}")
    for row in found.rows:
        if len(row.paper) not in (0, len(found.columns())):
            raise ConfigError(f"{path}: {row.name} has {len(row.paper)} numbers for {len(found.columns())} columns")
    return found


# --quick: the same table on embedded data, with what remains of a setting after its sizes are gone

STAND_INS: dict[str, Keys] = {
    "image": {"data": "digits-lite", "rounds": 6, "local_steps": 6, "evaluate_every": 2, "batch_size": 32}
    | {"model": "resnet10", "width": 16, "stem": "7x7", "lr": 0.03},
    "text": {"data": "docs-lite", "rounds": 4, "local_steps": 3, "batch_size": 32, "model": "textcnn"}
    | {"optimizer": "adam", "lr": 0.01},
}
SIZES: dict[str, Keys] = {
    "domains": {"clients_per_domain": 1, "samples_per_client": 200},
    "nid1": {"clients": 5},
    "nid2": {"nid2_clients": 3},
    "ag-nid": {"clients": 10},
}
# what a stand-in has of its own; every other key of an experiment stays
SCALED = {"preset", "data", "model", "width", "dim", "stem", "augment", "rounds", "local_epochs", "local_steps", "lr"}
SCALED |= {"batch_size", "optimizer", "weight_decay", "clients", "participation", "min_samples", "evaluate_every"}
DOMAINS = {"usps": "uci", "svhn": "mnist-m", "caltech": "mnist", "webcam": "uci", "amazon": "mnist-m", "dslr": "syn"}


def quick(experiment: Experiment) -> Experiment:
    """What runs in minutes: its numbers show that everything works, and nothing about the paper's."""
    numbers = {row.name: dict(zip(_places(experiment), row.paper, strict=False)) for row in experiment.rows}
    settings, data = [], dict[str, str]()
    for old in experiment.settings:
        if old.quick is False:
            continue
        full = experiment.config(experiment.rows[0], old, 0)
        small = STAND_INS[CATALOG[full.data].kind if full.data in CATALOG else "image"]
        mixed = {"model": full.model} if full.model.startswith("htfe") else {}
        kept = {name: value for name, value in (experiment.keys | old.keys).items() if name not in SCALED}
        keys = small | SIZES.get(full.scenario, {}) | mixed | kept | old.changes.get("keys", {})
        columns = old.changes.get("columns", old.columns)
        settings.append((old, old.model_copy(update=old.changes | {"keys": keys, "columns": columns})))
        data[full.data] = keys["data"]
    if not settings:
        raise ConfigError(f"{experiment.name} has no setting that stays with --quick")
    rows = []
    for row in experiment.rows:
        if row.quick is not False:
            keys = row.keys | row.changes.get("keys", {})
            paper = [numbers[row.name].get((old.name, column)) for old, new in settings for column in new.columns]
            rows.append(row.model_copy(update=row.changes | {"keys": keys, "paper": paper}))
    named = [new.model_copy(update={"columns": [DOMAINS.get(c, c) for c in new.columns]}) for _, new in settings]
    instead = "; ".join(f"{new} in place of {CATALOG[old].title}" for old, new in data.items() if old in CATALOG)
    stand_in = (
        f"QUICK, a stand-in: {instead or 'the same data'}; few clients, few and short rounds. "
        "These numbers show that everything works; they say nothing about the paper's."
    )
    update = {"keys": {}, "seeds": experiment.quick_seeds, "settings": named, "rows": rows, "stand_in": stand_in}
    return experiment.model_copy(update=update)


def _places(experiment: Experiment) -> list[tuple[str, str]]:
    return [(setting.name, column) for setting, column in experiment.columns()]


def only(experiment: Experiment, wanted: Sequence[str]) -> Experiment:
    """What is left of a table with the settings and rows that are named; where none of a kind is named, all stay."""
    names = {kind: [part.name for part in getattr(experiment, kind)] for kind in ("settings", "rows")}
    kept = dict[str, set[str]]()
    for text in wanted:
        found = {kind: _named(text, there) for kind, there in names.items()}
        if not any(found.values()):
            known = "; ".join(itertools.chain(*names.values()))
            raise ConfigError(f"{experiment.name} has no setting and no row {text!r}. It has: {known}")
        kept |= {kind: kept.get(kind, set()).union(more) for kind, more in found.items() if more}
    left = {kind: kept.get(kind, set(there)) for kind, there in names.items()}
    settings = [each for each in experiment.settings if each.name in left["settings"]]
    stays = [setting in left["settings"] for setting, _ in _places(experiment)]
    rows = [
        row.model_copy(update={"paper": list(itertools.compress(row.paper, stays))})
        for row in experiment.rows
        if row.name in left["rows"]
    ]
    return experiment.model_copy(update={"settings": settings, "rows": rows})


def _named(text: str, names: Sequence[str]) -> list[str]:
    """Those of this name; else with these words in it, so that rho=10 is not rho=100; else with these letters."""
    escaped = re.escape(text)
    for pattern in (rf"^{escaped}$", rf"(?<!\w){escaped}(?!\w)", escaped):
        if found := [name for name in names if text and re.search(pattern, name, re.IGNORECASE)]:
            return found
    return []


# The matrix


@dataclass(frozen=True)
class Plan:
    """The runs of an experiment, in their folders; `missing` says for each dataset that is not there how to get it."""

    experiment: Experiment
    configs: dict[tuple[str, str, int], Config]  # row, setting, seed
    missing: dict[str, str] = field(default_factory=dict)

    def runnable(self) -> list[Config]:
        return [config for config in self.configs.values() if config.data not in self.missing]


def plan(experiment: Experiment, store: Path, seeds: Sequence[int] = (), keys: Keys | None = None) -> Plan:
    """All configs are checked here, before anything runs; `keys` win over those of the experiment, and are told."""
    seeds = seeds or experiment.seeds
    if keys:
        _check_that_runs_stay_apart(experiment, seeds[0], keys)
        experiment = experiment.model_copy(update={"title": f"{experiment.title} ({_told(keys)})"})
    configs = {
        (row.name, setting.name, seed): placed(_config(experiment, row, setting, seed, keys or {}), store)
        for seed in seeds
        for setting in experiment.settings
        for row in experiment.rows
    }
    for setting in experiment.settings:
        tested = {(c.data, c.evaluation): c for (_, name, _), c in configs.items() if name == setting.name}
        known = [_domains(config) for config in tested.values()]
        domains = list(dict.fromkeys(itertools.chain(*known))) if all(known) else []
        try:
            for column in setting.columns:
                check(column, domains)
        except ConfigError as error:
            raise ConfigError(f"{experiment.name}, {setting.name}: {error}") from None
    gone = {data: text for data in {c.data: None for c in configs.values()} if (text := _missing(data))}
    return Plan(experiment, configs, gone)


def _config(experiment: Experiment, row: Row, setting: Setting, seed: int, keys: Keys) -> Config:
    given = {name: value for name, value in keys.items() if name != "preset"}
    try:
        if "preset" in keys and "preset" not in setting.keys | row.keys:
            given = _training(keys["preset"], experiment) | given
        return experiment.config(row, setting, seed).replace(**given)
    except ConfigError as error:
        raise ConfigError(f"{experiment.name}, {row.name}, {setting.name}: {error}") from None


def _training(preset: str, experiment: Experiment) -> Keys:
    """A preset without its method, which the rows of a table say, and without what tells rows or settings apart."""
    left_out = {"method", *configuration.method_keys(configure(preset=preset).method)}
    for parts in (experiment.settings, experiment.rows):
        every = {name for part in parts for name in part.keys}
        left_out |= {name for name in every if any(part.keys.get(name) != parts[0].keys.get(name) for part in parts)}
    return {name: value for name, value in configuration.PRESETS[preset].items() if name not in left_out}


def _check_that_runs_stay_apart(experiment: Experiment, seed: int, keys: Keys) -> None:
    """What the keys make one and the same run would stand in the table under names that say otherwise."""
    seen = dict[str, tuple[str, str]]()
    for setting, row in itertools.product(experiment.settings, experiment.rows):
        before, after = (_looked_at(_config(experiment, row, setting, seed, given)) for given in ({}, keys))
        name = f"{row.name}, {setting.name}"
        first, of_first = seen.setdefault(after, (name, before))
        if of_first != before:
            raise ConfigError(f"{experiment.name}: {_told(keys)} would make one run of [{first}] and [{name}]")


def _looked_at(config: Config) -> str:
    ignored = configuration.unused(config)
    return repr({name: value for name, value in config.flat().items() if name not in ignored})


def _told(keys: Keys) -> str:
    return ", ".join(f"{name}={value}" for name, value in keys.items())


def _domains(config: Config) -> list[str]:
    """The names of its test sets, where they are known without its data; federated tests have other names."""
    if config.evaluation != "central":
        return []
    if config.data in CATALOG:
        return [part.name for part in CATALOG[config.data].parts]
    return [domain.name for domain in load_data(config.data).domains] if config.data in EMBEDDED else []


def _missing(data: str) -> str:
    try:
        return how_to_get(CATALOG[data]) if data in CATALOG and stored(CATALOG[data]) is None else ""
    except DataError as error:  # there, but damaged
        return str(error)


# What came out


@dataclass(frozen=True)
class Cell:
    """A column of a row: the values by seed, and for accuracies those of the best round and of the last five."""

    row: str
    setting: str
    column: str
    final: dict[int, float]
    best: dict[int, float]
    last5: dict[int, float]
    paper: float | None = None
    runs: int = 0  # that are there

    @property
    def mean(self) -> float | None:
        """None where a seed has no value, as one that never reached an accuracy."""
        return statistics.fmean(self.final.values()) if self.final and len(self.final) == self.runs else None


@dataclass(frozen=True)
class Outcome:
    experiment: Experiment
    runs: dict[tuple[str, str, int], Run]
    cells: list[Cell]
    words: list[str]  # paired comparisons
    problems: list[str]


def outcome(plan: Plan) -> Outcome:
    """Read from the run folders; one that is not there, unfinished or damaged is named and left out."""
    runs, problems = dict[tuple[str, str, int], Run](), list(plan.missing.values())
    for place, config in plan.configs.items():
        if config.data in plan.missing:
            continue
        where = f"{place[0]}, {place[1]}, seed {place[2]}"
        try:
            run = read_run(Path(config.out))
            if run.history[-1].round < config.rounds:
                raise RunError(f"{config.out} has {run.history[-1].round} of {config.rounds} rounds")
            if run.status != "finished":  # in its last rounds nothing changed any more
                raise RunError(f"{config.out} is not finished")
            runs[place] = run
        except RunError as error:
            again = "; where the folder is deleted, it is run again" if Path(config.out).exists() else ""
            problems.append(f"{where}: {error}{again}")
    cells = list(_cells(plan.experiment, runs, problems))
    return Outcome(plan.experiment, runs, cells, list(_words(plan.experiment, cells)), problems)


def _cells(experiment: Experiment, runs: dict[tuple[str, str, int], Run], problems: list[str]) -> Iterator[Cell]:
    plain = {row.name: row.keys["method"] for row in experiment.rows if row.keys.keys() == {"method"}}
    for row in experiment.rows:
        paper = row.paper or [None] * len(experiment.columns())
        for (setting, column), number in zip(experiment.columns(), paper, strict=True):
            own = {seed: run for (r, s, seed), run in runs.items() if (r, s) == (row.name, setting.name)}
            cell = Cell(row.name, setting.name, column, {}, {}, {}, number, len(own))
            for seed, run in own.items():
                peers = {
                    plain[r]: peer for (r, s, n), peer in runs.items() if (s, n) == (setting.name, seed) and r in plain
                }
                try:
                    values = measured(column, run, peers)
                except UserError as error:
                    problems.append(f"{row.name}, {setting.name}, seed {seed}: {title(column)}: {error}")
                    continue
                for name, value in values.items():
                    getattr(cell, name)[seed] = value
            yield cell


def _words(experiment: Experiment, cells: Sequence[Cell]) -> Iterator[str]:
    """Of every setting with accuracies, its AVG."""
    by_place = {(cell.row, cell.setting, cell.column): cell for cell in cells}
    for setting in experiment.settings:
        if AVG not in setting.columns:
            continue
        for one, other in experiment.compared():
            a, b = (by_place[row.name, setting.name, AVG] for row in (one, other))
            if a.final.keys() & b.final.keys():
                yield f"{setting.name}: {in_words(a, b)}"


def in_words(a: Cell, b: Cell) -> str:
    """Whether a difference can be seen, paired over the seeds that both have (Student's t, two-sided)."""
    from scipy.stats import t

    seeds = sorted(a.final.keys() & b.final.keys())
    gaps = [a.final[seed] - b.final[seed] for seed in seeds]
    mean = statistics.fmean(gaps)
    verb = "beats" if mean > 0 else "is behind" if mean < 0 else "is level with"
    printed = f" (the paper: by {a.paper - b.paper:+.2f})" if a.paper is not None and b.paper is not None else ""
    if len(gaps) < 2:
        return f"{a.row} {verb} {b.row} by {abs(mean):.2f} with one seed{printed}: that can be chance."
    deviation = statistics.stdev(gaps)
    text = f"{a.row} {verb} {b.row} by {abs(mean):.2f} ± {deviation:.2f} over {len(gaps)} seeds{printed}"
    if deviation == 0:
        return f"{text}: the same gap with each seed."
    p = 2 * float(t.sf(abs(mean) / (deviation / len(gaps) ** 0.5), len(gaps) - 1))
    seen = "more than chance would do" if p < 0.05 else "no difference can be seen"
    return f"{text}: {seen} (paired t-test, p = {p:.2g})."
