"""Clients as nodes of Flower: simulated here (engine=flower), or on machines of their own (fedhpro deploy).

The federation's round is the same as on every engine; only how tensors get to clients and back is Flower's. So this is
an Engine over Flower's public Grid, and not one of its Strategies: a Strategy owns the loop over the rounds, and that
of its base class counts from 1, waits without limit for nodes, and keeps one ArrayRecord from round to round, where a
method of ours has a model, a state and a generator, and a checkpoint of them that a run goes on from.

A request to a node is named tensors (what `Federation.sent` gives) and a ConfigRecord; a reply is the same. All tensors
of a message are one array, in the format of safetensors: Flower stores and fetches each array by itself, with several
requests. A client is known by the partition id in its node's config; in a deployment its node's key must be the one
that was registered for that client. It has said hello, with its version and a digest of config and tensors, before it
is asked for anything else. A reply names the request that it answers, so that none of an earlier round is taken for it.
Uploads are folded in the order of dispatch, whatever order they come in.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import queue
import re
import shlex
import shutil
import tempfile
import threading
import time
import tomllib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# before flwr and ray are imported: nothing is reported, looked up or installed, and no port but on this machine
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # it would warn of what it will do one day
}
for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from flwr.app import DEFAULT_TTL, Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from google.protobuf.message import DecodeError  # noqa: E402

from .. import wire  # noqa: E402
from ..callbacks import Callback  # noqa: E402
from ..config import Config, configure, load, parse  # noqa: E402
from ..data.sites import SiteError, site_data  # noqa: E402
from ..data.sources import SITES, Split  # noqa: E402
from ..errors import ConfigError, FederationStalled, RunError, UserError  # noqa: E402
from ..files import packed, write_atomically  # noqa: E402
from ..memories import ClientMemories  # noqa: E402
from ..methods.base import Tensors  # noqa: E402
from ..progress import warnings  # noqa: E402
from ..training import LOSS  # noqa: E402
from ..version import __version__  # noqa: E402
from .cpu import HELD_OUT, Answer, InProcess, Memories, Record, Test, one_thread  # noqa: E402

if TYPE_CHECKING:
    from ..federation import Federation

log = logging.getLogger("fedhpro.flower")
SITES_DEADLINE = 600.0  # seconds for a round, where the config has none
POLLS = 0.05, 1.0  # seconds between two looks for replies: at first, and at most
ABOUT, TENSORS = "about", "tensors"  # the records of a message
PACKED = "safetensors"  # the one array of TENSORS
AHEAD = 8  # uploads that may wait in memory for one that is to be folded before them
HEADER = 512  # bytes of a message besides the tensors' own: at most so many, and for each tensor
MOST_SAMPLES = 10**9  # of a site
FOLDING = 60.0, 1.0  # seconds, and more for each client, that replies which came in time stay with the SuperLink


class Refused(Exception):
    """Why a reply, or its absence, is of no use."""


# --- named tensors as records --------------------------------------------------------------------------------------


def to_record(tensors: Tensors) -> ArrayRecord:
    if not tensors:
        return ArrayRecord()
    data = packed(tensors)
    return ArrayRecord({PACKED: Array("uint8", (len(data),), "safetensors", data)})


def from_record(record: Mapping[str, Array], most: int | None = None) -> Tensors:
    """Tensors of their own. Nothing is decoded of what is longer than `most` bytes, and a hostile header cannot make
    tensors larger than what was received: safetensors sees to it.
    """
    if not record:
        return {}
    if list(record) != [PACKED]:
        raise ValueError(f"they are not one array named {PACKED}")
    data = record[PACKED].data
    if most is not None and len(data) > most:
        raise ValueError(f"they are {len(data):,} bytes, and no more than {most:,} are expected")
    return safetensors.torch.load(data)


def most_bytes(schema: wire.Schema) -> int:
    """That tensors of this form take in a message."""
    return HEADER + sum(math.prod(shape) * dtype.itemsize + HEADER for shape, dtype in schema.values())


def digest_of(federation: Federation) -> str:
    """Two sides with the same digest have the same version, the same config, and tensors of the same form."""
    config = configure(**tomllib.loads(shared_text(federation.config)))  # once through text, as a client has it
    text = f"{__version__}\n{config.to_toml()}"
    for schema in (wire.schema_of(federation.sent()), federation.schema):
        text += f"{sorted((name, list(shape), str(dtype)) for name, (shape, dtype) in schema.items())}\n"
    return hashlib.sha256(text.encode()).hexdigest()


def shared_text(config: Config) -> str:
    """What clients get to know of the config: all but folders of the operator."""
    return config.model_copy(update={"out": "auto"}).to_toml()


# --- the server ----------------------------------------------------------------------------------------------------


@dataclass
class Registered:
    """A way to nodes whose keys are known, and which client each of them is."""

    grid: Grid
    clients: Mapping[int, int]


class FlowerEngine:
    def __init__(self, federation: Federation, grid: Grid | Registered) -> None:
        self.federation, self.config = federation, federation.config
        self.registered = grid.clients if isinstance(grid, Registered) else None
        self.grid = grid.grid if isinstance(grid, Registered) else grid
        self.restarted: list[Record] = []
        self.nodes: dict[int, int] = {}  # client -> the node that said hello as that client
        self.turned_away: dict[int, str] = {}  # client -> why its node is not one of these
        self.greetings: dict[int, str] = {}  # node -> the message that it has yet to answer
        sites = self.config.data == SITES  # what is simulated is slow, but does not get lost
        self.deadline = self.config.round_deadline or (SITES_DEADLINE if sites else float(DEFAULT_TTL))
        self.digest = digest_of(federation)
        self.text = shared_text(self.config)
        self.session = uuid.uuid4().hex
        self.held_out: dict[int, int] = {}  # client -> its samples for tests, where only it knows them
        self.upload = wire.schema_of(wire.compress(federation.upload, self.config.compress))  # as it travels
        everybody = range(len(federation.clients))
        self.join(everybody, len(everybody))
        if len(self.nodes) < self.config.min_clients:
            reasons = [f"client {k}: {reason}" for k, reason in sorted(self.turned_away.items())]
            raise FederationStalled(
                f"{len(self.nodes)} of {len(everybody)} clients joined within join_deadline="
                f"{self.config.join_deadline:g} seconds, and min_clients is {self.config.min_clients}"
                + "".join(f"; {reason}" for reason in reasons[:3])
            )

    def train(self, round: int, clients: Sequence[int], sent: Tensors, memories: Memories) -> Iterator[Answer]:
        self.join(clients, self.config.min_clients)
        if self.config.secure:
            yield from masked.train(self, round, clients, sent)
            return
        memory, record, messages = self.federation.memories, to_record(sent), {}
        for k in clients:
            if k in self.nodes:
                held = sorted(r for client, r in memory.pinned if client == k)
                what = {"round": round, "generation": memory.generations.get(k, 0), "held": held}
                messages[k] = self.message("train", k, what, record)
        replies = self.ask(messages, self.deadline)
        for k in clients:
            yield self.answer(round, k, next(replies)[1] if k in messages else None)

    def answer(self, round: int, k: int, reply: Message | Exception | None) -> Answer:
        try:
            if k not in self.nodes:
                raise Refused(self.turned_away.get(k, "no node of this client is connected"))
            about, tensors = self.read(reply, self.name_of("train", round), self.upload, k)
            schema = self.federation.schema
            tensors = {name: tensors[name] for name in schema if name in tensors} | tensors  # safetensors sorts names
            upload = wire.expand(tensors, self.config.compress, schema)
            self.note_memory(k, about)
            return Answer(k, upload, {}, None, about.get("remembered") is True, wire.num_bytes(tensors))
        except Refused as refused:
            log.warning("client %d is left out of this round: %s", k, refused)
            if reply is None:  # it hangs or is gone: it has to say hello again, or every request would wait for it
                self.nodes.pop(k, None)
            return Answer(k, {}, {}, str(refused))

    def note_memory(self, k: int, about: Mapping[str, Any]) -> None:
        expected, found = self.federation.memories.generations.get(k, 0), about.get("recalled")
        if found != expected:
            log.warning(
                "client %d has lost what it kept of round %d and went on from round %s", k, expected, _sentence(found)
            )

    def evaluate(self, tests: Sequence[Test], sent: Tensors, memories: Memories) -> list[Tensors]:
        """Sets of the server here; a client's samples, and a client's model, where they are."""
        local = InProcess(self.federation.trainer)
        remote: dict[int, list[Test]] = {}
        for test in tests:
            if test.owner is not None and test.owner in self.nodes:
                remote.setdefault(test.owner, []).append(test)
        record, messages, round = to_record(sent), {}, self.federation.round + 1
        heads, C = self.heads(sent) if remote else [], self.federation.source.num_classes
        for k, own in remote.items():
            what = {
                "round": round,
                "generation": self.federation.memories.generations.get(k, 0),
                "tests": [test.name for test in own],
                "private": [test.client is not None for test in own],
            }
            messages[k] = self.message("evaluate", k, what, record)
        found: dict[Test, Tensors] = {}
        for k, reply in self.ask(messages, self.deadline):
            try:
                tables: wire.Schema = {
                    f"{i}/{head}": ((C, C), torch.int64) for i in range(len(remote[k])) for head in heads
                }
                _, tensors = self.read(reply, self.name_of("evaluate", round), tables, k)
                found |= self.confusions(remote[k], tensors, heads)
            except Refused as refused:
                log.warning("client %d is not tested in this round: %s", k, refused)
        here = [test for test in tests if test.owner is None]
        found |= dict(zip(here, local.evaluate(here, sent, {}), strict=True))
        return [found.get(test, {}) for test in tests]

    def confusions(self, tests: Sequence[Test], tensors: Tensors, heads: Sequence[str]) -> dict[Test, Tensors]:
        """The matrices and the loss of each test, checked: a client may leave a test out, but not invent one."""
        C, found = self.federation.source.num_classes, {}
        for i, test in enumerate(tests):
            matrices = {head: tensors.pop(f"{i}/{head}") for head in heads if f"{i}/{head}" in tensors}
            for head, value in matrices.items():
                if head == LOSS:
                    if value.shape != () or value.dtype != torch.float64 or float(value) < 0:
                        raise Refused(f"{i}/{head} is no loss")
                    continue
                if value.shape != (C, C) or value.dtype != torch.int64 or bool((value < 0).any()):
                    raise Refused(f"{i}/{head} is no table of counts [{C}, {C}]")
                known = self.test_size(test)
                if bool((value > known).any()) or int(value.sum()) != known:
                    raise Refused(f"{i}/{head} is not of {known} samples")
            if len(matrices) == len(heads):
                found[test] = matrices
        if tensors:
            raise Refused(f"{_sentence(min(tensors))} is not expected")
        return found

    def test_size(self, test: Test) -> int:
        if self.config.data == SITES:
            assert test.owner is not None
            return self.held_out[test.owner]
        return len(self.federation.trainer.tests[test.name])

    def heads(self, sent: Tensors) -> list[str]:
        """The ways to predict, and LOSS, learnt from two blank samples."""
        trainer, source = self.federation.trainer, self.federation.source
        dtype = torch.uint8 if source.vocab is None else torch.int64
        blank = Split(torch.zeros(2, *source.shape, dtype=dtype), torch.zeros(2, dtype=torch.int64))
        trainer.tests["blank"] = blank
        with one_thread():
            found = trainer.evaluate("blank", None, sent, {})
        del trainer.tests["blank"]
        return list(found)

    def close(self) -> None:
        pass

    # messages

    def message(self, kind: str, k: int, what: Record, tensors: ArrayRecord | None = None) -> Message:
        seconds = self.deadline + FOLDING[0] + FOLDING[1] * len(self.nodes)
        return self._message(kind, self.nodes[k], what, seconds, tensors)

    def _message(
        self, kind: str, node: int, what: Record, seconds: float, tensors: ArrayRecord | None = None
    ) -> Message:
        memories = self.federation.memories
        request = what | {"config": self.text, "request": self.name_of(kind, what.get("round", 0))}
        if self.config.data == SITES:
            request["run"] = memories.run_id
        else:
            request["memories"] = str(memories.folder.absolute())
        content = RecordDict({ABOUT: ConfigRecord(request), TENSORS: tensors or ArrayRecord()})
        return Message(content, node, kind, ttl=seconds, group_id=str(what.get("round", "")))

    def ask(self, messages: Mapping[int, Message], seconds: float) -> Iterator[tuple[int, Message | Exception | None]]:
        """The replies in the order of the messages; None for what has not come after so many seconds. Those that come
        before their turn wait with the SuperLink, but for a few."""
        waiting = {k: identifier for k, message in messages.items() if (identifier := self.push(message))}
        arrived: dict[int, Message | Exception] = {}
        end, pause = time.monotonic() + seconds, POLLS[0]
        for k in messages:
            while k in waiting:
                for other, identifier in list(waiting.items())[: AHEAD + 1 - len(arrived)]:
                    if (reply := self.pull(identifier)) is not None:
                        arrived[other] = reply
                        del waiting[other]
                if k in waiting and time.monotonic() > end:
                    del waiting[k]
                elif k in waiting:
                    time.sleep(pause)
                    pause = min(pause * 1.5, POLLS[1])
            yield k, arrived.pop(k, None)

    def push(self, message: Message) -> str | None:
        return next(iter(self.grid.push_messages([message])), None)

    def pull(self, identifier: str) -> Message | Exception | None:
        """Each reply by itself: one that cannot be unpacked must not take others with it."""
        try:
            return next(iter(self.grid.pull_messages([identifier])), None)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, DecodeError) as error:
            return error

    def name_of(self, kind: str, round: int = 0) -> str:
        """What a reply must say that it answers: an old one, of this or an earlier start of the server, does not."""
        return f"{kind} {round} {self.session}"

    def read(
        self, reply: Message | Exception | None, request: str, schema: wire.Schema, k: int | None = None
    ) -> tuple[Record, Tensors]:
        """What a reply to a request says, and its tensors, no larger than those of the schema.

        Refused, with the reason, where it cannot be used; k: by the client that was asked.
        """
        try:
            return self._read(reply, request, schema, k)
        except Refused:
            raise
        except Exception as error:  # of bytes that anybody may have written
            raise Refused(f"its reply cannot be read: {_sentence(error)}") from None

    def _read(
        self, reply: Message | Exception | None, request: str, schema: wire.Schema, k: int | None
    ) -> tuple[Record, Tensors]:
        if reply is None:
            raise Refused(f"no answer within {self.deadline:g} seconds")
        if isinstance(reply, Exception):
            raise Refused(f"its reply cannot be unpacked: {_sentence(reply)}")
        if reply.has_error():
            raise Refused(f"Flower has no reply of it: {_sentence(reply.error.reason)} (code {reply.error.code})")
        about = reply.content.get(ABOUT)
        if not isinstance(about, ConfigRecord):
            raise Refused("its reply is not one of fedhpro's")
        if about.get("version") != __version__:
            raise Refused(f"it has fedhpro {_sentence(about.get('version'))}, and this run {__version__}")
        if "error" in about:
            raise Refused(_sentence(about["error"]))
        if about.get("digest") != self.digest:
            raise Refused("it has another model or config than this run")
        if about.get("request") != request:
            raise Refused(f"it answers another request: {_sentence(about.get('request'))}")
        if k is not None and (type(about.get("client")) is not int or about["client"] != k):
            raise Refused(f"it answers as client {_sentence(about.get('client'))}")
        tensors = reply.content.get(TENSORS)
        if not isinstance(tensors, ArrayRecord):
            raise Refused("its reply has no tensors")
        try:
            return dict(about), from_record(tensors, most_bytes(schema))
        except Exception as error:
            raise Refused(f"its tensors cannot be decoded: {_sentence(error)}") from None

    # who is there

    def join(self, wanted: Sequence[int], enough: int) -> None:
        """Greet nodes that are new, and wait until enough of the wanted clients are there, or join_deadline passes.

        Nobody waits for an answer when there are enough: such a node joins from a later round on.
        """
        end, heard = time.monotonic() + self.config.join_deadline, set[int]()
        while True:
            online = set(self.grid.get_node_ids())
            self.nodes = {k: node for k, node in self.nodes.items() if node in online}
            self.greetings = {node: greeting for node, greeting in self.greetings.items() if node in online}
            for node in sorted(online - set(self.nodes.values()) - set(self.greetings) - heard):
                if greeting := self.push(self._message("query", node, {}, self.config.join_deadline)):
                    self.greetings[node] = greeting
            for node, greeting in list(self.greetings.items()):
                if (reply := self.pull(greeting)) is not None:
                    del self.greetings[node]
                    heard.add(node)
                    self.hear(node, reply)
            if sum(k in self.nodes or k in self.turned_away for k in wanted) >= enough or time.monotonic() > end:
                return
            time.sleep(POLLS[0] if not heard else POLLS[1] / 2)

    def hear(self, node: int, reply: Message | Exception) -> None:
        k: Any = None
        try:
            if isinstance(reply, Message) and reply.has_content() and ABOUT in reply.content.config_records:
                k = reply.content.config_records[ABOUT].get("client")  # also of a node that cannot stay
            about, _ = self.read(reply, self.name_of("query"), {})
            self.welcome(node, k, about)
        except Refused as refused:
            log.warning("node %d (client %s) is turned away: %s", node, k, refused)
            client = k if self.registered is None else self.registered.get(node)
            if type(client) is int and client < len(self.federation.clients) and client not in self.nodes:
                self.turned_away[client] = str(refused)

    def welcome(self, node: int, k: Any, about: Mapping[str, Any]) -> None:
        count = len(self.federation.clients)
        if type(k) is not int or not 0 <= k < count:
            raise Refused(f"it says that it is client {_sentence(k)}, and they are 0 to {count - 1}")
        if self.registered is not None and self.registered.get(node) != k:
            raise Refused(f"it says that it is client {k}, but its key was registered for another, or not yet")
        if k in self.nodes:
            raise Refused(f"client {k} is there already, as node {self.nodes[k]}")
        samples, held_out = about.get("samples"), about.get("held_out")
        if type(samples) is not int or not 1 <= samples <= MOST_SAMPLES:
            raise Refused("it has no samples to train on")
        if type(held_out) is not int or not 0 <= held_out <= MOST_SAMPLES:
            raise Refused("it does not say how many samples it holds out")
        self.nodes[k], self.held_out[k] = node, held_out
        self.turned_away.pop(k, None)
        if self.config.data == SITES:
            self.federation.sizes[k] = samples


def _sentence(what: object) -> str:
    """The first words of what somebody sent, on one line."""
    return " ".join(str(what)[:1000].split())[:200]


class Simulation(FlowerEngine):
    """Flower's simulation runtime (ray) in this process: it runs in a thread, and its Grid is handed to this one."""

    def __init__(self, federation: Federation, workers: int) -> None:
        if federation.config.data == SITES:
            raise ConfigError("data=sites: only a deployment has sites, see `fedhpro deploy`")
        self.folder = tempfile.mkdtemp(prefix="fhp-")  # short: ray makes sockets in it
        self.home = os.environ.get("FLWR_HOME")
        os.environ["FLWR_HOME"] = self.folder
        self.done, grids = threading.Event(), queue.Queue[Grid | BaseException]()
        app = ServerApp()

        @app.main()
        def hand_over(grid: Grid, context: Context) -> None:
            grids.put(grid)
            self.done.wait()

        def simulate() -> None:
            try:
                _simulate(app, len(federation.clients), workers, self.folder)
            except BaseException as error:
                grids.put(error)

        self.thread = threading.Thread(target=simulate, name="flower-simulation", daemon=True)
        self.thread.start()
        try:
            grid = grids.get(timeout=federation.config.join_deadline)
            if isinstance(grid, BaseException):
                raise RunError(f"Flower's simulation did not start: {_sentence(grid)}")
            super().__init__(federation, grid)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.done.set()
        self.thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.home is None:
            os.environ.pop("FLWR_HOME", None)
        else:
            os.environ["FLWR_HOME"] = self.home


def _simulate(app: ServerApp, nodes: int, workers: int, folder: str) -> None:
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        app,
        client_app,
        nodes,
        backend_config={
            "init_args": {"num_cpus": workers, "_temp_dir": folder, "logging_level": logging.ERROR},
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
        },
    )


def server_app(config: Path) -> ServerApp:
    """The ServerApp of an app folder: the run of its config, gone on with where its run folder holds one."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        flowers = logging.getLogger("flwr")
        flowers.addFilter(one_sentence)
        flowers.propagate = False  # to the handler that `serve` makes: it would say everything twice
        keys = parse(shlex.split(str(context.run_config.get("keys", ""))))
        nodes = {int(node): k for node, k in json.loads(str(context.run_config.get("nodes", "{}"))).items()}
        serve(load(config).replace(**keys), Registered(grid, nodes) if nodes else grid)

    return app


def one_sentence(record: logging.LogRecord) -> bool:
    """A filter for Flower's log: a mistake that a user can mend needs no traceback."""
    if record.exc_info and isinstance(error := record.exc_info[1], UserError):
        record.msg, record.args, record.exc_info = "%s", (error,), None
    return True


def serve(config: Config, grid: Grid | Registered) -> None:
    from .. import runs

    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    callbacks = [RoundLog()]
    if (Path(config.out) / "config.toml").is_file():
        result = runs.resume(config.out, callbacks=callbacks, grid=grid, **runs.changes(config))
    else:
        result = runs.run(config, callbacks=callbacks, grid=grid)
    log.info("%s: the run folder is %s", result.status, result.folder.absolute())


class RoundLog(Callback):
    """A line for each round, in the log that `flwr log` shows."""

    def round(self, record: Record) -> None:
        refused = [f"client {entry['client']}: {entry['reason']}" for entry in record["refused"]]
        notes = warnings(record | {"refused": []})
        accuracy = record.get("accuracy", {}).get("AVG")
        log.info(
            "round %d: %d clients, %d refused%s%s",
            record["round"],
            len(record["clients"]),
            len(refused),
            "" if accuracy is None else f", accuracy {accuracy:.1f}",
            "".join(f"\n  {line}" for line in [*refused, *notes]),
        )


# --- the client ----------------------------------------------------------------------------------------------------


class Site:
    """Clients where their data is: a Federation like the server's, with this client's own samples in it."""

    def __init__(self, text: str) -> None:
        from ..federation import Federation

        self.federation = Federation(configure(**tomllib.loads(text)))
        self.digest = digest_of(self.federation)
        self.own = self.federation.config.data == SITES  # else data and disk are those of the config: a simulation
        self.read: set[int] = set()  # clients whose data is here

    def enter(self, k: int, node_config: Mapping[str, Any]) -> None:
        clients, tests = self.federation.clients, self.federation.trainer.tests
        if not 0 <= k < len(clients):
            raise SiteError(f"it is client {k}, and they are 0 to {len(clients) - 1}")
        if self.own and k not in self.read:
            clients[k] = site_data(node_config, self.federation.config)
            tests[f"{HELD_OUT}{k}"] = clients[k].held_out
            self.read.add(k)


site_of = functools.lru_cache(maxsize=1)(Site)  # a simulated client's process serves many messages


def client_of(node_config: Mapping[str, Any]) -> int:
    k = node_config.get("partition-id")
    if not isinstance(k, int):
        raise SiteError("its node config has no partition-id, a whole number from 0")
    return k


def own_folder(k: int, context: Context, request: Mapping[str, Any]) -> Path | None:
    """Of a site's client in this run, where its node names a place."""
    if (folder := context.node_config.get("memory-dir")) is None:
        return None
    if not re.fullmatch(r"[\w-]+", str(request["run"])):  # a server must not choose folders of a site
        raise SiteError("the server named a run that cannot be a folder's name")
    return Path(str(folder), str(request["run"]), f"client-{k}")


class Given:
    """The rounds of a run in which a site's client has given what it must not give twice: an upload with noise of its
    own, which others of the same round would average away, or the seed of a masked one. Kept where Keepsakes are.
    """

    def __init__(self, site: Site, k: int, context: Context, request: Mapping[str, Any]) -> None:
        folder = own_folder(k, context, request) if site.own else None
        self.site, self.state = site, context.state
        self.path = folder / "given.json" if folder else None

    def check(self, what: str, round: int) -> None:
        if not self.site.own:  # a simulation: a resumed run asks again, and gets the same bits
            return
        if round > self.site.federation.config.rounds:
            raise SiteError(f"this run has {self.site.federation.config.rounds} rounds, and not {round}")
        if round <= (last := self.rounds().get(what, 0)):
            raise SiteError(f"it has given {what} of round {last} already, and gives none of round {round}")

    def note(self, what: str, round: int) -> None:
        """Before it leaves."""
        self.check(what, round)
        rounds = self.rounds() | {what: round}
        if self.path is None:
            self.state["given"] = ConfigRecord({**rounds})
        else:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(rounds) + "\n")

    def rounds(self) -> dict[str, int]:
        if self.path is None:
            return dict(self.state.config_records.get("given", {}))  # type: ignore[arg-type]
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}


class Keepsakes:
    """What a client remembers between its rounds: in the folder that the node names (or, in a simulation, in that of
    the run), so that it survives a restart; else in Flower's Context, which lives as long as the node and the run.

    The server names the generation to go on from, so that a round that did not count leaves no trace.
    """

    def __init__(self, site: Site, k: int, context: Context, request: Mapping[str, Any]) -> None:
        self.k, self.state = k, context.state
        self.shared = not site.own  # with other clients and the server, who clears it
        if self.shared:
            self.files: ClientMemories | None = ClientMemories(Path(str(request["memories"])))
        elif folder := own_folder(k, context, request):
            self.files = ClientMemories(folder)
        else:
            self.files = None

    def recall(self, generation: int) -> tuple[Tensors, int]:
        """That generation, else the newest there is, and which one it is; 0: none."""
        if generation == 0:
            return {}, 0
        for number in dict.fromkeys([generation, *sorted(self.kept(), reverse=True)]):
            if self.files is None and f"round-{number}" in self.state:
                return from_record(self.state.array_records[f"round-{number}"]), number
            if self.files is not None:
                self.files.generations[self.k] = number
                with contextlib.suppress(RunError):
                    return self.files[self.k], number
        return {}, 0

    def keep(self, round: int, tensors: Tensors, held: Iterable[int]) -> None:
        if self.files is None:
            for number in self.kept() - set(held):
                del self.state[f"round-{number}"]
            self.state[f"round-{round}"] = to_record(tensors)
            return
        self.files.generations.pop(self.k, None)  # nothing is removed before the server has the upload
        self.files.store(self.k, round, tensors)
        if not self.shared:
            self.files.prune({(self.k, number) for number in held})

    def kept(self) -> set[int]:
        if self.files is None:
            names = [name for name in self.state if name.startswith("round-")]
        else:
            names = [path.stem for path in self.files.folder.glob(f"client-{self.k}-round-*.safetensors")]
        return {int(name.rpartition("-")[2]) for name in names}


client_app = ClientApp()
Work = Callable[[Site, int, Context, Mapping[str, Any], Tensors], tuple[Record, Tensors]]


def _reply(message: Message, context: Context, work: Work) -> Message:
    """Whatever happens, an answer that says who it is from."""
    about: Record = {"version": __version__}
    tensors: Tensors = {}
    private = True  # until it is known that this is a simulation
    try:
        about["client"] = k = client_of(context.node_config)
        request = message.content.config_records[ABOUT]
        about["request"] = str(request["request"])
        with one_thread():
            text = str(request["config"])
            if "data" in context.node_config and tomllib.loads(text).get("data") != SITES:
                raise SiteError(f"its data is its own: the server's config must have data={SITES}")
            check_required(str(context.node_config.get("require", "")), text)
            site = site_of(text)
            private, about["digest"] = site.own, site.digest
            site.enter(k, context.node_config)
            more, tensors = work(site, k, context, request, from_record(message.content.array_records[TENSORS]))
        about |= more
    except Exception as error:
        plain = isinstance(error, UserError)  # a mistake that somebody can mend needs no traceback
        log.error("this request could not be served%s", f": {error}" if plain else "", exc_info=not plain)
        about["error"] = _may_leave(error, private)
    content = RecordDict({ABOUT: ConfigRecord(about), TENSORS: to_record(tensors)})
    return Message(content, reply_to=message)


def check_required(required: str, text: str) -> None:
    """Whether the server's config has what this site asks for: the keys that it requires would change nothing."""
    if required:
        config = configure(**tomllib.loads(text))
        try:
            satisfied = config.replace(**parse(required.split())) == config
        except ConfigError:  # keys of another method, or settings that do not go with the others
            satisfied = False
        if not satisfied:
            raise SiteError(f"this site takes part only with {required}")


def answered(work: Work) -> Callable[[Message, Context], Message]:
    """A kind of request, by the work that it asks of a client."""
    return lambda message, context: _reply(message, context, work)


def _may_leave(error: Exception, private: bool) -> str:
    """Of trouble at a site, no more than what kind it is: a sentence may have a path or a name in it."""
    if isinstance(error, (SiteError, ConfigError)) or (isinstance(error, UserError) and not private):
        return str(error)
    return f"{type(error).__name__} at the site, whose log says more" if private else f"{type(error).__name__}: {error}"


@client_app.query()
@answered
def hello(
    site: Site, k: int, context: Context, request: Mapping[str, Any], received: Tensors
) -> tuple[Record, Tensors]:
    client = site.federation.clients[k]
    if site.federation.withheld:  # and how many it holds out would tell how many it has
        return {"samples": 1, "held_out": 0}, {}
    return {"samples": len(client.train), "held_out": len(client.held_out)}, {}


@client_app.train()
@answered
def train(
    site: Site, k: int, context: Context, request: Mapping[str, Any], received: Tensors
) -> tuple[Record, Tensors]:
    if site.federation.config.secure:
        raise SiteError("what it sends is to be masked: it does not train for a server that does not ask for that")
    about, upload = trained(site, k, context, request, received)
    return about, wire.compress(upload, site.federation.config.compress)


def trained(
    site: Site, k: int, context: Context, request: Mapping[str, Any], received: Tensors
) -> tuple[Record, Tensors]:
    round, generation = int(request["round"]), int(request["generation"])
    keepsakes, given = Keepsakes(site, k, context, request), Given(site, k, context, request)
    noised = site.federation.config.privacy == "local"
    if noised:
        given.check("an upload", round)
    memory, recalled = keepsakes.recall(generation)
    upload, memory = site.federation.trainer.update(round, k, received, memory)
    if memory:
        keepsakes.keep(round, memory, [*request["held"], generation])
    if noised:
        given.note("an upload", round)
    return {"remembered": bool(memory), "recalled": recalled}, upload


@client_app.evaluate()
@answered
def evaluate(
    site: Site, k: int, context: Context, request: Mapping[str, Any], received: Tensors
) -> tuple[Record, Tensors]:
    """The global model, or this client's own, on its held-out samples: tables of counts, and the loss."""
    if site.own and site.federation.config.evaluation not in ("federated", "both"):
        raise SiteError("this run has no evaluation at the sites: nothing is told of its held-out samples")
    memory, _ = Keepsakes(site, k, context, request).recall(int(request["generation"]))
    trainer, tables = site.federation.trainer, Tensors()
    for i, (name, private) in enumerate(zip(request["tests"], request["private"], strict=True)):
        if len(trainer.tests[name]):
            found = trainer.evaluate(name, k if private else None, received, memory if private else {})
            tables |= {f"{i}/{head}": table for head, table in found.items()}
    return {}, tables


from . import masked  # noqa: E402  (its requests belong to client_app, which has to be there first)
