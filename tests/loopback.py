"""A real federation on loopback: its processes, all of which are stopped again, its server, its nodes, their images."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedhpro import cli
from fedhpro.deploy import control, folder

PATIENCE = 300  # seconds: no test waits so long unless something is wrong, however busy the machine is


class Processes:
    """Starts programs with an environment that marks them and their children, and stops them all."""

    def __init__(self, path):
        self.path, self.started = path, {}
        bin_folder = Path(sys.executable).parent
        self.package = Path(cli.__file__).parents[1]
        self.environment = os.environ | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(self.package), "OMP_NUM_THREADS": "1",
            "FEDHPRO_TEST": str(path),
        }  # fmt: skip

    def start(self, name, *command, **environment):
        log = self.path / f"{name}.log"
        with log.open("ab") as file:
            self.started[name] = subprocess.Popen(
                [str(part) for part in command], stdout=file, stderr=file, start_new_session=True,
                env=self.environment | {key: str(value) for key, value in environment.items()},
            )  # fmt: skip
        return log

    def wait_for(self, condition):
        """Wait as long as the programs live that were started, and not been told to stop."""

        def met():
            if ended := [name for name, process in self.started.items() if process.poll() is not None]:
                pytest.fail(f"{ended[0]} has ended:\n{(self.path / f'{ended[0]}.log').read_text()[-3000:]}")
            return condition()

        return wait_for(met, PATIENCE)

    def ends(self, name):
        """Wait until a program has stopped by itself; its helpers are stopped with it."""
        wait_for(lambda: self.started[name].poll() is not None, PATIENCE)
        self.stop(name)

    def stop(self, name, kind=signal.SIGTERM):
        """The program and all that it started."""
        process = self.started.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)

    def close(self):
        for process in self.started.values():  # all at once, since each takes its time
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for name in list(self.started):
            self.stop(name)
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: not self.running(), 15)
        for pid in (left := self.running()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes were left over: {left}"

    def running(self, words=""):
        """Those that were started here, or by what was started here, with these words in their command line."""
        mark, found = f"FEDHPRO_TEST={self.path}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found += [int(entry.name)] if words.encode() in (entry / "cmdline").read_bytes() else []
        return found


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.1)
    return found


def has_said(log, words):
    """Wait for words in a log; fail with the log where they do not come."""
    try:
        wait_for(lambda: words in log.read_text(errors="replace"), PATIENCE)
    except TimeoutError:
        pytest.fail(f"{words!r} is not in {log.name}:\n{log.read_text(errors='replace')[-3000:]}")


class Loopback:
    """A deployment with its server running and its nodes registered."""

    def __init__(self, deployment, processes):
        self.deployment, self.processes = deployment, processes
        self.start_server()
        if not deployment.insecure:
            with control.Control(deployment) as operator:
                assert operator.register() == [node.name for node in deployment.nodes]

    def start_server(self):
        def answers():
            with contextlib.suppress(folder.DeployError), control.Control(self.deployment) as operator:
                operator.nodes()
                return True

        self.processes.start("server", self.deployment.server / "start.sh")
        self.processes.wait_for(answers)

    def start_node(self, node, **environment):
        site = self.deployment.site(node)
        return self.processes.start(node.name, site / "start.sh", RUNTIME_PORT=free_port(), **environment)

    def start_nodes(self):
        """All of them; when they are connected, their logs."""
        logs = [self.start_node(node) for node in self.deployment.nodes]
        self.processes.wait_for(lambda: list(self.states().values()) == ["online"] * len(logs))
        return logs

    def states(self):
        with control.Control(folder.Deployment.open(self.deployment.path)) as operator:
            return {node.name: node.status for node in operator.nodes()}


def write_images(path, shift, count=12):
    """Two classes of 16x16 images: bright on the left, bright on the right."""
    rng = np.random.default_rng(shift)
    for number, name in enumerate(("left", "right")):
        (path / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 60, (16, 16, 3), dtype=np.uint8)
            pixels[:, 8 * number : 8 * number + 8] += 120 + shift
            Image.fromarray(pixels).save(path / name / f"{i}.png")
