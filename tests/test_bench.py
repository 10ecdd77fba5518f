"""The benchmark beside other frameworks, without any of them: fake scripts stand in."""

from __future__ import annotations

import io
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fedhpro import bench
from fedhpro.bench import cpu, environments, machine, ours
from fedhpro.bench.environments import Failed, Peer, Timing, Way, time_run
from fedhpro.bench.peers import workload
from fedhpro.cli import main
from fedhpro.models import MODELS, Spec

IMAGES = Spec(num_classes=workload.CLASSES, channels=1, image_size=28)


def script(folder: Path, text: str) -> list[str]:
    path = folder / "peer.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def printed(found: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120)
    cpu.show(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(engine: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "engine": engine,
        "way": "1 process x 1 thread",
        "min": seconds,
        "median": 1.5 * seconds,
        "first": 2.0,
    } | more


# --- one run ---


def test_a_peer_answers_with_one_line_of_json(tmp_path: Path) -> None:
    text = """import json, os, sys, time
time.sleep(0.5)
print("what a framework has to say")
print(json.dumps({"first": len(sys.argv), "rounds": [float(os.environ["OMP_NUM_THREADS"])]}))"""
    timing = time_run(script(tmp_path, text), threads=2, with_memory=True)
    assert (timing.first, timing.rounds) == (3, [2.0])  # the script, --threads and --started
    assert timing.peak_mb is None if sys.platform != "linux" else timing.peak_mb and 1 < timing.peak_mb < 500


@pytest.mark.parametrize("text", ["raise ValueError('no such client')", "print('3 rounds')", "print('{}')"])
def test_what_fails_says_why(tmp_path: Path, text: str) -> None:
    reason = "exit code 1: ValueError: no such client" if "raise" in text else "exit code 0: it said nothing"
    with pytest.raises(Failed, match=reason):
        time_run(script(tmp_path, text), threads=1)


def test_what_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "PATIENCE", 0.2)
    with pytest.raises(Failed, match=r"not finished after 0\.2 seconds"):
        time_run(script(tmp_path, "import time; time.sleep(60)"), threads=1)


def test_an_environment_is_made_once_and_what_cannot_be_installed_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    codes = [0, 1, 0, 0]  # venv and pip, twice

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        (tmp_path / "bench" / "peer").mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, codes.pop(0), "", "WARNING: one\nERROR: no such version\n")

    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path))
    monkeypatch.setattr(environments.subprocess, "run", run)
    peer = Peer("peer", "peer==1", ("fedavg",), (Way(1, 1),))
    with pytest.raises(Failed, match="not installed: ERROR: no such version"):
        environments.install(peer)
    python = environments.install(peer)
    assert environments.install(peer) == python and len(commands) == 4
    assert commands[-1][0] == str(python) and commands[-1][-1] == "peer==1"
    assert commands[-1][-2] == f"torch=={torch.__version__.partition('+')[0]}"


# --- all of them ---


def test_runs_are_interleaved_and_a_failing_peer_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = (
        Peer("slow", "slow==1", ("fedavg", "fedproto"), (Way(1, 1), Way(1, 2))),
        Peer("broken", "broken==1", ("fedavg",), (Way(1, 1),)),
        Peer("absent", "absent==1", ("fedavg",), (Way(1, 1),)),
    )
    order = []

    def install(peer: Peer) -> Path:
        if peer.name == "absent":
            raise Failed("not installed: no such package")
        return Path(f"{peer.name}-python")

    def run(command: list[str], threads: int, with_memory: bool, python_path: str) -> Timing:
        name = Path(command[0]).name.removesuffix("-python") if "ours" not in command[2] else "ours"
        if name == "broken":
            raise Failed("exit code 1: it broke")
        if not with_memory:
            order.append(f"{name} {threads}")
        seconds = 1.0 if name == "ours" else 2.0 * threads
        return Timing(10 * seconds, [seconds, 3 * seconds], 100.0 if with_memory else None)

    monkeypatch.setattr(cpu, "PEERS", peers)
    monkeypatch.setattr(cpu, "install", install)
    monkeypatch.setattr(cpu, "time_run", run)
    found = cpu.cpu(quick=True, say=lambda line: None)
    assert list(found["workloads"]) == list(cpu.WORKLOADS)
    assert order[-4:] == ["ours 1", "slow 1", "ours 1", "slow 2"]
    rows = {(row["engine"], row["way"]): row for row in found["workloads"]["FedAvg, overhead"]}
    slow = rows["slow", "1 process x 2 threads"]
    assert (slow["min"], slow["median"], slow["first"], slow["peak_mb"]) == (4.0, 8.0, 40.0, 100.0)
    assert re.search(r"slow +│ 1 process x 2 threads +│ 4\.000 │ +8\.000 │ +4\.00 ", printed(found))
    assert rows["broken", "1 process x 1 thread"]["error"] == "exit code 1: it broke"
    assert "broken: 1 process x 1 thread: exit code 1: it broke" in printed(found)
    assert "absent: 1 process x 1 thread: not installed: no such package" in printed(found)


def test_ours_must_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> Timing:
        raise Failed("exit code 1: we broke")

    monkeypatch.setattr(cpu, "PEERS", ())
    monkeypatch.setattr(cpu, "time_run", run)
    with pytest.raises(RuntimeError, match="we broke"):
        cpu.cpu(quick=True, say=lambda line: None)


def test_table_and_plot_of_stored_numbers(tmp_path: Path) -> None:
    rows = [row("fedhpro", 0.05, peak_mb=None), row("pfl", 0.102, peak_mb=400.0)]
    rows += [{"engine": "flower", "way": "2 processes x 1 thread", "error": "it [did] not start"}]
    stored = json.loads(json.dumps({"workloads": {"FedAvg, CNN": rows}}))
    text = printed(stored)
    assert re.search(r"fedhpro .* 0\.050 .* 0\.075 .* 1\.00 .* 2\.0 .* -", text)
    assert re.search(r"pfl .* 0\.102 .* 0\.153 .* 2\.04 .* 2\.0 .* 400", text)
    assert "flower: 2 processes x 1 thread: it [did] not start" in text
    page = cpu.markdown(stored).splitlines()
    assert "| pfl | 1 process x 1 thread | 0.102 | 0.153 | 2.04 | 2.0 | 400 |" in page
    assert "| flower | 2 processes x 1 thread | it [did] not start |" in page
    cpu.draw(stored, tmp_path / "cpu.png")
    assert (tmp_path / "cpu.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_way_of_each_engine() -> None:
    failed = {"engine": "b", "way": "", "error": "no"}
    rows = [row("a", 2.0), row("a", 1.0), failed, row("c", 0.5)]
    assert cpu.best(rows) == [rows[3], rows[1], failed]


# --- our side ---


def test_every_engine_trains_the_same_network() -> None:
    same, own = ours.NETS["bench-cnn-torch"](IMAGES), ours.NETS["bench-cnn"](IMAGES)
    assert sum(p.numel() for p in same.parameters()) == sum(p.numel() for p in own.parameters()) == 80_202
    names = {"conv1": "encoder.0", "conv2": "encoder.3", "hidden": "encoder.7", "classifier": "classifier"}
    theirs = same.state_dict()
    own.load_state_dict({f"{a}.{k}": theirs[f"{b}.{k}"] for a, b in names.items() for k in ("weight", "bias")})
    x, _ = workload.samples(0)
    assert torch.equal(own(x[:64]), same(x[:64]))


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_a_round_of_our_own(method: str) -> None:
    before = set(MODELS)
    with ours.federation(method, "tiny", workers=0) as federation:
        record = federation.next_round()
        assert federation.sizes == [workload.SAMPLES] * workload.CLIENTS
    assert record["aggregated"] and not record["refused"] and "accuracy" not in record
    assert set(MODELS) == before


def test_what_peers_import_knows_nothing_of_fedhpro() -> None:
    scripts = {path.name: path.read_text() for path in environments.SCRIPTS.glob("*.py")}
    assert {f"with_{peer.name}.py" for peer in environments.PEERS} < scripts.keys()
    assert not [name for name, text in scripts.items() if re.search(r"^\s*(from|import) (fedhpro|\.)", text, re.M)]


# --- the command ---


def test_the_command_keeps_what_a_bench_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("fedhpro", 1.0, peak_mb=300)]
    monkeypatch.setattr(cpu, "cpu", lambda quick: {"workloads": {"FedAvg, CNN": rows}})
    console = Console(file=io.StringIO())
    bench.run("cpu", quick=True, out=tmp_path, console=console)
    stored = json.loads((tmp_path / "cpu.json").read_text())
    assert stored["workloads"]["FedAvg, CNN"] == rows and stored["quick"]
    assert stored["machine"]["torch"] == torch.__version__
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu.json", "cpu.md", "cpu.png"]


def test_a_machine_is_described_without_its_name() -> None:
    text = json.dumps(machine.describe())
    assert platform.node() not in text.split() and str(Path.home()) not in text
    assert machine.describe()["cores"] >= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "gpu"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.strip() == "fedhpro: torch sees no GPU on this machine"


def test_an_unknown_bench_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "cup"])
    assert "there is no bench 'cup': choose one of cpu" in capsys.readouterr().err
