"""A callback of your own, in ten lines: python examples/own_callback.py [NEW_FOLDER]

It ends a run whose mean accuracy has not improved for some rounds. docs/callbacks.md has the other hooks.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import fedhpro
from fedhpro.callbacks import Callback


class Patience(Callback):
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def start(self, federation: Any, result: fedhpro.Result) -> None:
        self.result = result  # its history grows with the run

    def round(self, record: dict[str, Any]) -> None:
        if record["round"] - self.result.headline["best_round"] >= self.rounds:
            raise KeyboardInterrupt  # as Ctrl-C: model and report are written, and `fedhpro resume` can go on


def main(folder: Path, **keys: Any) -> fedhpro.Result:
    result = fedhpro.run(rounds=30, local_epochs=1, out=str(folder / "run"), callbacks=[Patience(3)], **keys)
    best, last = result.headline["best_round"], result.history[-1]["round"]
    print(f"{result.status} after round {last}; the best was round {best}")
    return result


if __name__ == "__main__":
    if len(sys.argv) > 1 and Path(sys.argv[1]).exists():
        sys.exit(f"{sys.argv[1]} exists: name a new folder")
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
