"""What goes wrong in a real federation on loopback, and what becomes of its run."""

import contextlib
import html
import json
import os
import shutil
import signal
import socket
import threading
import time

import pytest
from conftest import call

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
from flower_grid import LocalGrid
from loopback import Loopback, free_port, has_said, write_images
from safetensors.torch import load_file

from fedhpro import runs
from fedhpro.deploy import folder
from fedhpro.version import __version__

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:GitWildMatchPattern.*:DeprecationWarning")]
KEYS = ["classes=left,right", "image_size=16", "model=cnn", "local_epochs=1"]


@pytest.fixture
def federation(tmp_path, processes, capsys):
    """Makes one of so many nodes, and starts its server."""

    def made(nodes, *keys):
        init = ["deploy", "init", tmp_path / "fed", "--nodes", nodes, "--port", free_port(), *KEYS, *keys]
        code, _, error = call(capsys, *init)
        assert code == 0, error
        for number in range(nodes):
            write_images(tmp_path / f"images-{number}", shift=10 * number)
        return Loopback(folder.Deployment.open(tmp_path / "fed"), processes)

    return made


def records(deployment):
    """What the server has written down of the last run."""
    found = folder.Deployment.open(deployment.path)
    metrics = found.server / (found.run_folder or "none") / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def reasons(record):
    return {entry["client"]: entry["reason"] for entry in record["refused"]}


def test_a_run_whose_server_is_killed_twice_ends_as_if_nothing_had_been(federation, tmp_path, processes, capsys):
    # a round waits for both: for its server, a node that was shut out is gone until its next heartbeat
    loopback = federation(2, "method=moon", "rounds=3", "join_deadline=300", "min_clients=2")
    deployment = loopback.deployment
    data = {node.partition: f"folder:{tmp_path / f'images-{node.partition}'}" for node in deployment.nodes}
    logs = [loopback.start_node(node, DATA=data[node.partition]) for node in deployment.nodes]
    processes.wait_for(lambda: set(loopback.states().values()) == {"online"})

    def in_round(number):
        has_said(logs[0], f"ROUND {number}]")
        assert [record["round"] for record in records(deployment)] == list(range(1, number))

    code, text, error = call(capsys, "deploy", "run", deployment.path)
    assert code == 0, text + error
    in_round(2)
    for pid in processes.running("flwr-serverapp"):
        os.kill(pid, signal.SIGKILL)
    code, text, error = call(capsys, "deploy", "run", deployment.path, "--resume")
    assert code == 0, text + error
    in_round(3)
    os.kill(processes.started["server"].pid, signal.SIGKILL)
    processes.ends("server")
    with slammed_doors(deployment.port):  # stock SuperNodes would not come back from this
        for log in logs:
            has_said(log, "SSL")
    loopback.start_server()
    code, text, error = call(capsys, "deploy", "run", deployment.path, "--resume", "--follow")
    assert code == 0 and "round 3: 2 clients, 0 refused" in text and "round 2:" not in text, text + error

    grid = LocalGrid(2, **{"memory-dir": str(tmp_path / "memory")})
    for k, name in data.items():
        grid.contexts[grid.node_of(k)].node_config["data"] = name
    undisturbed = runs.run(deployment.config.replace(out=str(tmp_path / "undisturbed")), grid=grid).folder
    disturbed = deployment.server / folder.Deployment.open(deployment.path).run_folder
    assert (undisturbed / "metrics.jsonl").read_bytes() == (disturbed / "metrics.jsonl").read_bytes()
    models = [load_file(path / "model.safetensors") for path in (undisturbed, disturbed)]
    assert all(value.equal(models[1][name]) for name, value in models[0].items())

    code, text, _ = call(capsys, "deploy", "status", deployment.path, "--json")
    found = json.loads(text)
    assert found["round"]["round"] == 3 and found["round"]["federated"]["clients"]
    assert (disturbed / "MODEL_CARD.md").exists()
    everything = [file.read_bytes() for file in disturbed.rglob("*") if file.is_file()]
    assert not any(b"images-0" in content for content in everything)  # nothing of where data is


@contextlib.contextmanager
def slammed_doors(port):
    """Somebody who accepts connections and closes them at once."""
    with socket.create_server(("127.0.0.1", port)) as door:
        door.settimeout(0.2)
        over = threading.Event()

        def slam():
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    door.accept()[0].close()

        thread = threading.Thread(target=slam)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


# What other sites have installed: fedhpro with lines of their own at the end of a file.
ANOTHER_VERSION = {"version.py": '__version__ = "0.0.0"'}
ANOTHER_MODEL = {"models/cnn.py": "CNN.units = 64"}
GARBAGE = {
    "wire.py": """
from pathlib import Path

sound = compress

def compress(upload, kind):
    upload, first = sound(upload, kind), Path("sent-wrong-shapes")
    name = next(name for name in upload if name.startswith("model/"))
    if first.exists():
        return upload | {name: upload[name] * float("nan")}
    first.touch()
    return upload | {name: upload[name].flatten()}
"""
}
# A site whose machine fails while it trains in its second round: hello, train, evaluate, train.
FAILING = """
import time
from pathlib import Path

from fedhpro.data.own import open_own

CALLS = Path(__file__).with_name("calls")

def samples():
    with CALLS.open("a") as file:
        file.write("x")
    if len(CALLS.read_text()) == 4:
        CALLS.with_name("inside").touch()
        time.sleep(600)
    return open_own("folder:IMAGES", size=16)
"""


def installed(path, processes, **files):
    """A copy of the package with these lines added, for a node's PYTHONPATH."""
    package = shutil.copytree(processes.package / "fedhpro", path / "fedhpro")
    for name, lines in files.items():
        with (package / name).open("a") as file:
            file.write(f"\n{lines}\n")
    return path


def test_nodes_that_fail_come_late_differ_or_send_garbage(federation, tmp_path, processes, capsys):
    deadline = 60
    loopback = federation(6, "method=moon", "rounds=100", f"round_deadline={deadline}", f"join_deadline={deadline}")
    deployment = loopback.deployment
    sound, failing, late, old, other, garbage = deployment.nodes
    here = {"DATA": "python:failing:samples", "PYTHONPATH": f"{processes.package}:{tmp_path}"}
    (tmp_path / "failing.py").write_text(FAILING.replace("IMAGES", str(tmp_path / "images-1")))
    special = {failing.name: here}
    for node, files in ((old, ANOTHER_VERSION), (other, ANOTHER_MODEL), (garbage, GARBAGE)):
        special[node.name] = {"PYTHONPATH": installed(tmp_path / node.name, processes, **files)}

    def start(node):
        environment = {"DATA": f"folder:{tmp_path / f'images-{node.partition}'}"} | special.get(node.name, {})
        return loopback.start_node(node, **environment)

    for node in (sound, failing, old, other, garbage):
        start(node)
    processes.wait_for(lambda: list(loopback.states().values()).count("online") == 5)
    code, text, error = call(capsys, "deploy", "run", deployment.path)
    assert code == 0, text + error
    number = text.split()[2].rstrip(";")

    processes.wait_for(lambda: len(records(deployment)) == 1)
    start(late)
    processes.wait_for((tmp_path / "inside").exists)
    processes.stop(failing.name, signal.SIGKILL)
    killed = time.monotonic()
    start(failing)
    processes.wait_for(lambda: len(records(deployment)) == 2)
    assert time.monotonic() - killed < deadline + 30
    never = {old.partition, other.partition, garbage.partition}
    processes.wait_for(lambda: reasons(records(deployment)[-1]).keys() == never)
    code, text, _ = call(capsys, "deploy", "stop", deployment.path, number)
    assert code == 0 and f"stopped run {number}" in text
    code, log, _ = call(capsys, "deploy", "log", deployment.path, number)

    history = records(deployment)
    first, second = reasons(history[0]), reasons(history[1])
    assert first.keys() == {late.partition, *never}
    assert first[late.partition] == "no node of this client is connected"
    assert first[old.partition] == f"it has fedhpro 0.0.0, and this run {__version__}"
    assert first[other.partition] == "it has another model or config than this run"
    assert "shape" in first[garbage.partition]
    assert second[failing.partition].startswith(
        (f"no answer within {deadline} s", "Flower has no reply of it: Error: Node")
    )
    assert "not finite" in second[garbage.partition]
    assert "has lost what it kept" not in log  # the failing node went on from what it kept of round 1

    run_folder = deployment.server / folder.Deployment.open(deployment.path).run_folder
    code, text, error = call(capsys, "report", run_folder)
    assert code == 0, error
    report = html.unescape((run_folder / "report.html").read_text())
    for reason in (*first.values(), *second.values()):
        assert reason in log and reason in report
    code, text, _ = call(capsys, "deploy", "status", deployment.path)
    assert "refused: client 3: it has fedhpro 0.0.0" in text
