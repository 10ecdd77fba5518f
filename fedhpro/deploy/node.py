"""The node of a site: Flower's SuperNode and the process that trains, made to last.

In three things it is other than stock Flower 1.41:

- A stock SuperNode stops asking for work, while its process stays, as soon as TLS fails once: a server that was paused,
  killed within a handshake, or had an expired certificate has lost it for good. Here it tries until it is stopped.
- One that was killed and started again is refused, and ends, as long as the server believes it online: a minute. One
  whose key is not registered ends too. Here both wait.
- Flower starts Python for every message, which then imports torch. Here that process is a fork of one that has.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import httpx
from flwr.supercore.constant import TaskType
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult

from ..config import configure, parse
from .folder import DeployError

log = logging.getLogger("flwr")
HERE = "127.0.0.1"
SECRET = "runtime.secret"
NOT_YET = (
    "The server does not let this node in yet: the operator has not registered its key, or it was killed less than a "
    "minute ago"
)


def run(
    folder: Path, superlink: str, partition: int, data: str, memory: Path, port: int, require: str, insecure: bool
) -> NoReturn:
    """Take part until told to stop."""
    check_data(data)
    node_config = f"partition-id={partition}"
    if require:
        configure(**parse(require.split()))  # what can never be is said now
        node_config += f' require="{require}"'
    if data:
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        node_config += f' data="{data}" memory-dir="{memory}"'
    sys.argv = [
        "flower-supernode", "--superlink", superlink, "--isolation", "process", "--host", HERE, "--port", str(port),
        "--node-config", node_config,
    ]  # fmt: skip
    if insecure:
        sys.argv += ["--insecure"]
    else:
        sys.argv += [
            "--root-certificates", str(folder / "ca.crt"), "--auth-supernode-private-key", str(folder / "node.key"),
            "--trusted-entities", str(folder / "trusted.yaml"), "--superexec-auth-secret-file", str(folder / SECRET),
        ]  # fmt: skip
    secret, node = None if insecure else (folder / SECRET).read_bytes(), os.getpid()
    trainer = os.fork()
    if trainer == 0:
        execute(port, secret, node)
    threading.Thread(target=end_with, args=(trainer,), daemon=True).start()

    connection = importlib.import_module("flwr.supernode.fleet_http_connection")
    connection.make_simple_http_retry_invoker = patient_retries  # type: ignore[attr-defined]
    connection.HeartbeatSender = Heartbeat  # type: ignore[attr-defined]
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()
    log.error("the server does not know this node any more")
    os._exit(1)  # a thread of Flower would keep the process


def check_data(data: str) -> None:
    kind, _, path = data.partition(":")
    if data and kind not in ("folder", "csv", "python"):
        raise DeployError(f"DATA={data}: write folder:/path, csv:/path or python:module:function")
    if (kind == "folder" and not Path(path).is_dir()) or (kind == "csv" and not Path(path).is_file()):
        raise DeployError(f"DATA={data}: there is no such {'folder' if kind == 'folder' else 'file'}")


# The connection to the server


def patient_retries() -> RetryInvoker:
    """Flower's, except that what may pass is tried again, and that the reason is said."""
    invoker = make_simple_http_retry_invoker()
    gives_up, backs_off = invoker.should_giveup, invoker.on_backoff

    def should_give_up(error: Exception) -> bool:
        return not may_pass(error) and gives_up is not None and gives_up(error)

    def say(state: Any) -> None:
        log.warning(NOT_YET if is_not_active(state.exception) else f"The server cannot be reached: {state.exception}")
        if backs_off is not None:
            backs_off(state)

    invoker.should_giveup, invoker.on_backoff = should_give_up, say
    return invoker


def may_pass(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500 or is_not_active(error)
    return isinstance(error, httpx.TransportError)


def is_not_active(error: Exception | None) -> bool:
    """Whether the server knows no node of this key, or one that it believes online."""
    if not isinstance(error, httpx.HTTPStatusError):
        return False
    found = FlowerError.from_json(error.response.text)
    return found is not None and found.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED


class Heartbeat(HeartbeatSender):
    """One that goes on after an error, which would end the thread and leave the node offline."""

    def __init__(self, beat: Callable[[], bool]) -> None:
        def safe() -> bool:
            try:
                return beat()
            except Exception as error:
                log.warning("The server did not take this node's sign of life: %s", error)
                return False

        super().__init__(safe)


# The process that trains


class Forking(SubprocessExecutor):
    """A message's process is a fork of this one, which has imported what it needs."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type != TaskType.CLIENT_APP:
            return super().launch(spec)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # another thread only waits
            child = os.fork()
        if child == 0:
            serve_message(spec)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Take note of the ends of children, or they stay as zombies."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def serve_message(spec: ExecutionSpec) -> NoReturn:
    """What flwr-clientapp does."""
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    code = 1
    try:
        log.info("Start `flwr-clientapp` process")
        run_clientapp(spec.runtime_api_address, spec.token, spec.insecure, parent_pid=spec.parent_pid)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def execute(port: int, secret: bytes | None, node: int) -> NoReturn:
    """Flower's SuperExec: starts a process for each message that the SuperNode hands over."""
    for name in ("flwr.supernode.runtime.run_clientapp", "fedhpro.engines.flower", "fedhpro.federation"):
        importlib.import_module(name)
    superexec = importlib.import_module("flwr.supercore.superexec.run_superexec")
    superexec.get_executor = lambda *_, **__: Forking()  # type: ignore[attr-defined]
    os.environ["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.2"
    threading.Thread(target=end_without, args=(node,), daemon=True).start()
    try:
        superexec.run_superexec(f"{HERE}:{port}", True, superexec_auth_secret=secret)
    finally:
        os._exit(1)


def end_without(parent: int) -> None:
    """Flower's own watch wakes nobody who sleeps between two tries, for up to 20 seconds."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def end_with(child: int) -> None:
    """Without the process that trains, the node is of no use: better that it ends, and is started again."""
    os.waitpid(child, 0)
    time.sleep(10)  # where both were told to stop, the node takes its leave first
    log.error("the training process has ended")
    os._exit(1)
