"""The peers, each in a virtual environment of its own and run by a script that drives its own server and clients."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import available_cores
from ..files import cache_folder
from .machine import memory

SCRIPTS = Path(__file__).parent / "peers"
PATIENCE = 900  # seconds for one run


@dataclass(frozen=True)
class Way:
    """How an engine uses the cores."""

    processes: int
    threads: int  # of torch in each

    def __str__(self) -> str:
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return f"{processes} x {self.threads} thread{'s' * (self.threads > 1)}"


CORES = available_cores()
IN_TURN = (Way(1, 1), Way(1, CORES)) if CORES > 1 else (Way(1, 1),)  # clients, in one process
AT_ONCE = (Way(CORES, 1),) if CORES > 1 else ()


@dataclass(frozen=True)
class Peer:
    name: str
    requirement: str
    methods: tuple[str, ...]
    ways: tuple[Way, ...]
    launcher: tuple[str, ...] = ()  # options of python before the script, where there are several processes

    def command(self, python: Path, way: Way, method: str, model: str) -> list[str]:
        launcher = self.launcher if way.processes > 1 else ()
        script = str(SCRIPTS / f"with_{self.name}.py")
        return [str(python), *launcher, script, method, model, f"--processes={way.processes}"]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={CORES}")
PEERS = (
    Peer("fluke", "fluke-fl==0.8.1", ("fedavg", "fedproto"), IN_TURN),
    Peer("pfl", "pfl[pytorch]==0.6.0", ("fedavg",), IN_TURN + AT_ONCE, TORCHRUN),
    Peer("fedlab", "fedlab==1.3.0", ("fedavg",), IN_TURN),
    Peer("flower", "flwr[simulation]==1.41.0", ("fedavg",), AT_ONCE or IN_TURN),
)


class Failed(Exception):
    """Why a peer was not installed or did not run, in one line."""


def install(peer: Peer) -> Path:
    """The interpreter of the peer's environment, made where it is missing. Everybody gets the same torch."""
    folder = cache_folder() / "bench" / peer.name
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    wanted = [f"torch=={torch.__version__.partition('+')[0]}", peer.requirement]
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"not installed: {_last_line(done.stderr)}")
    stamp.write_text(json.dumps(wanted))
    return python


@dataclass(frozen=True)
class Timing:
    first: float  # seconds from the start of the process to the end of round 1
    rounds: list[float]  # of the others
    peak_mb: float | None  # of all its processes together; None where it was not asked for or cannot be known


def time_run(command: Sequence[str], threads: int, with_memory: bool = False, python_path: str = "") -> Timing:
    """Run a script of ours; its last line is JSON (peers/workload.py)."""
    # waiting threads that spin would take the cores from each other; no peer is to call home
    variables = {"PYTHONPATH": python_path, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    variables |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "WANDB_MODE": "disabled"}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        open(Path(folder) / "output", "w+") as output,
        open(Path(folder) / "errors", "w+") as errors,
    ):
        process = subprocess.Popen(
            [*command, f"--threads={threads}", f"--started={time.monotonic()}"],
            stdout=output,
            stderr=errors,
            cwd=folder,
            env=os.environ | variables,
            start_new_session=True,
        )
        watched = PeakMemory(process.pid) if with_memory else None
        try:
            process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise Failed(f"not finished after {PATIENCE} seconds") from None
        finally:
            peak = watched.stop() if watched else None
            if process.poll() is None:  # too slow, or Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        errors.seek(0)
        try:
            found = json.loads(output.read().splitlines()[-1])
            return Timing(found["first"], found["rounds"], peak)
        except (IndexError, ValueError, TypeError, KeyError):
            raise Failed(f"exit code {process.returncode}: {_last_line(errors.read())}") from None


class PeakMemory:
    """The most memory that a process and its descendants had at a time: their shares of it (PSS), sampled."""

    def __init__(self, pid: int) -> None:
        self.pid, self.peak, self.ended = pid, 0.0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def stop(self) -> float | None:
        self.ended.set()
        self.thread.join()
        return round(self.peak) or None

    def _watch(self) -> None:
        while not self.ended.wait(0.1):
            self.peak = max(self.peak, memory(self.pid) / 2**20)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
