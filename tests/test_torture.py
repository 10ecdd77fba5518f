"""`make torture` in seconds: it runs, and keeps its promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is an extra: pip install 'fedhpro[flower]'")
HERE = Path(__file__).parent


@pytest.mark.parametrize("part", ["crash", "fuzz", "load"])
def test_a_short_version(tmp_path, part):
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torture", part, "--short", "--out", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())[part]
    assert all(figures[name] == 0 for name in figures if name.endswith(("lost", "crashes", "aggregated")))
    expected = {"crash": ("kills", 3), "fuzz": ("hostile replies (hypothesis)", 400), "load": ("grid: rounds", 1)}
    name, least = expected[part]
    assert figures[name] >= least
