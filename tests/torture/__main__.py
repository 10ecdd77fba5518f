"""Runs the parts that are named, or all, and prints their figures."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from .common import Figures, prepare
from .crash import crash
from .fuzz import fuzz
from .load import load
from .machine import machine

PARTS = {"crash": crash, "machine": machine, "fuzz": fuzz, "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all of them, if none is named")
    parser.add_argument("--short", action="store_true", help="seconds in place of minutes")
    parser.add_argument("--out", type=Path, help="the figures as JSON")
    arguments = parser.parse_args()
    prepare()
    started, found = time.monotonic(), Figures()
    for name in arguments.parts or PARTS:
        print(f"\n{name}", flush=True)
        found[name] = PARTS[name](arguments.short)
        for what, value in found[name].items():
            print(f"  {what}: {value}", flush=True)
    found["minutes"] = round((time.monotonic() - started) / 60, 1)
    found["load of the machine"] = os.getloadavg()
    print(f"\nall promises kept, in {found['minutes']} minutes; load of the machine {os.getloadavg()}")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
