"""A run's numbers in TensorBoard, MLflow or Weights & Biases; metrics.jsonl has them always.

A tracker only watches: the run has the same bytes with it and without it, and goes on where it fails.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .callbacks import Callback
from .errors import ConfigError

if TYPE_CHECKING:
    from .federation import Federation
    from .runs import Result

log = logging.getLogger("fedhpro")
PROJECT = "fedhpro"  # MLflow's experiment and W&B's project, where the environment names no other
ENVIRONMENT = {  # set where the user has not: no telemetry, and a server that is gone holds a run up for seconds only
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "WANDB_INIT_TIMEOUT": "20",
    "WANDB_FINISH_TIMEOUT": "60",
}


class Tracker(Callback):
    """What they share. The first trouble is one warning, and the end of the tracker."""

    library: str  # what is imported; also the name of the extra

    def __init__(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            self.module: Any = importlib.import_module(self.library)
        except ImportError as error:
            needed = f"{self.library}, which cannot be imported ({error}): pip install 'fedhpro[{self.library}]'"
            raise ConfigError(f"tracking needs {needed}") from None
        self.works = True

    def open(self, federation: Federation, result: Result) -> bool:
        """-> whether this tracker is new to the run, and has yet to see what it has done so far."""
        raise NotImplementedError

    def write(self, round: int, numbers: dict[str, float]) -> None:
        raise NotImplementedError

    def close(self, status: str) -> None:
        raise NotImplementedError

    def start(self, federation: Federation, result: Result) -> None:
        def begin() -> None:
            for record in result.history if self.open(federation, result) else ():
                self.write(record["round"], numbers(record))

        self._try(begin)

    def round(self, record: dict[str, Any]) -> None:
        self._try(self.write, record["round"], numbers(record))

    def end(self, result: Result) -> None:
        self._try(self.close, result.status)

    def _try(self, work: Callable[..., None], *arguments: Any) -> None:
        if not self.works:
            return
        try:
            work(*arguments)
        except Exception as error:
            self.works = False
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            log.warning("%s has failed, and the run goes on without: %s", self.library, reason)


class TensorBoard(Tracker):
    """Event files in the run folder: `tensorboard --logdir runs` shows all runs."""

    library = "tensorboard"

    def open(self, federation: Federation, result: Result) -> bool:
        from torch.utils.tensorboard import SummaryWriter

        folder = result.folder / "tensorboard"
        new = not folder.exists()
        self.writer = SummaryWriter(str(folder), purge_step=None if new else federation.round + 1)
        if new:
            self.writer.add_text("config", "".join(f"    {line}\n" for line in result.config.to_toml().splitlines()))
        return new

    def write(self, round: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, round)
        self.writer.flush()

    def close(self, status: str) -> None:
        self.writer.close()


class MLflow(Tracker):
    """A run in the store that MLFLOW_TRACKING_URI names, else in mlflow.db here."""

    library = "mlflow"
    PARAMS = 100  # the most that it takes at once

    def open(self, federation: Federation, result: Result) -> bool:
        self.store = self.module.MlflowClient()  # and not mlflow.start_run: the program may have a run of its own
        known = result.folder / "mlflow.id"
        if known.exists():
            self.id = known.read_text()
            self.store.update_run(self.id, "RUNNING")
            return False
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.store.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment else self.store.create_experiment(name)
        self.id = self.store.create_run(where, run_name=result.folder.resolve().name).info.run_id
        params = [self.module.entities.Param(key, str(value)) for key, value in result.config.flat().items()]
        for first in range(0, len(params), self.PARAMS):
            self.store.log_batch(self.id, params=params[first : first + self.PARAMS])
        known.write_text(self.id)
        return True

    def write(self, round: int, numbers: dict[str, float]) -> None:
        now = int(1000 * time.time())
        named = {_plain(name): value for name, value in numbers.items()}
        metrics = [self.module.entities.Metric(name, value, now, round) for name, value in named.items()]
        self.store.log_batch(self.id, metrics=metrics)

    def close(self, status: str) -> None:
        self.store.set_terminated(self.id, {"finished": "FINISHED", "interrupted": "KILLED"}.get(status, "FAILED"))


class WandB(Tracker):
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the run folder, for `wandb sync`."""

    library = "wandb"

    def open(self, federation: Federation, result: Result) -> bool:
        known = result.folder / "wandb.id"
        new = not known.exists()
        self.run = self.module.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=result.folder.resolve().name,
            id=None if new else known.read_text(),
            resume="allow",
            reinit="create_new",  # the program may have a run of its own
            dir=os.environ.get("WANDB_DIR", str(result.folder)),
            config=result.config.flat(),
            settings=self.module.Settings(console="off", silent=True),
        )
        self.run.define_metric("*", step_metric="round")
        known.write_text(self.run.id)
        return new

    def write(self, round: int, numbers: dict[str, float]) -> None:
        self.run.log({"round": round, **numbers})

    def close(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "finished" else 1)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def trackers(names: str) -> list[Tracker]:
    """From names with commas between them; ConfigError where one is not known, or its library not installed."""
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if unknown := [name for name in chosen if name not in TRACKERS]:
        raise ConfigError(f"there is no tracker {unknown[0]!r}: choose from {', '.join(TRACKERS)}")
    return [TRACKERS[name]() for name in chosen]


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """A round's record by flat names, as accuracy/AVG; of lists (clients, refused) the length."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= {f"{key}/{name}": inner for name, inner in value.items()}
        else:
            found[key] = len(value) if isinstance(value, list) else value
    del found["round"]
    return {name: float(v) for name, v in found.items() if isinstance(v, (int, float)) and math.isfinite(v)}


def _plain(name: str) -> str:
    """A name that MLflow takes: domains are called what their owners like."""
    group, slash, rest = name.partition("/")
    return group + slash + re.sub(r"[^\w .:-]|^\.+$", "_", rest)
