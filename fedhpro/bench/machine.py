"""The machine that numbers were measured on, in words that name no host and no path."""

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


def _first(path: str, key: str) -> str | None:
    """The first value of a key in one of Linux's tables."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None
