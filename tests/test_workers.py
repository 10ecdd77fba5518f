"""Worker processes that are killed: the run goes on, to the same bits; a client that always kills them is left out."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch
from conftest import TINY
from rich.console import Console

from fedhpro import methods, runs
from fedhpro.config import configure
from fedhpro.engines import cpu
from fedhpro.errors import FederationStalled
from fedhpro.federation import Federation
from fedhpro.methods.moon import Moon
from fedhpro.progress import Terminal

PARENT = os.getpid()
LARGE = 1  # the client with most samples
KEYS = TINY | {"method": "mortal", "workers": 2, "rounds": 3, "evaluation": "both"}


def die():
    if os.getpid() != PARENT:  # the rehearsal is in the test's own process
        os.kill(os.getpid(), signal.SIGKILL)


def once(flag):
    """Die, unless some worker did so before."""
    if os.getpid() == PARENT:
        return
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return
    die()


def never(large):
    pass


@pytest.fixture
def mortal():
    """MOON, whose clients remember, with a place to die in training and one in testing: both know who is large."""

    @dataclass(frozen=True)
    class Mortal(Moon):
        name = "mortal"

        def report(self, client, context):
            Mortal.training(len(client.data) == 16)  # what the client of 20 samples trains on
            return super().report(client, context)

        def predict(self, net, x, received):
            Mortal.testing(len(x) == 4)  # and what it holds out
            return super().predict(net, x, received)

    Mortal.training = Mortal.testing = staticmethod(never)
    yield Mortal
    del methods.METHODS["mortal"]


def records(source, **keys):
    with Federation(configure(**(KEYS | keys)), source) as federation:
        return list(federation.rounds())


def without(history, *names):
    return [{name: value for name, value in record.items() if name not in names} for record in history]


@pytest.mark.parametrize("place", ["training", "testing"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_once_changes_nothing(tiny_source, tmp_path, mortal, place, workers):
    undisturbed = records(tiny_source, workers=0)
    setattr(mortal, place, staticmethod(lambda large: once(tmp_path / "died") if large else None))
    disturbed = records(tiny_source, workers=workers)
    assert json.dumps(without(disturbed, "restarted")) == json.dumps(undisturbed)
    entries = [entry for record in disturbed for entry in record.get("restarted", [])]
    expected = {"client": LARGE, "exit_code": -9} | ({"test": f"held-out/{LARGE}"} if place == "testing" else {})
    assert entries == [expected] and "restarted" in disturbed[0] and "restarted" not in disturbed[1]


def test_a_client_that_always_kills_its_worker_is_refused_and_the_others_go_on(tiny_source, mortal):
    mortal.training = staticmethod(lambda large: die() if large else None)
    history = records(tiny_source)
    for record in history:
        assert record["refused"] == [
            {"client": LARGE, "reason": "its training ended 3 worker processes, the last with exit code -9"}
        ]
        assert record["restarted"] == 3 * [{"client": LARGE, "exit_code": -9}] and record["aggregated"]

    def fail(large):
        if large:
            raise OSError

    mortal.training = staticmethod(fail)  # the other clients' part is as if it had failed in any other way
    failed = records(tiny_source, workers=0)
    assert json.dumps(without(history, "restarted", "refused")) == json.dumps(without(failed, "refused"))


def test_a_client_whose_test_always_kills_its_worker_is_left_out_of_the_accuracies(tiny_source, mortal):
    undisturbed = records(tiny_source)
    mortal.testing = staticmethod(lambda large: die() if large else None)
    history = records(tiny_source)
    for record, other in zip(history, undisturbed, strict=True):
        assert record["untested"] == [{"client": LARGE, "test": f"held-out/{LARGE}"}]
        assert record["restarted"] == 3 * [{"client": LARGE, "test": f"held-out/{LARGE}", "exit_code": -9}]
        assert record["federated"] != other["federated"] and record["accuracy"] == other["accuracy"]
        assert record["loss"] == other["loss"]


def test_a_test_set_of_the_server_that_always_kills_its_worker_ends_the_run(tiny_source, mortal):
    mortal.testing = staticmethod(lambda large: die())
    sentence = (
        r"^testing on server/dark ended 3 worker processes, the last with exit code -9; .* `fedhpro resume` [^\n]*$"
    )
    with pytest.raises(cpu.WorkerDied, match=sentence):
        records(tiny_source, evaluation="central", workers=1)


def test_all_clients_kill_their_workers(tiny_source, mortal):
    mortal.training = staticmethod(lambda large: die())
    with pytest.raises(FederationStalled, match="its training ended 3 worker processes"):
        records(tiny_source, patience=1)


def test_what_a_killed_worker_wrote_by_halves_is_not_taken(tiny_source, tmp_path, mortal, monkeypatch):
    undisturbed = records(tiny_source, workers=0)
    write = cpu.SharedTensors.write

    def by_halves(self, tensors, kind=0):
        if os.getpid() != PARENT and len(tensors) > 5:
            write(self, {name: torch.full_like(value, 7) for name, value in list(tensors.items())[:5]}, kind)
            once(tmp_path / "died")
        write(self, tensors, kind)

    monkeypatch.setattr(cpu.SharedTensors, "write", by_halves)
    disturbed = records(tiny_source)
    assert len(disturbed[0]["restarted"]) == 1
    assert json.dumps(without(disturbed, "restarted")) == json.dumps(undisturbed)


def test_a_worker_killed_while_it_was_idle_and_one_in_a_round_that_was_broken_off(tiny_source):
    def stop(done, total):
        raise KeyboardInterrupt

    keys = TINY | {"rounds": 3, "workers": 2}
    with Federation(configure(**(keys | {"workers": 0})), tiny_source) as federation:
        undisturbed = list(federation.rounds())
    with Federation(configure(**keys), tiny_source) as federation:
        first = federation.next_round()
        idle = federation.engine.workers[0].process
        idle.kill()
        idle.join()
        with pytest.raises(KeyboardInterrupt):
            federation.next_round(stop)
        assert {worker.process.pid for worker in federation.engine.workers} & {idle.pid} == set()
        federation.engine.restarted = []
        assert [first, *federation.rounds()] == undisturbed


def test_when_no_worker_can_be_started(tiny_source, monkeypatch):
    with Federation(configure(**(TINY | {"workers": 2})), tiny_source) as federation:
        federation.engine.workers[0].process.kill()

        def fork():
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(os, "fork", fork)
        with pytest.raises(
            cpu.WorkerDied, match="no worker process can be started: Cannot allocate memory; the finished"
        ):
            federation.next_round()


def test_no_worker_is_left_behind(tiny_source, tmp_path, mortal):
    mortal.training = staticmethod(lambda large: once(tmp_path / "died"))
    with Federation(configure(**KEYS), tiny_source) as federation:
        before = [worker.process for worker in federation.engine.workers]
        assert federation.next_round()["restarted"]
        after = [worker.process for worker in federation.engine.workers]
    assert all(process.exitcode is not None for process in before + after)
    assert [process.exitcode for process in after] == [0, 0]  # each noticed that its pipe was closed


def test_the_terminal_says_so(tiny_source, tmp_path, mortal):
    mortal.training = staticmethod(lambda large: die() if large else None)
    mortal.testing = staticmethod(lambda large: die() if large else None)
    text = io.StringIO()
    terminal = Terminal(Console(file=text, width=200))
    result = runs.run(
        configure(**(KEYS | {"rounds": 1}), out=str(tmp_path / "run")), source=tiny_source, callbacks=[terminal]
    )
    assert "round 1: refused client 1: its training ended 3 worker processes" in text.getvalue()
    assert "round 1: a worker process ended and was replaced (client 1, exit code -9), and 5 more" in text.getvalue()
    assert "round 1: testing client 1 on held-out/1 failed, which the accuracies leave out" in text.getvalue()
    assert result.status == "finished"


@pytest.mark.slow
def test_sigterm_is_like_ctrl_c(tmp_path):
    command = [
        sys.executable,
        "-m",
        "fedhpro",
        "run",
        "rounds=50",
        "local_epochs=1",
        "--quiet",
        f"out={tmp_path / 'run'}",
    ]
    victim = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists():
        assert victim.poll() is None
        time.sleep(0.05)
    victim.terminate()
    _, error = victim.communicate()
    assert victim.returncode == 130 and "fedhpro resume" in error and "Traceback" not in error
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"
