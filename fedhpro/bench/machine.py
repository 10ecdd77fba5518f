"""The machine that numbers were measured on, in words that name no host and no path, and what its processes take."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

from ..config import available_cores


def describe() -> dict[str, Any]:
    import torch

    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": available_cores(),
        "memory_gb": round(int((_first("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": load(),
    }


def load() -> float | None:
    """Processes that wanted a core in the last minute: more of them than cores, and timings are too long."""
    with contextlib.suppress(OSError):
        return round(os.getloadavg()[0], 2)
    return None


def sentence(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gb']} GB, torch {machine['torch']}, "
        f"load {machine['load_before']} before and {machine['load_after']} after"
    )


def tree(pid: int) -> list[Path]:
    """What /proc has of a process and all below it; nothing where there is no /proc, or the process is gone."""
    process = Path(f"/proc/{pid}")
    try:
        below = [child for task in (process / "task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [process, *(found for child in below for found in tree(int(child)))]


def memory(pid: int) -> int:
    """Bytes of a process tree (PSS)."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):  # it may end at any time
            lines = (process / "smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _first(path: str, key: str) -> str | None:
    """The first value of a key in one of Linux's tables."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None
