"""Speed on this machine, and leaks: each bench is a module with a function of its name, imported when asked for.

    cpu      seconds a round beside other frameworks, which it installs
    gpu      milliseconds a step and seconds a round on a GPU
    growth   time and memory as clients, classes and features grow
    server   gradient matching and re-training on one core
    rounds   workers, and what FedHPro costs beside FedAvg
    batches  augmented samples per second beside a DataLoader
    leaks    what an upload gives away of a client's data

A bench returns what it found as a dict, for JSON. `show`, `draw` and `markdown`, where it has them, print and plot it
and make a page of it.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import ConfigError
from ..files import write_atomically
from . import machine

BENCHES = ("cpu", "gpu", "growth", "server", "rounds", "batches", "leaks")


def run(name: str, quick: bool, out: Path, console: Console) -> None:
    """Measure, print, and keep NAME.json and maybe more in `out`; `all`: one after the other, what this machine has."""
    import torch

    if name not in (*BENCHES, "all"):
        raise ConfigError(f"there is no bench {name!r}: choose one of {', '.join(BENCHES)}, all")
    for one in BENCHES if name == "all" else (name,):
        if one != "gpu" or torch.cuda.is_available():
            _measure(one, quick, out, console)
        elif name == "gpu":
            raise ConfigError("torch sees no GPU on this machine")


def _measure(name: str, quick: bool, out: Path, console: Console) -> None:
    bench = importlib.import_module(f".{name}", __name__)
    where = machine.describe()
    found: dict[str, Any] = getattr(bench, name)(quick) | {"quick": quick}
    found["machine"] = where | {"load_after": machine.load()}
    files: dict[Path, str] = {out / f"{name}.json": json.dumps(found, indent=1) + "\n"}
    if hasattr(bench, "markdown"):
        files[out / f"{name}.md"] = f"{machine.sentence(found['machine'])}\n\n{bench.markdown(found)}"
    for path, text in files.items():
        write_atomically(path, text)
    if hasattr(bench, "draw"):
        bench.draw(found, out / f"{name}.png")
    if hasattr(bench, "show"):
        bench.show(found, console)
    else:
        console.print_json(data=found)
    console.print(f"{machine.sentence(found['machine'])}; kept in {out}", highlight=False, soft_wrap=True)
