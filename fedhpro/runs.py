"""The run folder: config in, metrics, checkpoints and a model out; and how a run starts, ends and goes on.

config.toml              every key, as validated
holdings.png .json       who holds what
metrics.jsonl            one record a round; the same bytes for the same config on CPU
timings.jsonl            seconds a round, by phase, which are not
checkpoints/             the last few rounds: tensors, and JSON (config, versions) that makes them count
memories/                what clients keep between their rounds, where they do: a file for each client and round
model.safetensors .json  the global model and how to use it (of texts: tokenizer.json too)
server.safetensors       what the method keeps at the server (FedHPro: the hyper-prototypes S)
costs.json               bytes by tensor, FLOPs, seconds by phase, peak memory
confusion.json           of the last evaluation, per domain
result.json curves.png MODEL_CARD.md report.html
tensorboard/ wandb/      of trackers that were asked for, and mlflow.id wandb.id: which run of theirs this is
lock                     who writes to this folder, while somebody does
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from . import __version__, accounting
from . import config as configuration
from .callbacks import Callback
from .config import Config, configure
from .data.sources import SITES, Source
from .errors import ConfigError, RunError
from .evaluation import headline
from .federation import Federation, Record
from .files import (
    LOCK,
    DamagedFile,
    checksum,
    load_tensors,
    locked,
    save_tensors,
    sealed,
    sync_folder,
    unsealed,
    write_atomically,
)
from .memories import ClientMemories, check_disk, generations_of
from .methods.base import Tensors
from .training import copy_into, model_tensors

if TYPE_CHECKING:
    from .report.picture import Picture

MEMORIES = "memories"
MAY_CHANGE = {"rounds", "workers", "evaluate_every", "checkpoint_every", "keep_checkpoints", "memory_budget"}
MAY_CHANGE |= {"round_deadline", "join_deadline"}
OF_NO_CONSEQUENCE = MAY_CHANGE - {"rounds", "evaluate_every"}  # for the numbers of a run
CHECKPOINT = re.compile(r"round-[0-9]+\.(json|safetensors)")
VERSIONS = {"fedhpro": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
log = logging.getLogger("fedhpro")


@dataclass
class Result:
    """What a run came to. `history` has a record for each round; accuracies are per cent."""

    folder: Path
    config: Config
    history: list[Record]
    status: str  # running, finished, interrupted, failed
    costs: Record = field(default_factory=dict)  # seconds by phase, peak memory, FLOPs; there when the run has ended
    notes: list[str] = field(default_factory=list)  # what was wrong with the folder when the run was gone on with

    @property
    def accuracy(self) -> dict[str, float]:
        """Of the last evaluated round: per domain, and AVG, their unweighted mean."""
        evaluated = [record["accuracy"] for record in self.history if "accuracy" in record]
        return dict(evaluated[-1]) if evaluated else {}

    @property
    def headline(self) -> dict[str, Any]:
        """AVG accuracy: final round, best round, mean of the last five evaluations."""
        return headline(self.history)

    def table(self) -> Any:
        """A row for each evaluated round, accuracies in per cent: a pandas DataFrame, or a list where pandas is not."""
        rows = [{"round": record["round"]} | record["accuracy"] for record in self.history if "accuracy" in record]
        try:
            from pandas import DataFrame
        except ImportError:
            return rows
        return DataFrame(rows).set_index("round") if rows else DataFrame()

    def plot(self) -> Picture:
        """Accuracy, loss terms and L_GM over the rounds, as a matplotlib figure."""
        from .report.curves import plot_curves

        return plot_curves([self.folder])

    def tsne(self, samples: int = 400, source: Source | None = None) -> Picture:
        """Test features, class means and what the server keeps, in the plane. `source`: data handed over in Python."""
        from .report.embedding import embed, figure_of

        return figure_of(embed(self.folder, source, samples))


def run(
    config: Config | Mapping[str, Any] | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    source: Source | None = None,
    grid: Any = None,
    **keys: Any,
) -> Result:
    """Train, as `fedhpro run` does. Keys may come as a Config, a mapping or keyword arguments. grid: see Federation."""
    if isinstance(config, Config):
        config = config.replace(**keys) if keys else config
    else:
        config = configure(**(dict(config or {}) | keys))
    if source is not None:
        if not isinstance(source, Source):
            raise ConfigError(
                f"source takes what from_folder, from_csv or from_tensors gives, not {source!r:.40}: a name or a path "
                "goes into data, as in data='folder:PATH'"
            )
        config = config.model_copy(update={"data": f"python:{source.name}"})  # so that no record claims other data
    federation = Federation(config, source, grid)  # shows what is wrong with the config, before there is any file
    check_disk(*federation.memory_need(), Path("runs" if config.out == "auto" else config.out, MEMORIES))
    with RunFolder.create(config) as folder:
        folder.memories.elsewhere = config.data == SITES
        federation.memories = folder.memories
        folder.draw_data(federation)
        return _go(federation, folder, [], callbacks)


def resume(
    path: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    source: Source | None = None,
    grid: Any = None,
    **keys: Any,
) -> Result:
    """Go on from the newest sound checkpoint, to the metrics of an uninterrupted run. `rounds` may be raised."""
    folder = RunFolder.open(Path(path))
    with one_sentence(folder.path), locked(folder.path):
        config = configuration.load(folder.path / "config.toml")
        folder.memories.elsewhere = config.data == SITES
        records = folder.records()
        tensors, meta = folder.newest_checkpoint(up_to=records[-1]["round"] if records else 0)
        if not meta:
            folder.check_start(config.checkpoint_every)
        before, config = meta.get("config", _as_json(config)), config.replace(**keys)
        check_changes(before, _as_json(config))
        if config.data == SITES and grid is None:
            raise ConfigError(f"{folder.path} is the run of a deployment: it goes on when its app is started again")
        if config.rounds < meta.get("round", 0):
            raise ConfigError(f"rounds={config.rounds}: {meta['round']} rounds of {folder.path} are done already")
        federation = Federation(config, source, grid)
        federation.memories = folder.memories
        check_disk(*federation.memory_need(), folder.path / MEMORIES)
        if tensors:
            federation.restore(tensors, meta)
            folder.compare_versions(meta["versions"])
        for note in folder.notes:
            log.warning(note)
        if federation.privacy is not None and federation.privacy.seed is None:
            federation.repeated = folder.count_repeated(federation.round)
            federation.privacy.check_budget(federation)
        history = folder.rewind(federation.round)
        folder.draw_data(federation)
        if config.to_toml() != (folder.path / "config.toml").read_text(encoding="utf-8"):
            write_atomically(folder.path / "config.toml", config.to_toml())
        return _go(federation, folder, history, callbacks)


def check_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """What may be another than when the run was saved, be it given now or edited in config.toml."""
    changed = sorted(name for name in now if name in before and now[name] != before[name])
    if forbidden := [name for name in changed if name not in MAY_CHANGE]:
        name = forbidden[0]
        raise ConfigError(
            f"{name} cannot change in the middle of a run: it was {before[name]}, and is {now[name]} now; "
            f"what can change is {', '.join(sorted(MAY_CHANGE))}"
        )
    if "rounds" in changed and now["lr_schedule"] == "cosine":
        raise ConfigError("rounds cannot change in the middle of a run: the cosine schedule of lr depends on it")


def _as_json(config: Config) -> Record:
    return dict(json.loads(json.dumps(config.flat())))


def run_or_resume(config: Config, *, callbacks: Sequence[Callback] = ()) -> Result:
    """The run of that folder: done already, to be gone on with, or new."""
    if not (Path(config.out) / "config.toml").is_file():
        return run(config, callbacks=callbacks)
    changed = changes(config)
    if not changed.keys() <= OF_NO_CONSEQUENCE:
        raise ConfigError(f"{config.out} holds a run with another config: choose another folder")
    return resume(config.out, callbacks=callbacks, **changed)


def changes(config: Config) -> dict[str, Any]:
    """The keys that are other than in the run that its folder holds."""
    there = configuration.load(Path(config.out)).flat() | {"out": config.out}  # it may have been moved
    return {name: value for name, value in config.flat().items() if value != there.get(name)}


def load_result(path: Path) -> Result:
    """What a run came to, of its folder."""
    folder, ending = RunFolder.open(path), path / "result.json"
    status = json.loads(ending.read_text(encoding="utf-8"))["status"] if ending.is_file() else "running"
    config, records = configuration.load(path), folder.records()
    if status == "finished" and (not records or records[-1]["round"] < config.rounds):
        status = "running"  # it was gone on with for more rounds, and has not come to their end
    return Result(path, config, records, status)


def _go(federation: Federation, folder: RunFolder, history: list[Record], callbacks: Sequence[Callback]) -> Result:
    config = federation.config
    result = Result(folder.path, config, history, "running", notes=folder.notes)
    with federation:
        for callback in callbacks:
            callback.start(federation, result)

        def on_client(done: int, total: int) -> None:
            for callback in callbacks:
                callback.client(federation.round + 1, done, total)

        done = federation.model, federation.state, federation.nearest  # of the last finished round
        try:
            started = time.perf_counter()
            for record in federation.rounds(on_client):
                with undisturbed():
                    history.append(record)
                    folder.add_round(record)
                    if record["round"] % config.checkpoint_every == 0 or record["round"] == config.rounds:
                        tensors, meta = federation.snapshot()
                        folder.save_checkpoint(tensors, meta | {"config": _as_json(config)}, config.keep_checkpoints)
                    federation.watch.lap("save")
                    folder.add_timing(record["round"], time.perf_counter() - started, federation.watch.seconds)
                    done = federation.model, federation.state, federation.nearest
                for callback in callbacks:
                    callback.round(record)
                started = time.perf_counter()
            result.status = "finished"
        except KeyboardInterrupt:
            result.status = "interrupted"
            federation.model, federation.state, federation.nearest = done
        finally:
            if result.status == "running":  # on its way out with an error; metrics and checkpoints are in the folder
                result.status = "failed"
            for callback in callbacks:
                callback.end(result)
        if history:
            folder.finish(federation, result)
    return result


@contextlib.contextmanager
def one_sentence(path: Path) -> Iterator[None]:
    """For a disk that is full, read-only or gone."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the run in {path} had to stop: {error.strerror or error}; its finished rounds are saved, and "
            f"`fedhpro resume {path}` goes on from there"
        ) from error


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the end of this: a finished round is on record as a whole."""
    if threading.current_thread() is not threading.main_thread():  # nor do signals come to other threads
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics, self.timings = path / "metrics.jsonl", path / "timings.jsonl"
        self.checkpoints = path / "checkpoints"
        self.memories = ClientMemories(path / MEMORIES)
        self.notes: list[str] = []  # what a user must know of what was found here

    @classmethod
    @contextlib.contextmanager
    def create(cls, config: Config) -> Iterator[RunFolder]:
        """A new folder, locked; one that exists must be empty."""
        with contextlib.ExitStack() as stack:
            path = Path(config.out)
            try:
                path = _new_folder(config)
                _check_empty(path)
                stack.enter_context(locked(path))
                _check_empty(path)  # still
                write_atomically(path / "config.toml", config.to_toml())
            except OSError as error:
                raise ConfigError(f"cannot write to {path}: {error.strerror or error}") from None
            stack.enter_context(one_sentence(path))
            yield cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not path.is_dir():
            raise ConfigError(f"there is no run folder {path}")
        if not (path / "config.toml").is_file():
            raise ConfigError(f"{path} is not a run folder: it has no config.toml")
        return cls(path)

    def draw_data(self, federation: Federation) -> None:
        """Who holds what, before anything is trained on it."""
        if federation.config.data == SITES or (self.path / "holdings.json").exists():
            return
        from .report.holdings import draw_holdings, held

        draw_holdings(federation.clients, federation.source.classes, self.path / "holdings.png")
        found = {"classes": list(federation.source.classes), "clients": held(federation.clients)}
        write_atomically(self.path / "holdings.json", json.dumps(found) + "\n")

    def add_round(self, record: Record) -> None:
        self._append(self.metrics, record, safely=True)

    def add_timing(self, number: int, seconds: float, phases: Mapping[str, float]) -> None:
        phases = {phase: round(value, 4) for phase, value in phases.items()}
        self._append(self.timings, {"round": number, "seconds": round(seconds, 4), "phases": phases})

    def records(self, path: Path | None = None) -> list[Record]:
        """The metrics so far, up to a line that is no record of a round: mostly one cut off while it was written."""
        path, found = path or self.metrics, list[Record]()
        for line in path.read_bytes().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                break
            if not isinstance(record, dict) or type(record.get("round")) is not int:
                break
            found.append(record)
        return found

    def count_repeated(self, last_round: int) -> int:
        """How many rounds were run, and are run again, in all resumes of this run: kept, since rewind forgets them."""
        path = self.path / "repeated.json"
        repeated = int(json.loads(path.read_text())) if path.exists() else 0
        repeated += sum(record["round"] > last_round for record in self.records())
        write_atomically(path, f"{repeated}\n")
        return repeated

    def rewind(self, last_round: int) -> list[Record]:
        """Forget what came after the checkpoint, which is run again, and what was cut off while it was written."""
        for path in self._checkpoint_files():
            if round_of(path) > last_round:
                path.unlink()
        for path in (*leftovers(self.path), *leftovers(self.checkpoints)):
            path.unlink()
        self._prune_memories()
        for path in (self.metrics, self.timings):
            kept = [record for record in self.records(path) if record["round"] <= last_round]
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        return self.records()

    def save_checkpoint(self, tensors: Tensors, meta: Record, keep: int) -> None:
        path = self.checkpoints / f"round-{meta['round']:06d}.safetensors"
        meta = meta | {"versions": VERSIONS, "tensors": save_tensors(path, tensors)}
        write_atomically(path.with_suffix(".json"), sealed(meta))
        for folder in (self.path, self.checkpoints, self.memories.folder):
            if folder.exists():
                sync_folder(folder)  # before anything older goes
        for old in sorted(self._checkpoint_files(".json"))[:-keep]:
            old.unlink()
            old.with_suffix(".safetensors").unlink(missing_ok=True)
        self._prune_memories()

    def newest_checkpoint(self, up_to: int | None = None) -> tuple[Tensors, Record]:
        """The newest that is whole, and not of a round whose metrics are lost; nothing where none was ever finished.

        Why a newer one cannot be used is noted.
        """
        finished = False
        for path in sorted({path.with_suffix(".json") for path in self._checkpoint_files()}, reverse=True):
            finished |= path.exists()
            try:
                return self._checkpoint(path, up_to)
            except (DamagedFile, RunError) as error:
                self.notes.append(f"the checkpoint of round {round_of(path)} cannot be used: {error}")
            except OSError as error:
                self.notes.append(f"the checkpoint of round {round_of(path)} is not whole: {error.strerror or error}")
        if finished:
            raise RunError(f"{self.path} has no checkpoint to go on from, and nothing was changed: {self.notes[0]}")
        return {}, {}

    def check_start(self, checkpoint_every: int) -> None:
        """Without a checkpoint, go on from round 1 only where none can be missing: a round is on record before its
        checkpoint is saved, so a run that was killed before its first one has up to checkpoint_every lines.
        """
        lines = len(self.metrics.read_bytes().splitlines()) if self.metrics.exists() else 0
        if lines > checkpoint_every:
            raise RunError(
                f"{self.path} has no checkpoint to go on from, and nothing was changed: {self.metrics.name} has "
                f"{lines} rounds, and with checkpoint_every={checkpoint_every} there was one"
            )
        self.notes.append("no checkpoint yet: from round 1")

    def _checkpoint_files(self, kind: str = ".*") -> list[Path]:
        """Other files that somebody put there do not count, and stay."""
        return [path for path in self.checkpoints.glob(f"round-*{kind}") if CHECKPOINT.fullmatch(path.name)]

    def _checkpoint(self, path: Path, up_to: int | None) -> tuple[Tensors, Record]:
        meta = unsealed(path)
        tensors, _ = load_tensors(path.with_suffix(".safetensors"))
        if checksum(tensors) != meta["tensors"]:
            raise DamagedFile(f"{path} and its tensors do not belong together")
        if up_to is not None and meta["round"] > up_to:
            raise DamagedFile(f"{self.metrics} ends with round {up_to}")
        self.memories.check(generations_of(meta))
        return tensors, meta

    def compare_versions(self, before: Mapping[str, str]) -> None:
        for name in ("fedhpro", "torch"):
            if before[name] != VERSIONS[name]:
                self.notes.append(
                    f"the rounds so far are of {name} {before[name]}, and this is {VERSIONS[name]}: "
                    "from here on the numbers may differ from those of an uninterrupted run"
                )

    def _prune_memories(self) -> None:
        pinned: set[tuple[int, int]] = set()
        for path in self._checkpoint_files(".json"):
            with contextlib.suppress(DamagedFile):  # a checkpoint that cannot be read needs none
                pinned |= generations_of(unsealed(path)).items()
        self.memories.prune(pinned)

    def finish(self, federation: Federation, result: Result) -> None:
        """Everything that a user of the model wants; also after Ctrl-C, from the last finished round."""
        from .report.curves import draw_curves
        from .report.page import write_report
        from .use import write_card

        if federation.exchange == "model":
            self._save_model(federation)
        if federation.state:
            save_tensors(self.path / "server.safetensors", federation.state)
        result.costs = accounting.run_costs(federation, result.history, self.records(self.timings))
        table = accounting.tensor_table(federation.sent(), federation.travelling())
        write_atomically(self.path / "costs.json", json.dumps(result.costs | {"tensors": table}, indent=2) + "\n")
        write_atomically(self.path / "result.json", json.dumps(self._summary(federation, result), indent=2) + "\n")
        if federation.confusion:  # not of a resumed run that had nothing left to do
            write_atomically(self.path / "confusion.json", json.dumps(self._confusion(federation, result)) + "\n")
        if result.accuracy:
            draw_curves([self.path], self.path / "curves.png")
        write_card(self.path)
        write_report([self.path], self.path / "report.html", tsne=False)

    def _confusion(self, federation: Federation, result: Result) -> Record:
        return {
            "round": [record["round"] for record in result.history if "accuracy" in record][-1],
            "classes": list(federation.source.classes),
            "domains": {name: matrix.tolist() for name, matrix in federation.confusion.items()},
        }

    def _summary(self, federation: Federation, result: Result) -> Record:
        last = result.history[-1]
        return {
            "status": result.status,
            "method": result.config.method,
            "data": result.config.data,
            "seed": result.config.seed,
            "rounds": last["round"],
            "clients": len(federation.clients),
            **({} if federation.privacy or federation.withheld else {"samples": sum(federation.sizes)}),
            "final": result.headline,
            "accuracy": result.accuracy,
            **({"balanced": last["balanced"]} if "balanced" in last else {}),
            **({"federated": last["federated"]} if "federated" in last else {}),
            **({"privacy": last["privacy"]} if "privacy" in last else {}),
            "bytes_up": sum(record["bytes_up"] for record in result.history),
            "bytes_down": sum(record["bytes_down"] for record in result.history),
            "refused": sum(len(record["refused"]) for record in result.history),
            "seconds": round(sum(timing["seconds"] for timing in self.records(self.timings)), 2),
            "costs": result.costs,
            "notes": result.notes,
            "versions": VERSIONS,
        }

    def _save_model(self, federation: Federation) -> None:
        config, source, net = federation.config, federation.source, federation.net
        with torch.no_grad():
            copy_into(model_tensors(net), federation.model)
        state = {name: value.contiguous() for name, value in net.state_dict().items()}  # on a GPU it is channels_last
        for name, value in state.items():
            if name.endswith("num_batches_tracked"):  # steps of this process, not of the federation
                state[name] = torch.zeros_like(value)
        state |= {f"instead.{name}": value for name, value in federation.nearest.items()}
        write_atomically(self.path / "model.safetensors", save(state))
        about: Record = {
            "format": 1,
            "kind": "image" if source.vocab is None else "text",
            "model": {
                "name": config.model,
                "num_classes": source.num_classes,
                "width": config.width if config.model.startswith("resnet") else None,
                "dim": config.dim,
            },
            "classes": list(source.classes),
            "shape": list(source.shape),
            "sha256": _sha256(self.path / "model.safetensors"),
        }
        if federation.nearest:
            about["nearest"] = len(federation.nearest["means"])
        if source.vocab is None:
            about["model"] |= {"stem": config.stem, "channels": source.shape[0], "image_size": source.shape[-1]}
            about |= {"mean": list(source.mean), "std": list(source.std)}
        else:
            about["model"]["vocab"] = source.vocab
        if source.tokenizer is not None:
            write_atomically(self.path / "tokenizer.json", source.tokenizer.to_json())
            about["tokenizer_sha256"] = _sha256(self.path / "tokenizer.json")
        write_atomically(self.path / "model.json", json.dumps(about, indent=2) + "\n")

    @staticmethod
    def _append(path: Path, record: Record, safely: bool = False) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            if safely:  # it is there even if the machine stops now
                file.flush()
                os.fsync(file.fileno())


def round_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("round-"))


def leftovers(folder: Path) -> list[Path]:
    """Files that a killed process was writing."""
    return list(folder.glob(".*.tmp"))


def _new_folder(config: Config) -> Path:
    """The one that the config names, or else one of its own."""
    if config.out != "auto":
        path = Path(config.out)
        path.mkdir(parents=True, exist_ok=True)
        return path
    data = re.sub(r"[^\w.-]+", "-", config.data)[:40]
    return new_folder(f"{config.method}-{data}-seed{config.seed}")


def new_folder(name: str) -> Path:
    """Under runs/, and nobody else's: also not of somebody who started in the same second."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    for number in itertools.count(1):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    return path


def _check_empty(path: Path) -> None:
    if (path / "config.toml").exists():
        raise ConfigError(f"{path} already holds a run: choose another folder, or `fedhpro resume {path}`")
    if any(file.name != LOCK and file not in leftovers(path) for file in path.iterdir()):
        raise ConfigError(f"{path} is not empty: choose another folder")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
