"""Clients on this machine's CPU: in this process, or in worker processes with one torch thread each.

Both give the same bits: every client trains on one thread, from the same tensors, with generators of its own, and the
uploads are handed over in the order in which the clients were named.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from .. import wire
from ..errors import UserError
from ..methods.base import Tensors
from ..training import LocalTrainer


@dataclass
class Answer:
    """What came back from a client. Its tensors are only valid until the next answer is taken."""

    client: int
    upload: Tensors
    memory: Tensors
    error: str | None = None  # why there is no upload
    remembered: bool = False  # the client keeps its memory itself, and has a new one
    bytes: int | None = None  # that travelled, where they are not the upload's own


@dataclass(frozen=True)
class Test:
    """A test set, tried with the global model, or with the model of one client."""

    name: str
    client: int | None = None

    @property
    def owner(self) -> int | None:
        """Whose model or whose samples it is about; None: the global model on a set of the server."""
        return int(self.name.removeprefix(HELD_OUT)) if self.name.startswith(HELD_OUT) else self.client


TO_TRAIN, TO_TEST = 0, 1  # forms of what is sent
HELD_OUT = "held-out/"  # and the client's number: the name of its own test set
Memories = Mapping[int, Tensors]
Record = dict[str, Any]


class Engine(Protocol):
    restarted: list[Record]  # workers that ended unexpectedly and were replaced, until somebody takes note

    def train(self, round: int, clients: Sequence[int], sent: Tensors, memories: Memories) -> Iterator[Answer]: ...
    def evaluate(self, tests: Sequence[Test], sent: Tensors, memories: Memories) -> list[Tensors]: ...
    def close(self) -> None: ...


class InProcess:
    def __init__(self, trainer: LocalTrainer) -> None:
        self.trainer = trainer
        self.restarted: list[Record] = []
        if trainer.device.type == "cpu":
            keep_freed_memory()

    def train(self, round: int, clients: Sequence[int], sent: Tensors, memories: Memories) -> Iterator[Answer]:
        for k in clients:
            with one_thread():
                answer = _train(self.trainer, round, k, sent, memories.get(k, {}))
            yield answer

    def evaluate(self, tests: Sequence[Test], sent: Tensors, memories: Memories) -> list[Tensors]:
        with one_thread():
            return [self.trainer.evaluate(test.name, test.client, sent, _memory_of(test, memories)) for test in tests]

    def close(self) -> None:
        pass


class WorkerPool:
    """Worker processes that share memory with this one: no model is ever pickled.

    What is sent lies in one shared buffer; each worker has two slots for a client's memory and upload, so that it can
    train the next client while an upload waits for its turn to be folded in. A worker that ends unexpectedly is
    replaced and its client repeated, from the same tensors and so to the same bits.
    """

    SLOTS = 2
    ATTEMPTS = 3  # a client whose work ended so many workers is given up for this round

    def __init__(
        self, trainer: LocalTrainer, workers: int, sent: Sequence[Tensors], upload: Tensors, memories: Sequence[Tensors]
    ) -> None:
        """What is sent has a form for training and one for tests, what is remembered one for each architecture."""
        self.trainer = trainer
        # fork shares the data sets for free; other systems start a fresh interpreter and receive them once
        self.context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self.sent = SharedTensors(sent)
        self.slots = [
            [(SharedTensors(memories), SharedTensors([upload]), SharedTensors(memories)) for _ in range(self.SLOTS)]
            for _ in range(workers)
        ]
        self.restarted: list[Record] = []
        self.workers: list[Worker] = []
        for slots in self.slots:
            self.workers.append(self._start(slots))

    def train(self, round: int, clients: Sequence[int], sent: Tensors, memories: Memories) -> Iterator[Answer]:
        self._begin(sent, TO_TRAIN)
        waiting = list(range(len(clients)))[::-1]
        free = [list(range(self.SLOTS)) for _ in self.workers]
        done: dict[int, tuple[int, int, Answer]] = {}
        deaths = Counter[int]()

        def hand_out() -> None:
            for number, worker in enumerate(self.workers):
                if waiting and free[number] and worker.task is None:
                    order, slot = waiting.pop(), free[number].pop()
                    k = clients[order]
                    memory = memories.get(k, {})
                    self.slots[number][slot][0].write(memory, self.trainer.kind(k))
                    worker.give((order, slot), ("train", round, k, slot, bool(memory)))

        turn = 0
        while turn < len(clients):
            hand_out()
            for number, (order, slot), error in self._finished():
                k = clients[order]
                if isinstance(error, Death):
                    self.restarted.append({"client": k, "exit_code": error.exit_code})
                    deaths[order] += 1
                    if deaths[order] < self.ATTEMPTS:
                        waiting.append(order)  # whatever it left in the slot is written again
                        free[number].append(slot)
                        continue
                    error = f"its training ended {self.ATTEMPTS} worker processes, the last {error}"
                _, upload, memory_out = self.slots[number][slot]
                done[order] = (number, slot, Answer(k, upload.form(), memory_out.form(self.trainer.kind(k)), error))
            hand_out()  # so that nobody is idle while uploads are folded in
            while turn in done:
                number, slot, answer = done.pop(turn)
                yield answer
                free[number].append(slot)
                turn += 1

    def evaluate(self, tests: Sequence[Test], sent: Tensors, memories: Memories) -> list[Tensors]:
        self._begin(sent, TO_TEST)
        waiting = list(range(len(tests)))[::-1]
        results: dict[int, Tensors] = {}
        deaths = Counter[int]()
        while len(results) < len(tests):
            for number, worker in enumerate(self.workers):
                if waiting and worker.task is None:
                    test = tests[order := waiting.pop()]
                    memory = _memory_of(test, memories)
                    self.slots[number][0][0].write(memory, self.trainer.kind(test.client))
                    worker.give((order, 0), ("evaluate", test, bool(memory)))
            for _, (order, _), found in self._finished():
                test = tests[order]
                if isinstance(found, Death):
                    whose = {} if test.owner is None else {"client": test.owner}
                    self.restarted.append(whose | {"test": test.name, "exit_code": found.exit_code})
                    deaths[order] += 1
                    if deaths[order] < self.ATTEMPTS:
                        waiting.append(order)
                    elif test.owner is None:  # without one of the server's sets, an accuracy would mean another thing
                        raise WorkerDied(
                            f"testing on {test.name} ended {self.ATTEMPTS} worker processes, the last {found}"
                        )
                    else:
                        results[order] = {}
                elif isinstance(found, str):
                    raise RuntimeError(f"evaluation on {test.name} failed: {found}")
                else:
                    results[order] = {name: torch.from_numpy(matrix) for name, matrix in found.items()}
        return [results[order] for order in range(len(tests))]

    def close(self) -> None:
        for worker in self.workers:
            worker.pipe.close()  # an idle worker ends when its pipe does
        for worker in self.workers:
            worker.end(patience=0.5)  # one in the middle of a client, for whom nobody waits any more, is killed

    def _begin(self, sent: Tensors, form: int) -> None:
        for number, worker in enumerate(self.workers):
            if worker.task is not None:  # of a round that was broken off
                worker.end()
                self.workers[number] = self._start(self.slots[number])
        self.sent.write(sent, form)

    def _finished(self) -> Iterator[tuple[int, Task, Any]]:
        """Which workers are done with which task, and their answers; or a Death, and the worker is a new one."""
        ready = wait([worker.pipe for worker in self.workers if worker.task is not None])
        for number, worker in enumerate(self.workers):
            if worker.task is not None and worker.pipe in ready:
                task = worker.task
                try:
                    answer = worker.pipe.recv()
                    worker.task = None
                except (EOFError, OSError):
                    answer = Death(worker.end(patience=5))
                    self.workers[number] = self._start(self.slots[number])
                yield number, task, answer

    def _start(self, slots: list[Slot]) -> Worker:
        ours, theirs = self.context.Pipe()
        inherited = (
            [worker.pipe for worker in self.workers] + [ours] if self.context.get_start_method() == "fork" else []
        )
        process = self.context.Process(
            target=_work, args=(self.trainer, theirs, inherited, self.sent, slots), daemon=True, name="fedhpro-worker"
        )
        try:
            process.start()
        except OSError as error:
            raise WorkerDied(f"no worker process can be started: {error.strerror or error}") from None
        theirs.close()
        return Worker(process, ours)


Task = tuple[int, int]  # the place of a client or a test in its list, and a slot


@dataclass
class Worker:
    """A process, our end of its pipe, and what it is at."""

    process: Any
    pipe: Connection
    task: Task | None = None

    def give(self, task: Task, message: tuple[Any, ...]) -> None:
        self.task = task
        with contextlib.suppress(OSError):  # that it is gone shows when its answer is waited for
            self.pipe.send(message)

    def end(self, patience: float = 0.0) -> int:
        """The exit code, of its own in that many seconds or of a kill."""
        self.pipe.close()
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        return int(self.process.exitcode)


@dataclass(frozen=True)
class Death:
    """In place of an answer: the worker ended, killed for want of memory perhaps."""

    exit_code: int

    def __str__(self) -> str:
        return f"with exit code {self.exit_code}"


class WorkerDied(UserError):
    """There can be no workers, or no evaluation: the run cannot go on."""

    exit_code = 1

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; the finished rounds are saved, and `fedhpro resume` goes on from there")


class SharedTensors:
    """Named tensors of fixed shapes in one block of shared memory (a block of its own for each would use up files).

    Where there are several forms, for clients of several architectures, they lie in the same block, one at a time.
    """

    ALIGN = 64

    def __init__(self, forms: Sequence[Tensors]) -> None:
        layouts = [self._layout(form) for form in forms]
        size = max(end for layout in layouts for *_, end in layout.values()) if any(layouts) else 1
        self.block = torch.zeros(size, dtype=torch.uint8).share_memory_()
        self.forms = [
            {
                name: self.block[start:end].view(like.dtype).view(like.shape)
                for name, (like, start, end) in layout.items()
            }
            for layout in layouts
        ]

    def form(self, kind: int = 0) -> Tensors:
        return self.forms[kind]

    def write(self, tensors: Tensors, kind: int = 0) -> None:
        for name, value in tensors.items():
            self.forms[kind][name].copy_(value)

    def _layout(self, form: Tensors) -> dict[str, tuple[Tensor, int, int]]:
        layout, start = {}, 0
        for name, value in form.items():
            end = start + value.numel() * value.element_size()
            layout[name] = (value, start, end)
            start = -(-end // self.ALIGN) * self.ALIGN
        return layout


def _memory_of(test: Test, memories: Memories) -> Tensors:
    return {} if test.client is None else memories.get(test.client, {})


def _train(trainer: LocalTrainer, round: int, k: int, sent: Tensors, memory: Tensors) -> Answer:
    try:
        upload, memory = trainer.update(round, k, sent, memory)
        return Answer(k, upload, memory)
    except Exception as error:  # one client's trouble must not end the round of the others
        return Answer(k, {}, {}, f"{type(error).__name__}: {error}")


Slot = tuple[SharedTensors, SharedTensors, SharedTensors]


def _work(
    trainer: LocalTrainer, pipe: Connection, inherited: list[Connection], sent: SharedTensors, slots: list[Slot]
) -> None:
    for other in inherited:  # with them open, this process would not notice that its parent is gone
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a progress display there needs threads of the parent
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)  # whatever the parent was doing when it forked
    keep_freed_memory()
    with contextlib.suppress(EOFError, OSError):  # the parent closed the pipe, or is gone
        while True:
            pipe.send(_answer(trainer, pipe.recv(), sent, slots))


def _answer(trainer: LocalTrainer, message: tuple[Any, ...], sent: SharedTensors, slots: list[Slot]) -> Any:
    """Of a training: why there is no upload, or None. Of a test: confusion matrices, or why there are none."""
    if message[0] == "train":
        _, round, k, slot, has_memory = message
        memory_in, upload, memory_out = slots[slot]
        kind = trainer.kind(k)
        answer = _train(trainer, round, k, sent.form(TO_TRAIN), memory_in.form(kind) if has_memory else {})
        if answer.error is None:  # what does not fit must not be bent into the shared memory's shapes
            answer.error = wire.misfit(answer.upload, wire.schema_of(upload.form()))
        if answer.error is None:
            answer.error = wire.misfit(answer.memory, wire.schema_of(memory_out.form(kind)))
        if answer.error is None:
            upload.write(answer.upload)
            memory_out.write(answer.memory, kind)
        return answer.error
    _, test, has_memory = message
    memory = slots[0][0].form(trainer.kind(test.client)) if has_memory else {}
    try:
        found = trainer.evaluate(test.name, test.client, sent.form(TO_TEST), memory)
        return {head: matrix.numpy() for head, matrix in found.items()}
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def keep_freed_memory() -> None:
    """glibc hands the memory of a step back to the system and asks for it again in the next: page faults, millions of
    them. Here this process keeps it; elsewhere nothing happens.
    """
    trim_threshold, mmap_threshold = -1, -3  # of mallopt
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 32 << 20)  # the most that glibc allows
        mallopt(trim_threshold, 512 << 20)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The promise of equal bits holds for one torch thread per client; the caller's setting comes back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
