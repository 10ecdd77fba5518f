"""Clients on a GPU, several at once: each slot has a stream, nets and buffers of its own, and replays captured steps.

A client's data and, epoch by epoch, its schedule (rows, crops, flips) are copied into the slot's buffers, which the
captured step reads row after row; nothing waits for the GPU before a client's upload is taken. A graph is captured for
each batch size, and each set of tensors that a loss may go by, when it is first met. What cannot be captured runs
through the same lines eagerly, with one warning.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..client import LocalClient
from ..data.batches import epoch
from ..data.clients import Samples
from ..data.sources import Split
from ..methods.base import Tensors
from ..models.base import ConvNorm, Net
from ..sgd import SGD
from ..training import Bench, LocalSettings, LocalTrainer, copy_into, make_optimizer, model_tensors, step, train
from .cpu import Answer, InProcess, Memories

log = logging.getLogger("fedhpro")
CAPTURING = threading.Lock()
CHUNK = 128  # samples in a captured pass without gradients
PACE = 16  # steps between two looks at how far a slot's stream is


class Graphs(InProcess):
    """The engine. Uploads come in the order of the clients; their models stay on the GPU, where they are averaged."""

    AHEAD = 2  # clients that a slot may have queued before their uploads are taken
    writers = 4  # threads for memories, while clients train; other engines use an answer's tensors again, and have none

    def __init__(self, trainer: LocalTrainer, slots: int | None, compiled: bool = False) -> None:
        super().__init__(trainer)
        refused: set[str] = set()
        slots = slots or best_slots([len(client.train) for client in trainer.clients])
        self.slots = [Slot(trainer, refused, compiled) for _ in range(slots)]
        self.warm = False

    def train(self, round: int, clients: Sequence[int], sent: Tensors, memories: Memories) -> Iterator[Answer]:
        sent = self.trainer.here(sent)
        for name, like in self.trainer.benches[0].values.items():
            if f"model/{name}" in sent:  # laid out as in the nets, so that all are copied at once
                sent[f"model/{name}"] = torch.empty_like(like).copy_(sent[f"model/{name}"])
        torch.cuda.current_stream().synchronize()  # the streams of the slots do not wait for this one
        sizes = {k: len(self.trainer.clients[k].train) for k in clients}
        pairs = list(zip(self.slots, share(sizes, len(self.slots)), strict=True))
        if not self.warm:  # captures of the usual batch size, one after the other: their convolutions are timed
            for slot, queue in pairs:
                if queue:
                    slot.start(round, queue[0], sent, memories.get(queue[0], {}))[1].synchronize()
            self.warm = True
        # a launch waits when a stream has many graphs in its queue: a thread for each slot lets the others go on
        started = {k: Future[tuple[Answer, torch.cuda.Event]]() for k in clients}
        ahead = {slot: threading.Semaphore(self.AHEAD) for slot in self.slots}
        given_up = threading.Event()

        def serve(slot: Slot, queue: list[int]) -> None:
            for k in queue:
                ahead[slot].acquire()
                if given_up.is_set():
                    return
                try:
                    started[k].set_result(slot.start(round, k, sent, memories.get(k, {})))
                except Exception as error:  # a memory that cannot be read: raised where the answer is waited for
                    started[k].set_exception(error)

        threads = [threading.Thread(target=serve, args=pair, daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        slot_of = {k: slot for slot, queue in pairs for k in queue}
        try:
            for k in clients:
                yield self._taken(*started[k].result())
                ahead[slot_of[k]].release()
        finally:
            given_up.set()
            for semaphore in ahead.values():
                semaphore.release()
            for thread in threads:
                thread.join()

    def _taken(self, answer: Answer, done: torch.cuda.Event) -> Answer:
        done.synchronize()
        for value in answer.upload.values():
            if value.is_cuda:  # its memory must not be given away before this stream has folded it in
                value.record_stream(torch.cuda.current_stream())
        upload = {name: v if name.startswith("model/") else v.cpu() for name, v in answer.upload.items()}
        return Answer(answer.client, upload, answer.memory, answer.error)


def share(sizes: dict[int, int], slots: int) -> list[list[int]]:
    """Clients to slots: largest first, each to the slot that has least to do."""
    work, queues = [0] * slots, [list[int]() for _ in range(slots)]
    for k, size in sizes.items():
        least = work.index(min(work))
        work[least] += size
        queues[least].append(k)
    return queues


def best_slots(sizes: Sequence[int]) -> int:
    """Eight to ten, whichever shares the work most evenly. Fewer fill the GPU with large models, but not with small."""
    clients = dict(enumerate(sorted(sizes, reverse=True)))

    def unevenness(slots: int) -> float:
        longest = max(sum(clients[k] for k in queue) for queue in share(clients, slots))
        return round(longest * slots / sum(sizes), 2)

    return min(range(min(8, len(sizes)), min(10, len(sizes)) + 1), key=unevenness)


class Slot(LocalTrainer):
    """A trainer that queues its work on a stream and comes back at once."""

    def __init__(self, trainer: LocalTrainer, refused: set[str], compiled: bool) -> None:
        self.fused = _fused()
        nets = [_prepared(bench, self.fused, compiled) for bench in trainer.benches]
        super().__init__(
            nets, trainer.method, trainer.exchange, trainer.settings, trainer.transform, trainer.clients, {},
            trainer.seed, trainer.device, trainer.attack, trainer.privacy,
        )  # fmt: skip
        self.resident = trainer.resident  # one copy of the data for all slots
        self.refused = refused  # what turned out not to be capturable
        self.stream = torch.cuda.Stream()
        largest = max(len(client.train) for client in self.clients)
        some = self.clients[0].train.to(torch.device("cpu"))
        self.x = torch.zeros(largest, *some.x.shape[1:], dtype=some.x.dtype, device=self.device)
        self.y = torch.zeros(largest, dtype=some.y.dtype, device=self.device)
        self.count = torch.arange(self.settings.batch_size + 2, device=self.device)
        drawn = max(2, largest)  # a single sample is seen twice
        self.schedule = torch.zeros(4, drawn, dtype=torch.int64, device=self.device)
        dropped = max(net.dim if net.dropout.p else 0 for net in nets)
        self.keep = torch.zeros(drawn, dropped, dtype=torch.bool, device=self.device)
        self.at = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.staged: list[tuple[Tensor, torch.cuda.Event]] = []  # schedules on their way
        self.launched, self.marks = 0, [torch.cuda.Event(blocking=True) for _ in range(2)]
        self.rows = torch.zeros(CHUNK, dtype=torch.int64, device=self.device)
        self.pool = torch.cuda.graph_pool_handle()
        self.seats = {id(bench.net): Seat(self, bench) for bench in self.benches}
        torch.cuda.current_stream().synchronize()

    def start(self, round: int, k: int, sent: Tensors, memory: Tensors) -> tuple[Answer, torch.cuda.Event]:
        """Queue client k's round -> its answer, which is whole when the event has happened."""
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self.stream):
            try:
                upload, memory = self.update(round, k, sent, memory)
                answer = Answer(k, upload, {name: _to_host(value) for name, value in memory.items()})
            except Exception as error:  # one client's trouble must not end the round of the others
                answer = Answer(k, {}, {}, f"{type(error).__name__}: {error}")
            done.record()
        return answer, done

    def client(
        self, bench: Bench, data: Samples, received: Tensors, memory: Tensors, rng: torch.Generator
    ) -> LocalClient:
        n = len(data)
        self.x[:n].copy_(data.x)
        self.y[:n].copy_(data.y)
        split = Split(self.x[:n], self.y[:n])
        return SlotClient(self, self.seats[id(bench.net)], split, received, memory, rng)

    def train(
        self, client: LocalClient, bench: Bench, settings: LocalSettings, lr: float, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        seat = self.seats[id(bench.net)]
        seat.begin(lr)
        context, steps = train(client, self.method, settings, rng, seat.take_step)
        return context, {name: total / steps for name, total in seat.totals.items()}

    def pace(self) -> None:
        """Let no more than some dozen steps wait: a launch into a full queue keeps a core busy until there is room."""
        self.launched += 1
        if self.launched % PACE == 0:
            mark = self.marks.pop(0)
            mark.synchronize()  # sleeping; it was recorded 2 x PACE steps ago
            mark.record()
            self.marks.append(mark)

    def owned(self, tensors: Tensors) -> Tensors:
        return {name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}

    def plan(self, n: int, net: Net, rng: torch.Generator) -> Iterator[list[int]]:
        """Each epoch's schedule, drawn as an eager client would and sent to the GPU -> the sizes of its batches."""
        moves, dropout = self.transform.moves(self.x), net.dropout
        while True:
            columns, keep = [], []
            for rows in epoch(n, self.settings.batch_size, rng):
                drawn = self.transform.draw(len(rows), rng) if moves else rows.new_zeros(3, len(rows))
                columns.append(torch.cat([rows[None], drawn]))
                if dropout.p:
                    keep.append(torch.rand(len(rows), net.dim, generator=dropout.generator) >= dropout.p)
            self.send(torch.cat(columns, 1), self.schedule)
            if keep:
                self.send(torch.cat(keep), self.keep[:, : net.dim])
            self.at.zero_()
            yield [column.shape[1] for column in columns]

    def batch(self, rows: Tensor, moves: Tensor) -> Tensor:
        if self.fused is None or not self.transform.moves(self.x):
            return self.transform.scheduled(self.x, rows, moves)
        offset, scale = self.transform.normalisation(self.x)
        return self.fused.crop_and_flip(self.x, rows, moves, self.transform.crop, offset, scale)

    def now(self, size: int) -> Tensor:
        """Where the next so many entries of the schedule are."""
        return self.at + self.count[:size]

    def send(self, value: Tensor, to: Tensor) -> None:
        """Through memory that the GPU can read by itself, and that is used again when it has done so."""
        free = [i for i, (_, done) in enumerate(self.staged) if done.query()]
        fitting = [
            i for i in free if self.staged[i][0].numel() >= value.numel() and self.staged[i][0].dtype == value.dtype
        ]
        if fitting:
            buffer, done = self.staged.pop(fitting[0])
        else:
            buffer, done = torch.empty(to.shape, dtype=to.dtype, pin_memory=True).flatten(), torch.cuda.Event()
        staged = buffer[: value.numel()].view(value.shape)
        staged.copy_(value)
        to[tuple(slice(0, size) for size in value.shape)].copy_(staged, non_blocking=True)
        done.record()
        self.staged.append((buffer, done))


class Seat:
    """What the clients of one architecture use in a slot: net, optimiser, context and totals at fixed addresses."""

    def __init__(self, slot: Slot, bench: Bench) -> None:
        self.slot, self.bench = slot, bench
        self.lr = torch.zeros((), device=slot.device)
        self.optimizer = make_optimizer(bench.net, slot.settings, self.lr)
        self.contexts: dict[frozenset[str], Tensors] = {}  # by what they have: a loss may go by that
        self.context: Tensors = {}  # one of them
        self.held: Tensors | None = None  # whose values `context` has
        self.totals: Tensors = {}
        self.graphs: dict[tuple[int, frozenset[str]], Callable[[], None]] = {}
        self.passing: Callable[[], None] | None = None
        self.z = torch.zeros(CHUNK, bench.net.dim, device=slot.device)
        if bench.net.dropout.p:
            dim = bench.net.dim
            bench.net.dropout.keep = lambda z: slot.keep.index_select(0, slot.now(len(z)))[:, :dim]

    def begin(self, lr: float) -> None:
        self.lr.fill_(lr)
        if state := [*self.optimizer_state(), *self.totals.values()]:
            torch._foreach_zero_(state)

    def take_step(self, size: int, context: Tensors) -> None:
        kind = size, frozenset(context)
        if context is not self.held:
            self.context = self.contexts.setdefault(kind[1], {})
            for name, value in context.items():
                if name in self.context:
                    self.context[name].copy_(value)
                else:
                    self.context[name] = value.clone()
            self.held = context
        if kind not in self.graphs:
            usual = size == self.slot.settings.batch_size
            self.graphs[kind] = self.captured(lambda: self.step(size), f"steps of {self.slot.method.name}", usual)
        self.graphs[kind]()
        self.slot.pace()

    def step(self, size: int) -> None:
        slot, bench = self.slot, self.bench
        now = slot.schedule.index_select(1, slot.now(size))
        x, y = slot.batch(now[0], now[1:]), slot.y.index_select(0, now[0])
        step(bench.net, bench.frozen, slot.method, self.optimizer, x, y, self.context, self.totals)
        slot.at.add_(size)

    def features(self, rows: Tensor) -> Tensor:
        """z of some rows of the slot's samples, in eval mode."""
        if self.passing is None:
            self.passing = self.captured(self.one_pass, "passes without gradients", True)
        found = []
        for part in rows.split(CHUNK):
            self.slot.rows[: len(part)].copy_(part)
            self.passing()
            found.append(self.z[: len(part)].clone())
        return torch.cat(found)

    @torch.no_grad()
    def one_pass(self) -> None:
        slot = self.slot
        self.z.copy_(self.bench.net.features(slot.transform.plain(slot.x.index_select(0, slot.rows))))

    def captured(self, work: Callable[[], None], what: str, tuned: bool) -> Callable[[], None]:
        """`work` as a graph's replay, or as it is where it cannot be captured. What it changes is put back.

        tuned: its convolutions are timed first and the fastest taken, which takes about a second for a new shape.
        """
        if what in self.slot.refused:
            return work
        with CAPTURING:
            torch.backends.cudnn.benchmark = tuned
            before = {value.data_ptr(): value.clone() for value in self.mutable()}
            try:
                for _ in range(2):  # what happens once only: algorithms chosen, optimiser state and totals made
                    self.slot.at.zero_()
                    work()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    graph, pool=self.slot.pool, stream=self.slot.stream, capture_error_mode="thread_local"
                ):
                    work()
                return graph.replay
            except Exception as error:
                self.slot.refused.add(what)
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                log.warning("engine=cuda: %s cannot be captured and run eagerly, which is slower: %s", what, reason)
                return work
            finally:
                torch.backends.cudnn.benchmark = False
                for value in self.mutable():
                    if value.data_ptr() in before:
                        value.copy_(before[value.data_ptr()])
                    else:
                        value.zero_()

    def mutable(self) -> list[Tensor]:
        return [*self.bench.values.values(), *self.optimizer_state(), *self.totals.values(), self.slot.at]

    def optimizer_state(self) -> list[Tensor]:
        if isinstance(self.optimizer, SGD):
            return self.optimizer.velocity
        return [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]


class SlotClient(LocalClient):
    def __init__(
        self, slot: Slot, seat: Seat, data: Split, received: Tensors, memory: Tensors, rng: torch.Generator
    ) -> None:
        super().__init__(seat.bench.net, data, slot.transform, received, memory, rng)
        self.slot, self.seat = slot, seat
        self.epochs: Iterator[list[int]] | None = None

    def features(self, limit: int | None = None, augment: bool = False) -> tuple[Tensor, Tensor]:
        if limit is not None or augment:
            return super().features(limit, augment)
        self.net.eval()
        return self.seat.features(torch.arange(len(self.data), device=self.data.y.device)), self.data.y

    def batches(self, batch_size: int, rng: torch.Generator) -> Iterator[Any]:
        """The sizes of the next epoch's batches: a captured step knows where its samples are."""
        if self.epochs is None:
            self.epochs = self.slot.plan(len(self.data), self.net, rng)
        return iter(next(self.epochs))


def _prepared(bench: Bench, fused: ModuleType | None, compiled: bool) -> Net:
    """A copy of a net at its start, arranged for captured steps."""
    net = copy.deepcopy(bench.net)
    with torch.no_grad():
        copy_into(model_tensors(net), bench.initial)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.num_batches_tracked = None  # a counter that nobody reads, in a kernel of its own
        if isinstance(module, ConvNorm) and fused is not None and not compiled:
            module.fused = fused.batch_norm
    if compiled:
        net.trunk = torch.compile(net.trunk, dynamic=False)  # type: ignore[method-assign]
    return net


def _fused() -> ModuleType | None:
    try:
        from . import fused
    except ImportError:  # torch for this GPU came without triton
        return None
    return fused


def _to_host(value: Tensor) -> Tensor:
    if not value.is_cuda:
        return value
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
