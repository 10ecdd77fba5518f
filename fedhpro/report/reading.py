"""Run folders as a report reads them: checked, so that a damaged one is named and left out, and put into groups."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from ..card import OF_THE_MACHINE, defaults
from ..errors import RunError
from ..evaluation import AVG, headline

Model = TypeVar("Model", bound=BaseModel)
Scores = dict[str, FiniteFloat]
Count = Annotated[int, Field(ge=0, le=10**18)]


class Settings(BaseModel):
    """config.toml, of this or another version: only what every run has had is asked for."""

    model_config = ConfigDict(extra="allow")
    method: str
    data: str
    seed: int
    rounds: int
    evaluation: str = "central"
    split: str = "test"


class Refusal(BaseModel):
    client: int
    reason: str


class Clipping(BaseModel):
    """What a client's model and, on average, its reports were multiplied by."""

    client: int
    model: FiniteFloat
    reports: FiniteFloat


class Federated(BaseModel):
    clients: Scores
    mean: FiniteFloat


class Round(BaseModel):
    """A line of metrics.jsonl."""

    round: int = Field(ge=1, le=10**9)
    clients: list[int]
    aggregated: bool
    not_aggregated: str = ""
    refused: list[Refusal]
    bytes_down: Count
    bytes_up: Count
    loss: dict[str, float] = {}
    server: dict[str, float] = {}
    privacy: dict[str, float] = {}
    accuracy: Scores | None = None
    test_loss: dict[str, float] = {}
    balanced: Scores | None = None
    heads: dict[str, Scores] = {}
    own_labels: FiniteFloat | None = None
    federated: Federated | None = None
    restarted: list[dict[str, Any]] = []
    untested: list[dict[str, Any]] = []
    hostile: list[int] = []
    left_out: list[int] = []
    clipped: list[Clipping] = []

    @model_validator(mode="after")
    def has_a_mean(self) -> Round:
        if self.accuracy is not None and AVG not in self.accuracy:
            raise ValueError(f"accuracy has no {AVG}")
        return self


class Timing(BaseModel):
    round: int = Field(ge=1, le=10**9)
    seconds: FiniteFloat


class Ending(BaseModel):
    """result.json."""

    status: str
    rounds: int
    versions: dict[str, str] = {}
    notes: list[str] = []


class SentTensor(BaseModel):
    tensor: str
    direction: str
    shape: list[int]
    dtype: str
    bytes: int


class Costs(BaseModel):
    seconds: Scores = {}
    peak_mb: Scores = {}
    flops: dict[str, float | str] = {}
    tensors: list[SentTensor] = []


class Holder(BaseModel):
    domain: str
    samples: dict[int, Count]


class Holdings(BaseModel):
    classes: list[str]
    clients: list[Holder]

    @model_validator(mode="after")
    def classes_have_names(self) -> Holdings:
        if any(not 0 <= c < len(self.classes) for client in self.clients for c in client.samples):
            raise ValueError("a class has no name")
        return self


class Confusion(BaseModel):
    round: int
    classes: list[str]
    domains: dict[str, list[list[Count]]] = Field(min_length=1)

    @model_validator(mode="after")
    def is_square(self) -> Confusion:
        size = len(self.classes)
        if any(len(rows) != size or any(len(row) != size for row in rows) for rows in self.domains.values()):
            raise ValueError("a matrix has not as many rows and columns as there are classes")
        return self


@dataclass(frozen=True)
class Run:
    folder: Path
    settings: Settings
    history: list[Round]
    timings: list[Timing]
    ending: Ending | None
    costs: Costs | None
    holdings: Holdings | None
    confusion: Confusion | None

    @property
    def status(self) -> str:
        """result.json is of an earlier stop where the run was resumed since."""
        last = self.history[-1].round
        short = last < self.settings.rounds  # of what was asked for since
        if self.ending is None or self.ending.rounds != last or (self.ending.status == "finished" and short):
            return f"round {last} of {self.settings.rounds}"
        return self.ending.status

    @cached_property
    def evaluated(self) -> list[Round]:
        return [record for record in self.history if record.accuracy is not None]

    def headline(self, key: str) -> dict[str, Any]:
        return headline(
            [{"round": r.round, "accuracy": r.accuracy} for r in self.evaluated if key in (r.accuracy or {})], key
        )

    def values(self, group: str, key: str) -> dict[int, float]:
        """Of each round that has it: accuracy, test_loss, loss or server, by the name of the domain or the term.

        A loss term of 0 was not there in that round: a vote was against it, or what it aligns with did not exist yet.
        """
        found = ((record.round, (getattr(record, group) or {}).get(key)) for record in self.history)
        return {number: value for number, value in found if value is not None and (value or group != "loss")}

    @property
    def config(self) -> dict[str, Any]:
        return self.settings.model_dump()


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed."""

    number: int
    label: str
    runs: list[Run]

    @property
    def first(self) -> Run:
        return self.runs[0]


def read_run(folder: Path) -> Run:
    """RunError, with a sentence that names the file, where the folder has no round to show or cannot be trusted."""
    if not folder.is_dir():
        raise RunError(f"{folder}: there is no such run folder")
    if not (folder / "config.toml").is_file():
        raise RunError(f"{folder} is not a run folder: it has no config.toml")
    try:
        settings = Settings.model_validate(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise RunError(f"{folder / 'config.toml'} cannot be read: {error}") from None
    except ValidationError as error:
        raise RunError(_sentence(folder / "config.toml", error)) from None
    history = _lines(folder / "metrics.jsonl", Round)
    if not history:
        raise RunError(f"{folder} has no finished round yet")
    return Run(
        folder,
        settings,
        history,
        _lines(folder / "timings.jsonl", Timing),
        _optional(folder / "result.json", Ending),
        _optional(folder / "costs.json", Costs),
        _optional(folder / "holdings.json", Holdings),
        _optional(folder / "confusion.json", Confusion),
    )


def read_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """The runs that can be shown, and a sentence for each that cannot.

    A folder of run folders stands for them all, as does one that has them under runs/, which sweep and reproduce make.
    """
    named, runs, problems = list[Path](), list[Run](), list[str]()
    for folder in folders:
        inside = sorted(path.parent for way in ("*", "runs/*") for path in folder.glob(f"{way}/config.toml"))
        named += inside if inside and not (folder / "config.toml").exists() else [folder]
    for path in {path.absolute(): path for path in named}.values():  # a run named twice is one
        try:
            runs.append(read_run(path))
        except RunError as error:
            problems.append(str(error))
    return runs, problems


def grouped(runs: Sequence[Run]) -> list[Group]:
    """One group for each setting, in the order of the runs, named by its method and what tells it from the others.

    A second run of a setting and seed is no further seed: it has a group of its own, named by its folder.
    """
    complete = [defaults(run.config) | run.config for run in runs]  # an older run lacks the keys that came later
    configs = [{k: v for k, v in config.items() if k not in OF_THE_MACHINE | {"seed"}} for config in complete]
    usual = {key: Counter(config.get(key) for config in configs).most_common(1)[0][0] for key in WHAT}
    labels: dict[tuple[str, int], list[Run]] = {}
    for run, config in zip(runs, configs, strict=True):
        rivals = [other for other in configs if other["method"] == config["method"]]
        differs = [key for key in config if key not in WHAT and any(other.get(key) != config[key] for other in rivals)]
        differs += [key for key in WHAT if config.get(key) != usual[key]]
        label = " ".join([run.settings.method, *(f"{key}={config.get(key)}" for key in differs)])
        last = run.history[-1].round
        label += f" ({last} of {run.settings.rounds} rounds)" if last < run.settings.rounds else ""
        if any(run.settings.seed == other.settings.seed for other in labels.get((label, last), [])):
            label += f" in {run.folder}"
        labels.setdefault((label, last), []).append(run)
    return [Group(number, label, found) for number, ((label, _), found) in enumerate(labels.items())]


WHAT = ("data", "scenario", "model", "exchange", "evaluation", "split")  # named where most runs have another


def _lines(path: Path, model: type[Model]) -> list[Model]:
    """A last line that is still being written is left out; any other that cannot be read is a damaged file."""
    if not path.exists():
        return []
    lines, found = _read(path).splitlines(), list[Model]()
    for number, line in enumerate(lines, start=1):
        try:
            found.append(model.model_validate_json(line))
        except ValidationError as error:
            if number == len(lines) and error.errors()[0]["type"] == "json_invalid":
                break
            raise RunError(_sentence(path, error, f", line {number}")) from None
    return found


def _optional(path: Path, model: type[Model]) -> Model | None:
    try:
        return model.model_validate_json(_read(path)) if path.exists() else None
    except ValidationError as error:
        raise RunError(_sentence(path, error)) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None


def _sentence(path: Path, error: ValidationError, where: str = "") -> str:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    reason = f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}" if name else first["msg"]
    return f"{path}{where} is damaged or of another version of fedhpro: {reason}"
