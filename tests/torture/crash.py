"""kill -9 at random moments, also while a file is being written: no finished round is lost, and every byte the same."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fedhpro import files, runs
from fedhpro.config import Config, configure

from .common import SMALL, Figures, ended, finished_rounds, go_on, in_a_child, outcome, promise

CRASHES = [
    {"method": "moon", "participation": 0.7, "workers": 2},
    {"method": "moon", "participation": 0.7, "workers": 0},
    {"method": "fedproto", "exchange": "prototypes", "workers": 2},
    {"method": "fedhpro", "workers": 0, "checkpoint_every": 2},
]


class SlowFile:
    """Every write takes a while, so that a kill often comes in the middle of one."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, content: bytes) -> None:
        step = max(1, len(content) // 8)
        for start in range(0, len(content), step):
            self.file.write(content[start : start + step])
            self.file.flush()
            time.sleep(0.001)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> SlowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def write_slowly() -> None:
    def append(path: Path, record: Any, safely: bool = False) -> None:
        with SlowFile(open(path, "ab")) as file:
            file.write((json.dumps(record) + "\n").encode())

    files.open = lambda *arguments: SlowFile(open(*arguments))  # noqa: SIM115
    runs.RunFolder._append = staticmethod(append)
    os.fsync = lambda _: time.sleep(0.002)


def go_on_slowly(config: Config) -> None:
    write_slowly()
    go_on(config)


def crash(short: bool) -> Figures:
    """Runs that are killed again and again, and finished all the same."""
    rng, counts, started = random.Random(0), Counter[str](), time.monotonic()
    kills, rounds, kinds = (3, 3, CRASHES[:1]) if short else (200, 6, CRASHES)
    with tempfile.TemporaryDirectory(prefix="torture-") as place:
        configs = [configure(**SMALL | keys | {"rounds": rounds}) for keys in kinds]
        expected, seconds = [], []
        for number, config in enumerate(configs):
            whole, before = config.replace(out=f"{place}/whole-{number}"), time.monotonic()
            promise(ended(in_a_child(lambda whole=whole: go_on_slowly(whole))) == 0, "a run failed")
            seconds.append(time.monotonic() - before)
            expected.append(outcome(Path(whole.out)))
        while counts["kills"] < kills:
            number, folder = counts["runs"] % len(kinds), Path(place, "killed")
            config, pause = configs[number].replace(out=str(folder)), configs[number].checkpoint_every
            for attempt in range(1, 6):  # killed four times at most
                saved, lines = newest(folder), lines_of(folder)
                begun, pid = time.monotonic(), in_a_child(lambda config=config: go_on_slowly(config))
                if attempt < 5 and counts["kills"] < kills:
                    wait(pid, rng.uniform(0.0, seconds[number]))
                    if rng.random() < 0.5:
                        wait_for_a_write(pid, folder, lines)
                    with contextlib.suppress(ProcessLookupError):  # half of the times its workers too
                        (os.killpg if rng.random() < 0.5 else os.kill)(pid, signal.SIGKILL)
                code = ended(pid)
                if code == 0:
                    seconds[number] = min(seconds[number], time.monotonic() - begun)
                    break
                promise(code == -signal.SIGKILL, f"a resumed run ended with {code}")
                counts["kills"] += 1
                counts["while writing"] += torn(pid, folder, lines)
                least = max(saved, (finished_rounds(folder) - 1) // pause * pause)
                promise(newest(folder) >= least, f"{newest(folder)} rounds are saved, and {least} were finished")
            promise(outcome(folder) == expected[number], f"other bytes than those of the uninterrupted run: {config}")
            counts["runs"] += 1
            shutil.rmtree(folder)
    return {
        "kills": counts["kills"],
        "of them while a file was being written": counts["while writing"],
        "runs that were finished all the same": counts["runs"],
        "with other bytes than the uninterrupted run": 0,
        "finished rounds lost": 0,
        "seconds": round(time.monotonic() - started),
    }


def newest(folder: Path) -> int:
    return int(runs.RunFolder(folder).newest_checkpoint()[1].get("round", 0))


def runs_on(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def wait(pid: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and runs_on(pid):
        time.sleep(0.001)


def wait_for_a_write(pid: int, folder: Path, before: dict[Path, bytes]) -> None:
    while not torn(pid, folder, before) and runs_on(pid):
        time.sleep(0.0005)


def torn(pid: int, folder: Path, before: dict[Path, bytes]) -> bool:
    """Whether that process is, or was when it ended, in the middle of a file: one beside its place, or a line."""
    half = [path for path, text in lines_of(folder).items() if text != before.get(path) and not text.endswith(b"\n")]
    return bool(list(folder.rglob(f".*.{pid}.tmp")) or half)


def lines_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.glob("*.jsonl")}
