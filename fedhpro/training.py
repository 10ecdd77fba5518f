"""The local round of a client: load, prepare, THE training loop, report. A LocalTrainer serves clients in turn."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from . import nearest
from .attacks import Attack
from .client import EVAL_BATCH, LocalClient
from .data.batches import Transform
from .data.clients import ClientData, Samples
from .data.sources import Split
from .methods.base import Method, Tensors
from .models.base import Net
from .privacy import Privacy
from .randomness import generator
from .sgd import SGD

LOSS = "loss"  # beside the ways to predict in what an evaluation finds


@dataclass(frozen=True)
class LocalSettings:
    epochs: int
    steps: int | None  # where given, so many steps instead of epochs
    batch_size: int
    lr: float
    lr_schedule: Literal["constant", "cosine", "exponential"]
    lr_decay: float
    rounds: int
    momentum: float
    weight_decay: float
    optimizer: Literal["sgd", "adam"]
    balanced: bool = False  # cross-entropy knows how frequent each class is at the client
    nearest: bool = False  # class means of the received model are sent along

    def lr_of(self, round: int) -> float:
        """The learning rate of a round, counted from 1."""
        done = max(0, round - 1)
        if self.lr_schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * done / self.rounds)) / 2
        return self.lr * self.lr_decay**done if self.lr_schedule == "exponential" else self.lr


def train(
    client: LocalClient,
    method: Method,
    settings: LocalSettings,
    rng: torch.Generator,
    take_step: Callable[[Any, Tensors], None],
) -> tuple[Tensors, int]:
    """Local training: `take_step` on every batch -> the loss's context, and the number of steps."""
    context, steps = method.prepare(client), 0
    for number in range(settings.epochs) if settings.steps is None else itertools.count():
        if number > 0:
            context = method.refresh(client, context)
        client.net.train()
        for batch in client.batches(settings.batch_size, rng):
            take_step(batch, context)
            steps += 1
            if steps == settings.steps:
                return context, steps
    return context, steps


def step(
    net: Net,
    frozen: dict[str, Net],
    method: Method,
    optimizer: torch.optim.Optimizer | SGD,
    x: Tensor,
    y: Tensor,
    context: Tensors,
    totals: Tensors,
) -> None:
    """One step of any method; its terms are added to `totals`. A GPU engine captures exactly this."""
    terms = method.loss(net, frozen, x, y, context)
    if not isinstance(terms, dict):
        raise TypeError(f"{method.name}: loss returns named terms, as in {{'ce': ...}}, not a {type(terms).__name__}")
    optimizer.zero_grad()
    functools.reduce(torch.add, terms.values()).backward()
    optimizer.step()
    for name, term in terms.items():
        totals[name] = totals[name].add_(term.detach()) if name in totals else term.detach().clone()


def make_optimizer(net: Net, settings: LocalSettings, lr: float | Tensor) -> torch.optim.Optimizer | SGD:
    """A new one each round: momentum does not cross rounds. A rate in a tensor can change under a captured step."""
    if settings.optimizer == "sgd":
        return SGD(net.parameters(), lr, settings.momentum, settings.weight_decay)
    capturable = isinstance(lr, Tensor)
    return torch.optim.Adam(net.parameters(), lr, weight_decay=settings.weight_decay, fused=True, capturable=capturable)


class Bench:
    """A net that serves the clients of one architecture in turn, its start, and the frozen nets beside it."""

    def __init__(self, net: Net, frozen: Sequence[str]) -> None:
        self.net = net
        self.values = model_tensors(net)
        self.initial = {name: value.clone() for name, value in self.values.items()}
        self.frozen = {name: copy.deepcopy(net).requires_grad_(False).eval() for name in frozen}
        self.frozen_values = {name: model_tensors(net) for name, net in self.frozen.items()}

    @torch.no_grad()
    def load(self, received: Tensors, memory: Tensors) -> None:
        """The received part of the model, and the client's own part, or the common start before its first round."""
        source = self.initial | section(memory, "net") | section(received, "model")
        copy_into(self.values, source)
        for name, values in self.frozen_values.items():
            copy_into(values, source | section(memory, name))


class LocalTrainer:
    """Everything that training and testing of any client need; engines keep one per process."""

    def __init__(
        self,
        nets: Sequence[Net],
        method: Method,
        exchange: str,
        settings: LocalSettings,
        transform: Transform,
        clients: Sequence[ClientData],
        tests: dict[str, Samples],
        seed: int,
        device: torch.device | None = None,
        attack: Attack | None = None,
        privacy: Privacy | None = None,
    ) -> None:
        self.method, self.exchange, self.settings = method, exchange, settings
        self.transform, self.clients, self.tests, self.seed = transform, clients, tests, seed
        self.device, self.attack, self.privacy = device or torch.device("cpu"), attack, privacy
        self.benches = [Bench(self.place(net), method.frozen) for net in nets]
        for bench in self.benches:
            bench.net.prior = torch.zeros(bench.net.num_classes, device=self.device) if settings.balanced else None
        self.resident: dict[str, Split] = {}  # what stays on a GPU

    def place(self, net: Net) -> Net:
        if self.device.type == "cpu":
            return net
        return net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def kind(self, k: int | None) -> int:
        """Which of the architectures client k has; the global model has the first."""
        return 0 if k is None else k % len(self.benches)

    def update(self, round: int, k: int, received: Tensors, memory: Tensors) -> tuple[Tensors, Tensors]:
        """Client k's round: what it sends (model/*, report/*, loss/*, samples) and what it remembers."""
        data = self.on_device(f"client/{k}", self.clients[k].train)
        upload, memory = self.update_on(data, self.settings, round, k, received, memory)
        return self.attack.on(upload, received, round, k) if self.attack else upload, memory

    def update_on(
        self, data: Samples, settings: LocalSettings, round: int, k: int, received: Tensors, memory: Tensors
    ) -> tuple[Tensors, Tensors]:
        received, memory = self.here(received), self.here(memory)
        bench = self.benches[self.kind(k)]
        bench.load(received, memory)
        net = bench.net
        rng = generator(self.seed, "client", round, k)
        client = self.client(bench, data, section(received, "extra"), memory, rng)
        if net.prior is not None:  # -inf for a class that the client lacks, which softmax takes as 0
            net.prior.copy_((client.counts / client.counts.sum()).log())
        net.dropout.generator = generator(self.seed, "dropout", round, k)
        rng = generator(self.seed, "batches", round, k)
        means = nearest.report(client) if settings.nearest else {}
        context, losses = self.train(client, bench, settings, settings.lr_of(round), rng)
        with torch.no_grad():
            report = self.method.report(client, context)
            remembered = self.method.remember(client, report)
        state = bench.values
        upload = {f"model/{name}": state[name] for name in state if travels(name, self.exchange)}
        upload |= {f"report/{name}": value for name, value in report.items()}
        upload |= {f"nearest/{name}": value for name, value in means.items()}
        upload |= {f"loss/{name}": value for name, value in losses.items()}
        upload["samples"] = torch.tensor(len(data))
        private = {f"net/{name}": state[name] for name in state if not travels(name, self.exchange)}
        upload = upload if self.privacy is None else self.privacy.leave(round, k, upload, received)
        return self.owned(upload), self.owned(remembered | private)

    def owned(self, tensors: Tensors) -> Tensors:
        return owned(tensors)

    def client(
        self, bench: Bench, data: Samples, received: Tensors, memory: Tensors, rng: torch.Generator
    ) -> LocalClient:
        return LocalClient(bench.net, data.to(self.device), self.transform, received, memory, rng)

    def train(
        self, client: LocalClient, bench: Bench, settings: LocalSettings, lr: float, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """-> the loss's context, and the mean of each of its terms over the steps."""
        optimizer, totals = make_optimizer(bench.net, settings, lr), Tensors()

        def take_step(batch: tuple[Tensor, Tensor], context: Tensors) -> None:
            step(bench.net, bench.frozen, self.method, optimizer, *batch, context, totals)

        context, steps = train(client, self.method, settings, rng, take_step)
        return context, {name: total / steps for name, total in totals.items()}

    @torch.no_grad()
    def evaluate(self, test: str, k: int | None, received: Tensors, memory: Tensors) -> Tensors:
        """The global model, or client k's: for each way to predict, the confusion matrix [C, C] (true, predicted); and
        under LOSS the mean cross-entropy of the first of them, which is the classifier.
        """
        received, memory = self.here(received), self.here(memory)
        bench = self.benches[self.kind(k)]
        bench.load(received, memory)
        net = bench.net.eval()
        extras, split, C = section(received, "extra"), self.on_device(f"test/{test}", self.tests[test]), net.num_classes
        means = section(received, "nearest")
        found: dict[str, list[Tensor]] = {}
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        size = EVAL_BATCH if self.device.type == "cpu" else 4 * EVAL_BATCH
        for raw, y in zip(split.x.split(size), split.y.split(size), strict=True):
            x = self.transform.plain(raw)
            predicted = self.method.predict(net, x, extras)
            loss += cross_entropy(next(iter(predicted.values())).double(), y, reduction="sum")
            if means:
                predicted |= {nearest.HEAD: nearest.logits(net.features(x), **means)}
            for name, logits in predicted.items():
                found.setdefault(name, []).append(logits.argmax(1))
        pairs = {name: split.y * C + torch.cat(classes) for name, classes in found.items()}
        tables = {name: torch.bincount(pair, minlength=C * C).reshape(C, C).cpu() for name, pair in pairs.items()}
        return tables | {LOSS: (loss / len(split.y)).cpu()}

    def on_device(self, name: str, samples: Samples) -> Split:
        """Samples where they are trained on: on a GPU they stay, in main memory they are read when they are needed."""
        if self.device.type == "cpu":
            return samples.to(self.device)
        if name not in self.resident:
            self.resident[name] = samples.to(self.device)
        return self.resident[name]

    def here(self, tensors: Tensors) -> Tensors:
        return {name: value.to(self.device) for name, value in tensors.items()}


def owned(tensors: Tensors) -> Tensors:
    """Copies in main memory: what the net holds goes on changing with the next client."""
    return {
        name: value.clone() if value.device.type == "cpu" else value.cpu().contiguous()
        for name, value in tensors.items()
    }


def travels(name: str, exchange: str) -> bool:
    """Whether that tensor of the model is exchanged."""
    return exchange == "model" or (exchange == "classifier" and name.startswith("classifier."))


def model_tensors(net: Net) -> Tensors:
    """Parameters and BatchNorm statistics, alive; without num_batches_tracked, which is a count and not averaged."""
    return {name: value for name, value in net.state_dict().items() if value.is_floating_point()}


def copy_into(values: Tensors, source: Tensors) -> None:
    """From `source` into the live tensors of a net, by name."""
    torch._foreach_copy_(list(values.values()), [source[name] for name in values])


def section(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors under a prefix, without it."""
    return {name[len(prefix) + 1 :]: value for name, value in tensors.items() if name.startswith(f"{prefix}/")}
