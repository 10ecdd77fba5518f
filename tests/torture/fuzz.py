"""Hostile replies, by hypothesis and, where it is installed, atheris: refused with a reason, or really sound."""

from __future__ import annotations

import json
import logging
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import torch
from flower_grid import LocalGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedhpro import wire
from fedhpro.config import configure
from fedhpro.engines.cpu import HELD_OUT, Test
from fedhpro.engines.flower import Refused, from_record, to_record
from fedhpro.federation import Federation

from .common import SMALL, Figures, ended, in_a_child, prepare, promise


class Desk:
    """The server as far as a reply gets: decoded, checked, and handed over to the aggregation, or refused."""

    def __init__(self, **keys: Any) -> None:
        config = configure(**SMALL | {"engine": "flower", "join_deadline": 0.2, "round_deadline": 0.2} | keys)
        self.federation = Federation(config, grid=LocalGrid(len(Federation(config).clients)))
        self.federation.__enter__()
        self.engine: Any = self.federation.engine
        sent, k = self.federation.sent(), 0

        what = {"round": 1, "generation": 0, "held": []}
        message = self.engine.message("train", k, what, to_record(sent))
        identifier = self.engine.push(message)
        self.reply = self.engine.pull(identifier)
        self.about = dict(self.reply.content["about"])
        self.tensors = from_record(self.reply.content["tensors"])
        self.data = self.reply.content["tensors"]["safetensors"].data

    def judge(self, reply: Any) -> tuple[str | None, dict[str, torch.Tensor]]:
        """Why it is refused, or None; and what would be aggregated."""
        node = self.engine.nodes[0]
        answer = self.engine.answer(1, 0, reply)
        self.engine.nodes[0] = node  # who does not answer would have to say hello again
        return answer.error or self.federation.problem(0, answer.upload), answer.upload

    def message(self, about: Any, tensors: Any) -> Any:

        if isinstance(tensors, bytes):
            tensors = ArrayRecord({"safetensors": Array("uint8", (len(tensors),), "safetensors", tensors)})
        elif isinstance(tensors, dict):
            tensors = to_record(tensors)
        records = {"about": ConfigRecord(about) if about is not None else None, "tensors": tensors}
        return Message(RecordDict({k: v for k, v in records.items() if v is not None}), reply_to=self.reply)

    def sound(self, upload: dict[str, torch.Tensor]) -> bool:
        """Said in other words than wire.problem's: with numpy, tensor by tensor."""
        if set(upload) != set(self.tensors):
            return False
        for name, like in self.tensors.items():
            value, known = upload[name].numpy(), like.numpy()
            if value.shape != known.shape or value.dtype != known.dtype:
                return False
            if value.dtype.kind == "f" and not (abs(value) <= wire.LARGEST).all():
                return False
            if (name.endswith("running_var") or value.dtype.kind == "i") and (value < 0).any():
                return False
            if name.endswith("counts") and sum(value.tolist()) != len(self.federation.clients[0].train):
                return False
        return int(upload["samples"]) == len(self.federation.clients[0].train)


def hostile(desk: Desk) -> Any:
    """Replies of every kind of badness, and some that are only odd: (what it is, whether it is bad, the reply)."""

    names = sorted(desk.tensors)
    floats = [name for name in names if desk.tensors[name].is_floating_point()]
    counts = [name for name in names if name.endswith(("counts", "samples"))]
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]
    texts = st.text(max_size=20)
    scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | texts | st.binary(max_size=9)

    def reply(what: str, bad: bool | None, about: Any = desk.about, tensors: Any = desk.data) -> tuple[Any, ...]:
        return what, bad, desk.message(about, tensors)

    def place(name: str, index: int, value: float) -> dict[str, torch.Tensor]:
        tensor = desk.tensors[name].clone()
        tensor.view(-1)[index % tensor.numel()] = value
        return desk.tensors | {name: tensor}

    def reshaped(name: str, shape: list[int]) -> tuple[Any, ...]:
        same = tuple(shape) == tuple(desk.tensors[name].shape)
        value = torch.zeros(shape, dtype=desk.tensors[name].dtype)
        return reply("shape", None if same else True, tensors=desk.tensors | {name: value})

    def flipped(changes: list[tuple[int, int]], length: int) -> tuple[Any, ...]:
        data = bytearray(desk.data)
        for position, byte in changes:
            data[position % len(data)] ^= byte
        return reply("bytes", None, tensors=bytes(data[: len(data) - length] if length >= 0 else data + b"x" * -length))

    def headed(header: str, rest: bytes) -> tuple[Any, ...]:
        return reply("header", True, tensors=len(header.encode()).to_bytes(8, "little") + header.encode() + rest)

    def said(name: str, value: Any) -> tuple[Any, ...]:
        about = desk.about | {name: value}
        about = {key: v for key, v in about.items() if v is not None}
        same = type(value) is type(desk.about[name]) and value == desk.about[name]
        return reply(f"about {name}", None if same else True, about)

    def strange(kind: int) -> tuple[Any, ...]:
        array = Array("float32", (2,), "numpy", b"12345678")
        replies = [
            None,
            ValueError("it cannot be unpacked"),
            Message(Error(3, "x" * 10_000), reply_to=desk.reply),
            Message(RecordDict(), reply_to=desk.reply),
            Message(RecordDict({"about": MetricRecord({"client": 0})}), reply_to=desk.reply),
            desk.message(None, desk.data),
            desk.message(desk.about, None),
            desk.message(desk.about, MetricRecord({"a": 1})),
            desk.message(desk.about, ArrayRecord({"x": array})),
            desk.message(desk.about, ArrayRecord({"safetensors": array, "y": array})),
            desk.message(desk.about | {"error": "y" * 10_000}, desk.data),
            desk.message(desk.about, desk.data + bytes(10**6)),
            desk.message(desk.about, desk.tensors | {f"model/{i}": torch.zeros(1) for i in range(300)}),
            desk.message(desk.about, {}),
        ]
        return f"strange {kind}", True, replies[kind]

    name, index = st.sampled_from(names), st.integers(0, 10**6)
    other = st.integers(-(2**63), 2**63 - 1)
    old = st.integers(-9, 9).filter(lambda n: n != 1)
    session = desk.engine.session
    anything = st.dictionaries(texts, st.lists(st.integers(0, 2**70), max_size=3) | texts, max_size=3)
    return st.one_of(
        st.builds(lambda n, i, v: reply("value", True, tensors=place(n, i, v)), st.sampled_from(floats), index,
                  st.sampled_from([math.nan, math.inf, -math.inf, 1.1e12, -3e38])),
        st.builds(lambda n, i, v: reply("odd value", False, tensors=place(n, i, v)),
                  st.sampled_from([n for n in floats if not n.endswith("running_var")]), index,
                  st.floats(-1e6, 1e6, width=32) | st.sampled_from([1e-45, -1e-40, -0.0])),
        st.builds(lambda n, i, v: reply("count", None, tensors=place(n, i, v)), st.sampled_from(counts), index, other),
        st.builds(lambda n: reply("missing", True, tensors={k: v for k, v in desk.tensors.items() if k != n}), name),
        st.builds(lambda t: reply("unknown", True, tensors=desk.tensors | {f"{t}?": torch.zeros(1)}), texts),
        st.builds(reshaped, name, st.lists(st.integers(0, 9), max_size=4)),
        st.builds(lambda n, t: reply("type", None, tensors=desk.tensors | {n: desk.tensors[n].to(t)}), name,
                  st.sampled_from(dtypes)),
        st.builds(flipped, st.lists(st.tuples(index, st.integers(1, 255)), max_size=4),
                  st.integers(0, 40) | st.sampled_from([-1, -8, -(10**6)])),
        st.builds(headed, st.builds(json.dumps, anything) | texts, st.binary(max_size=40)),
        st.builds(said, st.sampled_from(["version", "digest", "client", "request"]), scalars),
        st.builds(lambda n: said("request", f"train {n} {session}"), old),
        st.builds(lambda n: said("request", f"{n} 1 {session}"), st.sampled_from(["query", "evaluate", "train 0"])),
        st.builds(lambda n: said("client", n), st.sampled_from([1, 2, -1, True, 0.0, "0"])),
        st.integers(0, 13).map(strange),
    )  # fmt: skip


def fuzz(short: bool) -> Figures:
    """Each reply is refused with a reason of one line, or sound; in whole rounds, the model is that of the honest."""

    logging.disable(logging.WARNING)
    started, total = time.monotonic(), 400 if short else 115_000
    kinds = [{"method": "fedproto", "exchange": "classifier"}, {"method": "fedhpro", "exchange": "model"}]
    shares = [0.9, 0.1]  # a reply with a whole model takes longer to check
    shares = [1.0] if short else shares
    figures: Figures = Figures()
    with tempfile.TemporaryDirectory(prefix="torture-") as place:
        halves = [(half, seed) for seed, half in enumerate(shares * (1 if short else 2))]
        pids = []
        for share, seed in halves:
            cases = round(total * share / (1 if short else 2))
            keys = kinds[seed % 2]
            pids.append(in_a_child(lambda c=cases, k=keys, s=seed: fuzz_replies(c, k, s, Path(place, str(s)))))
        promise(all(ended(pid) == 0 for pid in pids), "a hostile reply got through, or ended the server")
        found = Counter[str]()
        for path in Path(place).iterdir():
            found.update(json.loads(path.read_text()))
    figures["hostile replies (hypothesis)"] = sum(n for what, n in found.items() if what.startswith("case: "))
    figures["of them refused, each with a reason"] = found["refused"]
    figures["of them only odd, and rightly accepted"] = found["accepted"]
    figures["different reasons"] = sum(what.startswith("reason: ") for what in found)
    figures |= atheris(2_000 if short else 50_000)
    figures |= fuzz_greetings(50 if short else 5_000)
    figures |= fuzz_rounds(2 if short else 50)
    logging.disable(logging.NOTSET)
    return figures | {"server crashes": 0, "bad uploads aggregated": 0, "seconds": round(time.monotonic() - started)}


def fuzz_replies(cases: int, keys: dict[str, Any], seed: int, out: Path) -> None:

    desk, found = Desk(**keys), Counter[str]()

    @hypothesis.seed(seed)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile(desk))
    def judge(case: tuple[str, bool | None, Any]) -> None:
        what, bad, reply = case
        reason, upload = desk.judge(reply)
        found[f"case: {what}"] += 1
        if reason is None:
            found["accepted"] += 1
            promise(not bad and desk.sound(upload), f"{what} got through")
        else:
            found["refused"] += 1
            found[f"reason: {' '.join(word for word in reason.split() if word.isalpha())[:60]}"] += 1
            promise(bad is not False, f"{what} was refused: {reason}")
            promise("\n" not in reason and 0 < len(reason) < 600, f"{what}: no sentence")

    judge()
    promise(sum(n for what, n in found.items() if what.startswith("case: ")) >= cases, "fewer cases than asked for")
    out.write_text(json.dumps(found))


def atheris(cases: int) -> Figures:
    """Coverage-guided, where atheris is installed."""
    code = f"from torture.fuzz import fuzz_bytes; fuzz_bytes({cases})"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    if "No module named 'atheris'" in done.stderr:
        return {"cases of atheris": "not installed"}
    promise(done.returncode == 0, f"atheris: {done.stderr[-2000:]}")
    return {"cases of atheris": cases}


def fuzz_bytes(cases: int) -> None:

    import atheris

    logging.disable(logging.WARNING)
    prepare()
    with atheris.instrument_imports(include=["fedhpro.engines.flower", "fedhpro.wire"]):
        desk = Desk(method="fedproto", exchange="classifier")

    def one(data: bytes) -> None:
        provider = atheris.FuzzedDataProvider(data)
        whole = bytearray(desk.data)
        start = provider.ConsumeIntInRange(0, len(whole))
        new = provider.ConsumeBytes(60)
        if provider.ConsumeBool():
            whole[start : start + len(new)] = new
        else:
            whole = bytearray(new)
        reason, upload = desk.judge(desk.message(desk.about, bytes(whole)))
        promise(reason is not None or desk.sound(upload), "bytes got through")

    atheris.Setup([sys.argv[0], f"-runs={cases}", "-verbosity=0"], one)
    atheris.Fuzz()


def fuzz_greetings(cases: int) -> Figures:
    """Who says hello as whom, and tables of tests: nobody is taken for a client that it is not."""

    desk, rng = Desk(method="fedproto", exchange="classifier", evaluation="both"), random.Random(1)
    engine, C = desk.engine, 4
    welcome = Counter[str]()
    hello = desk.about | {"request": engine.name_of("query"), "samples": 12, "held_out": 3}
    values = [0, 1, 2, -1, 3, 10**18, True, "0", 0.0, math.nan, [1], b"0"]
    test = Test(f"{HELD_OUT}0")
    size = engine.test_size(test)
    for _ in range(cases):
        engine.nodes, engine.turned_away = {1: 699}, {}
        name = rng.choice(["client", "samples", "held_out", "digest", "version", "request"])
        about, value = dict(hello), rng.choice(values)
        about[name] = value
        node = rng.choice([699, 700, 5])
        engine.hear(node, desk.message(about, {} if rng.random() < 0.9 else desk.data))
        welcome["greetings"] += 1
        new = {k: n for k, n in engine.nodes.items() if k != 1}
        promise(engine.nodes[1] == 699, "a client was taken over")
        promise(not new or (type(about["client"]) is int and list(new) == [about["client"]]), "an invented client")
        tables = (
            {
                f"{rng.choice([0, 0, 1])}/{head}": torch.zeros(C, C, dtype=torch.int64)
                for head in engine.heads(desk.federation.sent())
            }
            if rng.random() < 0.01
            else {"0/head": torch.zeros(C, C, dtype=torch.int64)}
        )
        table = next(iter(tables.values()))
        table[rng.randrange(C), rng.randrange(C)] = rng.choice([size, size, size - 1, -1, 2**62, 0])
        try:
            for matrices in engine.confusions([test], dict(tables), ["head"]).values():
                promise(all(int(m.sum()) == size and int(m.min()) >= 0 for m in matrices.values()), "wrong table")
        except Refused:
            welcome["tables refused"] += 1
    return {"greetings and tables of tests": 2 * cases}


def fuzz_rounds(rounds: int) -> Figures:
    """Whole rounds in which most clients are hostile: the model is, to the bit, that of the honest ones."""

    keys = SMALL | {"engine": "flower", "method": "fedproto", "exchange": "classifier", "clients_per_domain": 10}
    keys |= {"samples_per_client": 12, "join_deadline": 0.2, "round_deadline": 5.0, "rounds": rounds, "patience": 10**6}
    keys |= {"evaluate_every": 10**6, "evaluation": "central"}
    desk = Desk(method="fedproto", exchange="classifier", clients_per_domain=10, samples_per_client=12)
    bad: list[Any] = []

    @hypothesis.seed(7)
    @settings(
        max_examples=16 * rounds * 3,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile(desk))
    def collect(case: tuple[str, bool | None, Any]) -> None:
        if case[1] and case[2] is not None:  # None: no answer, for which the server waits
            bad.append(case[2])

    collect()
    models, refused = [], 0
    for replies in ([ValueError("dropped")], bad):
        grid, rng = LocalGrid(20), random.Random(3)

        def meddle(message: Any, reply: Any, context: Any, replies: Any = replies, rng: Any = rng) -> Any:
            hostile = message.metadata.message_type == "train" and context.node_config["partition-id"] % 5
            return rng.choice(replies) if hostile else reply

        grid.meddle = meddle
        with Federation(configure(**keys), grid=grid) as federation:
            records = [federation.next_round() for _ in range(rounds)]
        models.append(federation.snapshot()[0])
        promise(all(len(record["refused"]) == 16 and record["aggregated"] for record in records), "not all refused")
        refused = sum(len(record["refused"]) for record in records)
    promise(all(torch.equal(models[0][name], models[1][name]) for name in models[0]), "hostile uploads had an effect")
    return {"rounds with 16 hostile clients of 20": rounds, "hostile uploads refused in them": refused}
