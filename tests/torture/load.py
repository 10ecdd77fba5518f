"""Many clients at once for minutes, with faults: no round is lost, and memory stays where it is."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_grid import LocalGrid
from flwr.app import Message

from fedhpro import runs
from fedhpro.callbacks import Callback
from fedhpro.config import configure
from fedhpro.methods.fedhpro_variants import FedHProVariants

from .common import SMALL, Figures, ended, in_a_child, promise


def load(short: bool, minutes: float = 10.0) -> Figures:
    """Both kinds of clients side by side, each with a server of its own."""
    seconds = 3.0 if short else 60.0 * minutes
    figures, kinds = Figures(), {"workers": load_workers, "grid": load_grid}
    with tempfile.TemporaryDirectory(prefix="torture-") as place:
        pids = {}
        for name, work in kinds.items():
            own = Path(place, name)
            own.mkdir()
            pids[name] = in_a_child(lambda work=work, own=own: work(seconds, own, 20 if short else 100))
        failed = [name for name, pid in pids.items() if ended(pid) != 0]
        promise(not failed, f"load on {' and '.join(failed)} failed")
        for name in kinds:
            found = json.loads(Path(place, name, "figures.json").read_text())
            figures |= {f"{name}: {what}": value for what, value in found.items()}
    return figures


LOAD = SMALL | {"method": "faulty", "samples_per_client": 12, "rounds": 10**6, "evaluate_every": 5, "patience": 10}


@dataclass(frozen=True)
class Faulty(FedHProVariants):
    """FedHPro with clients that die, fail, or send what cannot be used. In the server's own process, never."""

    name = "faulty"

    def report(self, client: Any, context: Any) -> Any:
        report, luck = super().report(client, context), random.SystemRandom().random()
        if os.getpid() == SERVER:
            return report
        if luck < 0.003:
            os.kill(os.getpid(), signal.SIGKILL)
        if luck < 0.01:
            raise OSError(errno.EIO, "its disk is gone")
        if luck < 0.02:
            report["gradients"] = report["gradients"] * math.nan
        if luck < 0.03:
            time.sleep(0.2)
        return report


SERVER = os.getpid()


class Watch(Callback):
    """Stops the run after so many seconds; memory and faults of each round on the way."""

    def __init__(self, seconds: float) -> None:
        self.end_at = time.monotonic() + seconds
        self.memory: list[tuple[int, float]] = []
        self.counts = Counter[str]()

    def round(self, record: dict[str, Any]) -> None:
        self.counts["rounds"] += 1
        self.counts["aggregated"] += record["aggregated"]
        self.counts["clients"] += len(record["clients"])
        self.counts["refused"] += len(record["refused"])
        self.counts["replaced"] += len(record.get("restarted", []))
        self.memory.append((record["round"], own_mb()))
        if time.monotonic() > self.end_at:
            raise KeyboardInterrupt

    def figures(self, folder: Path, seconds: float) -> Figures:
        recorded = [record["round"] for record in runs.RunFolder(folder).records()]
        promise(recorded == list(range(1, len(recorded) + 1)), "a round is missing in the metrics")
        promise(len(recorded) == self.counts["rounds"] == self.counts["aggregated"], "a round was lost")
        settled = self.memory[len(self.memory) // 3 :]
        return {
            "seconds": round(seconds),
            "rounds": self.counts["rounds"],
            "rounds lost": 0,
            "requests to clients": self.counts["clients"],
            "uploads refused": self.counts["refused"],
            "workers replaced": self.counts["replaced"],
            "MB after a third of the rounds": round(settled[0][1], 1),
            "MB at the end": round(settled[-1][1], 1),
            "slope in MB per 100 rounds": round(100 * slope(settled), 3),
        }


def slope(points: list[tuple[int, float]]) -> float:
    """Least squares."""
    n = len(points)
    x, y = (sum(values) / n for values in zip(*points, strict=True))
    spread = sum((a - x) ** 2 for a, _ in points)
    return sum((a - x) * (b - y) for a, b in points) / spread if spread else 0.0


def own_mb() -> float:
    """Of this process and its workers, without files and libraries: what they share is counted once (PSS)."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    total = 0
    for pid in ("self", *children):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total / 1024


def load_workers(seconds: float, place: Path, clients: int) -> None:
    global SERVER
    SERVER = os.getpid()
    watch, started = Watch(seconds), time.monotonic()
    keys = LOAD | {"workers": 2, "clients_per_domain": clients // 2, "evaluation": "both", "out": str(place / "run")}
    runs.run(configure(**keys), callbacks=[watch])
    figures = watch.figures(place / "run", time.monotonic() - started)
    (place / "figures.json").write_text(json.dumps({"clients at once": clients} | figures))


def load_grid(seconds: float, place: Path, clients: int) -> None:
    """Every request of a round is out before the first reply is looked for; replies come late, broken or never."""
    logging.disable(logging.WARNING)
    rng, faults = random.Random(0), Counter[str]()

    class FaultyGrid(LocalGrid):
        round = 0

        def push_messages(self, messages: Any) -> Any:
            """What nobody waited for any longer goes, as it does at a SuperLink."""
            messages = list(messages)
            about = messages[0].content["about"]
            if about.get("round", 0) > self.round:
                self.round = about["round"]
                self.seen.clear()
                late.clear()
                self.replies = {i: r for i, r in self.replies.items() if isinstance(r, Message) and is_greeting(r)}
            return super().push_messages(messages)

        def pull_messages(self, message_ids: Any) -> Any:
            now = time.monotonic()
            return super().pull_messages([i for i in message_ids if late.get(i, 0.0) < now])

        def get_node_ids(self) -> Any:
            if rng.random() < 0.02:
                away = rng.choice(self.online)
                self.online = [node for node in self.contexts if node != away]
                faults["away"] += 1
            return super().get_node_ids()

    late: dict[str, float] = {}

    def is_greeting(message: Message) -> bool:
        return message.metadata.message_type == "query"

    def meddle(message: Any, reply: Any, context: Any) -> Any:
        if is_greeting(message):
            return reply
        luck = rng.random()
        if luck < 0.01:
            faults["dropped"] += 1
            return None
        if luck < 0.03:
            faults["late"] += 1
            late[message.metadata.message_id] = time.monotonic() + rng.choice([0.3, 5.0])
        elif luck < 0.05:
            faults["garbage"] += 1
            return ValueError("it cannot be unpacked")
        elif luck < 0.06:
            faults["replayed"] += 1
            return last.get(context.node_id, reply)
        last[context.node_id] = reply
        return reply

    last: dict[int, Any] = {}
    grid = FaultyGrid(clients)
    grid.meddle = meddle
    watch, started = Watch(seconds), time.monotonic()
    keys = LOAD | {"method": "fedhpro", "engine": "flower", "clients_per_domain": clients // 2, "evaluation": "both"}
    keys |= {"round_deadline": 1.0, "join_deadline": 1.0, "out": str(place / "run")}
    runs.run(configure(**keys), callbacks=[watch], grid=grid)
    figures = watch.figures(place / "run", time.monotonic() - started)
    figures |= {"faults": dict(faults)}
    (place / "figures.json").write_text(json.dumps({"clients at once": clients} | figures))
