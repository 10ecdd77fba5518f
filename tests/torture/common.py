"""What the parts share: small runs in forked processes, and promises."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from conftest import TINY, tiny

from fedhpro import runs
from fedhpro.config import Config
from fedhpro.data import sources
from fedhpro.errors import UserError

torch.set_num_threads(1)
Figures = dict[str, Any]
SMALL = TINY | {"model": "cnn", "width": "none", "data": "tiny"}
FILES = ("metrics.jsonl", "model.safetensors", "server.safetensors")


class Broken(AssertionError):
    """A promise that was not kept."""


def promise(kept: bool, what: str) -> None:
    if not kept:
        raise Broken(what)


def prepare() -> None:
    """Small data by its name, and no pictures, which would be most of the time of so small a run."""
    from fedhpro.report import curves, page

    source = tiny(1200)
    sources.SOURCES["tiny"] = lambda: source
    curves.draw_curves = lambda *_: None
    page.write_report = lambda *_, **__: []
    runs.RunFolder.draw_data = lambda *_: None


def in_a_child(work: Callable[[], Any]) -> int:
    """The pid of a forked process at that work: torch is warm in it, so that a start costs next to nothing."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        work()
        code = 0
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome(folder: Path) -> dict[str, bytes]:
    """Everything that must have the bytes of an uninterrupted run."""
    found = {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}
    for name in ("checkpoints", "memories"):
        found |= {str(path.relative_to(folder)): path.read_bytes() for path in (folder / name).glob("*.safetensors")}
    return found


def go_on(config: Config) -> None:
    """The run of that folder: begun, or gone on with."""
    if (Path(config.out) / "config.toml").exists():
        runs.resume(config.out)
    else:
        runs.run(config)


def finished_rounds(folder: Path) -> int:
    return len(runs.RunFolder(folder).records())
