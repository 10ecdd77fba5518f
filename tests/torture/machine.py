"""Disks that are full or read-only, clocks that jump, two processes on one folder: a sentence, and nothing lost."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedhpro import files, runs
from fedhpro.config import configure

from .common import SMALL, Figures, ended, finished_rounds, go_on, in_a_child, outcome, promise


def machine(short: bool) -> Figures:
    started, figures = time.monotonic(), Figures()
    keys = {"method": "fedhpro", "rounds": 3, "workers": 0}
    with tempfile.TemporaryDirectory(prefix="torture-") as place, contextlib.ExitStack() as stack:
        config = configure(**SMALL | keys | {"out": f"{place}/whole"})
        promise(ended(in_a_child(lambda: go_on(config))) == 0, "a run failed")
        expected = outcome(Path(config.out))
        disk = Path(place, "disk")
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "torture", disk], capture_output=True).returncode != 0:
            return {"skipped": "a small disk (tmpfs) cannot be mounted here; tests/test_reliability.py plays one"}
        stack.callback(subprocess.run, ["umount", "-l", disk])
        size = sum(path.stat().st_size for path in Path(config.out).rglob("*") if path.is_file())
        sizes = [int(size * share) for share in ([0.5] if short else [0.1 + 0.04 * i for i in range(20)])]
        stopped = 0
        for room in sizes:
            resize(disk, f"size={room}")
            child = config.replace(out=str(disk / "run"))
            code, said = told(lambda child=child: go_on(child))
            if code:
                stopped += 1
                promise("No space left on device" in said and len(said.splitlines()) == 1, f"no sentence: {said}")
            done = finished_rounds(disk / "run")
            resize(disk, f"size={10 * size}")
            promise(told(lambda child=child: go_on(child))[0] == 0, "not gone on with after a full disk")
            promise(finished_rounds(disk / "run") >= done, "a finished round was lost on a full disk")
            promise(outcome(disk / "run") == expected, "other bytes after a full disk")
            resize(disk, "ro")
            code, said = told(lambda child=child: runs.resume(child.out, rounds=9))
            promise(code != 0 and "Read-only file system" in said and len(said.splitlines()) == 1, said)
            resize(disk, "rw")
            shutil.rmtree(disk / "run")
        figures |= {"disks of different sizes": len(sizes), "of them full before the end": stopped}
        figures |= {"read-only folders": len(sizes)}

        def jumping(out: str) -> None:
            rng = random.Random(0)
            time.time = lambda: rng.uniform(0, 2e9)
            go_on(config.replace(out=out, rounds=2))
            for path in Path(out).rglob("*"):
                os.utime(path, (rng.uniform(0, 2e9),) * 2)
            runs.resume(out, rounds=3)

        promise(told(lambda: jumping(f"{place}/clock"))[0] == 0, "a run with a jumping clock failed")
        promise(outcome(Path(place, "clock")) == expected, "other bytes with a jumping clock")
        holder = in_a_child(lambda: hold(Path(config.out)))
        while not (Path(config.out) / "held").exists():
            time.sleep(0.01)
        code, said = told(lambda: runs.resume(config.out, rounds=9))
        os.kill(holder, signal.SIGKILL)
        ended(holder)
        promise(code != 0 and f"is being written by process {holder} on " in said, said)
        code, said = told(lambda: runs.resume(config.out, rounds=4))
        promise(code == 0, f"a lock outlived its process: {said}")
        figures |= {"runs with a clock that jumps": 1, "second processes that were told who writes": 1}
    return figures | {"seconds": round(time.monotonic() - started)}


def hold(folder: Path) -> None:
    with files.locked(folder):
        (folder / "held").touch()
        time.sleep(600)


def resize(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)


def told(work: Callable[[], Any]) -> tuple[int, str]:
    """Exit code and stderr."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            code = ended(in_a_child(work))
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        return code, file.read().decode()
