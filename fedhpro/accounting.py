"""What a run costs: bytes by tensor, FLOPs, seconds by phase, peak memory.

A FLOP is an addition or a multiplication in a convolution or a matrix product: two for each multiply-add. What works
element by element (normalisation, activations, optimiser) is not counted. Counting computes nothing: a client's step is
taken on tensors without storage, three times, which gives it for every batch size.
"""

from __future__ import annotations

import copy
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from . import nearest
from .data.batches import epoch
from .methods.base import Tensors
from .models.base import Net
from .training import section
from .wire import num_bytes

if TYPE_CHECKING:
    from .federation import Federation

Record = dict[str, Any]
T = TypeVar("T")
VALUES = ("model/", "report/", "nearest/")  # what an upload is for, beside counts and losses


class Stopwatch:
    """Seconds by phase: a lap is the phase that ends with it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


def tensor_table(sent: Tensors, upload: Tensors) -> list[Record]:
    """Every tensor that a client gets and sends in a round."""
    return [
        {
            "tensor": name,
            "direction": direction,
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "bytes": num_bytes({name: value}),
        }
        for direction, tensors in (("down", sent), ("up", upload))
        for name, value in tensors.items()
    ]


def peak_memory_mb(processes: Sequence[int] = ()) -> dict[str, float]:
    """The most that this process, the largest of those given, and the GPU ever held; shared pages count in each."""
    found = {"process": _peak_mb("self")}
    if workers := [peak for pid in processes if (peak := _peak_mb(str(pid))) > 0]:
        found["largest_worker"] = max(workers)
    if torch.cuda.is_initialized():
        found["gpu"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return found


def _peak_mb(process: str) -> float:
    """Of Linux's own bookkeeping: getrusage would also count what a parent held before it started us."""
    try:
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    except OSError:
        peak = None
    if peak:
        return round(int(peak[1]) / 1024, 1)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1) if process == "self" else 0.0


# FLOPs


def counted(function: Callable[..., T], *arguments: Any) -> tuple[T, int]:
    """What the function returns, and the FLOPs that it took."""
    from torch.utils.flop_counter import FlopCounterMode  # not needed to start

    with FlopCounterMode(display=False) as counter:
        result = function(*arguments)
    return result, counter.get_total_flops()


@dataclass
class Sketch:
    """A client (methods/base.py) whose passes over its samples are counted and not made."""

    net: Net
    received: Tensors
    counts: Tensor
    memory: Tensors = field(default_factory=dict)
    rng: torch.Generator = field(default_factory=torch.Generator)
    passed: int = 0  # samples so far

    def features(self, limit: int | None = None, augment: bool = False) -> tuple[Tensor, Tensor]:
        counts = self.counts if limit is None else self.counts.clamp_max(limit)
        y = torch.arange(len(counts)).repeat_interleave(counts)
        self.passed += len(y)
        return torch.zeros(len(y), self.net.dim), y


class NetFlops:
    """The FLOPs of one architecture in a federation: per step of a batch size, and per sample in eval mode."""

    def __init__(self, federation: Federation, net: Net) -> None:
        self.method, self.extras = federation.method, section(federation.sent(), "extra")
        self.nearest = federation.config.nearest
        self.net = copy.deepcopy(net).to("meta")
        self.net.precision = None  # as many operations in any, and what has no storage cannot be cast
        if net.prior is not None:  # no part of the model, so that it stays behind
            self.net.prior = net.prior.to("meta")
        self.outline = copy.deepcopy(self.net)  # what a method may look at between the passes
        self.outline.classifier = nn.Linear(net.dim, net.num_classes)
        shape, self.text = federation.source.shape, federation.source.vocab is not None
        self.shape = shape
        client = Sketch(self.outline, self.extras, torch.ones(net.num_classes, dtype=torch.int64))
        with torch.no_grad():
            self.context = _on_meta(self.method.prepare(client))
            self.forward = counted(self.net.eval().features, self.batch(2))[1] // 2
            self.predict = counted(self.method.predict, self.net, self.batch(2), _on_meta(self.extras))[1] // 2
            self.predict += self.forward if self.nearest else 0
        self.steps = [counted(self.take_step, size)[1] for size in (2, 3, 4)]

    def batch(self, size: int) -> Tensor:
        return torch.empty(size, *self.shape, device="meta", dtype=torch.int64 if self.text else torch.float32)

    def take_step(self, size: int) -> None:
        labels = torch.empty(size, dtype=torch.int64, device="meta")
        frozen = dict.fromkeys(self.method.frozen, self.net)
        terms = self.method.loss(self.net.train(), frozen, self.batch(size), labels, self.context)
        torch.stack(list(terms.values())).sum().backward()

    def step(self, size: int) -> int:
        """Products are linear in the batch, similarities within it quadratic: a parabola through three counts."""
        two, three, four = self.steps
        return two + (size - 2) * (three - two) + (size - 2) * (size - 3) // 2 * (four - 2 * three + two)

    @torch.no_grad()
    def passes(self, labels: Tensor, epochs: int) -> int:
        """What a client with so many samples of each class does before, between and after the epochs."""
        client = Sketch(self.outline, self.extras, labels)

        def hooks() -> None:
            if self.nearest:
                nearest.report(client)
            context = self.method.prepare(client)
            for _ in range(epochs - 1):
                context = self.method.refresh(client, context)
            self.method.report(client, context)

        own = counted(hooks)[1]
        return own + client.passed * self.forward


def client_flops(federation: Federation) -> Record:
    """Of a step with a full batch; of each client's round, its steps and its other passes; of an evaluation."""
    settings, classes = federation.trainer.settings, federation.source.num_classes
    nets = [NetFlops(federation, net) for net in federation.nets]
    training, passes = [], []
    for k, client in enumerate(federation.clients):
        net = nets[federation.trainer.kind(k)]
        sizes = [len(rows) for rows in epoch(len(client.train), settings.batch_size, torch.Generator())]
        steps = settings.epochs * len(sizes) if settings.steps is None else settings.steps
        each = [net.step(size) for size in sizes]
        training.append(steps // len(sizes) * sum(each) + sum(each[: steps % len(sizes)]))
        passes.append(net.passes(torch.bincount(client.train.y, minlength=classes), -(-steps // len(sizes))))
    tests = [
        len(federation.trainer.tests[test.name]) * nets[federation.trainer.kind(test.client)].predict
        for test in federation.tests()
    ]
    full = nets[0].step(settings.batch_size)
    return {"step": full, "training": training, "passes": passes, "evaluation": sum(tests)}


# A run


def run_costs(federation: Federation, history: Sequence[Record], timings: Sequence[Record]) -> Record:
    """Seconds by phase, peak memory and FLOPs of all rounds; what cannot be counted is left out."""
    phases = [timing.get("phases", {}) for timing in timings]
    names = dict.fromkeys(name for phase in phases for name in phase)
    found: Record = {
        "seconds": {name: round(sum(phase.get(name, 0.0) for phase in phases), 2) for name in names},
        "peak_mb": peak_memory_mb([worker.process.pid for worker in getattr(federation.engine, "workers", [])]),
    }
    try:
        each = client_flops(federation)
    except Exception as error:  # a method of one's own may ask for values, and tensors without storage have none
        return found | {"flops": {"error": f"{type(error).__name__}: {error}"}}
    taking_part = [k for record in history for k in record["clients"]]
    total = {name: sum(each[name][k] for k in taking_part) for name in ("training", "passes")}
    total["server"] = (federation.server_flops or 0) * sum(record["aggregated"] for record in history)
    total["evaluation"] = each["evaluation"] * sum("accuracy" in record for record in history)
    return found | {"flops": {"step": each["step"]} | total}


def _on_meta(tensors: Tensors) -> Tensors:
    return {name: value.to("meta") for name, value in tensors.items()}
