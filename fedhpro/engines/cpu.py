"""Clients on this machine's CPU: in this process, or in worker processes with one torch thread each.

Both give the same bits: every client trains on one thread, from the same tensors, with generators of its own, and the
uploads are handed over in the order in which the clients were named.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
class Test:
    """A test set, tried with the global model, or with the model of one client."""

    name: str
    client: int | None = None


Memories = dict[int, Tensors]


class Engine(Protocol):
    def train(self, round: int, clients: Sequence[int], sent: Tensors, memories: Memories) -> Iterator[Answer]: ...
    def evaluate(self, tests: Sequence[Test], sent: Tensors, memories: Memories) -> list[Tensors]: ...
    def close(self) -> None: ...


class InProcess:
    def __init__(self, trainer: LocalTrainer) -> None:
        self.trainer = trainer
        keep_memory()

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
    train the next client while an upload waits for its turn to be folded in.
    """

    SLOTS = 2

    def __init__(
        self, trainer: LocalTrainer, workers: int, sent: Tensors, upload: Tensors, memories: Sequence[Tensors]
    ) -> None:
        """What is sent and uploaded has one form; what is remembered, one for each architecture."""
        self.trainer = trainer
        # fork shares the data sets for free; other systems start a fresh interpreter and receive them once
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self.sent = SharedTensors([sent])
        self.slots = [
            [(SharedTensors(memories), SharedTensors([upload]), SharedTensors(memories)) for _ in range(self.SLOTS)]
            for _ in range(workers)
        ]
        self.pipes: list[Connection] = []
        self.processes = []
        for slots in self.slots:
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            inherited = list(self.pipes) if context.get_start_method() == "fork" else []
            process = context.Process(
                target=_work, args=(trainer, theirs, inherited, self.sent, slots), daemon=True, name="fedhpro-worker"
            )
            process.start()
            theirs.close()
            self.processes.append(process)

    def train(self, round: int, clients: Sequence[int], sent: Tensors, memories: Memories) -> Iterator[Answer]:
        self.sent.write(sent)
        waiting = list(enumerate(clients))[::-1]
        free = [list(range(self.SLOTS)) for _ in self.pipes]
        busy: set[int] = set()
        done: dict[int, tuple[int, int, Answer]] = {}

        def hand_out() -> None:
            for worker, pipe in enumerate(self.pipes):
                if waiting and free[worker] and worker not in busy:
                    order, k = waiting.pop()
                    slot = free[worker].pop()
                    memory = memories.get(k, {})
                    self.slots[worker][slot][0].write(memory, self.trainer.kind(k))
                    self._send(pipe, ("train", order, round, k, slot, bool(memory)))
                    busy.add(worker)

        turn = 0
        while turn < len(clients):
            hand_out()
            for worker, (order, k, slot, error) in self._answers(busy):
                busy.remove(worker)
                _, upload, memory_out = self.slots[worker][slot]
                done[order] = (worker, slot, Answer(k, upload.form(), memory_out.form(self.trainer.kind(k)), error))
            hand_out()  # so that nobody is idle while uploads are folded in
            while turn in done:
                worker, slot, answer = done.pop(turn)
                yield answer
                free[worker].append(slot)
                turn += 1

    def evaluate(self, tests: Sequence[Test], sent: Tensors, memories: Memories) -> list[Tensors]:
        self.sent.write(sent)
        waiting = list(enumerate(tests))[::-1]
        busy: set[int] = set()
        results: dict[int, Tensors] = {}
        while len(results) < len(tests):
            for worker, pipe in enumerate(self.pipes):
                if waiting and worker not in busy:
                    order, test = waiting.pop()
                    memory = _memory_of(test, memories)
                    self.slots[worker][0][0].write(memory, self.trainer.kind(test.client))
                    self._send(pipe, ("evaluate", order, test, bool(memory)))
                    busy.add(worker)
            for worker, (order, found, error) in self._answers(busy):
                if error is not None:
                    raise RuntimeError(f"evaluation on {tests[order].name} failed: {error}")
                busy.remove(worker)
                results[order] = {name: torch.tensor(rows) for name, rows in found.items()}
        return [results[order] for order in range(len(tests))]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # an idle worker ends when its pipe does
        for process in self.processes:
            process.join(timeout=0.5)
            if process.is_alive():  # in the middle of a client that nobody waits for any more
                process.kill()
                process.join()

    def _send(self, pipe: Connection, message: tuple[Any, ...]) -> None:
        try:
            pipe.send(message)
        except OSError:
            raise WorkerDied(self._fate()) from None

    def _answers(self, busy: set[int]) -> list[tuple[int, Any]]:
        ready = wait([self.pipes[worker] for worker in busy])
        try:
            return [(worker, self.pipes[worker].recv()) for worker in sorted(busy) if self.pipes[worker] in ready]
        except (EOFError, OSError):
            raise WorkerDied(self._fate()) from None

    def _fate(self) -> str:
        codes = [process.exitcode for process in self.processes if process.exitcode is not None]
        code = codes[0] if codes else "unknown"
        return (
            f"a worker process ended unexpectedly (exit code {code}): "
            "the finished rounds are saved, and `fedhpro resume` goes on from there"
        )


class WorkerDied(UserError):
    """A worker process was killed, for want of memory perhaps."""

    exit_code = 1


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
    torch.set_num_threads(1)
    keep_memory()
    with contextlib.suppress(EOFError, OSError):  # the parent closed the pipe, or is gone
        while True:
            pipe.send(_answer(trainer, pipe.recv(), sent, slots))


def _answer(trainer: LocalTrainer, message: tuple[Any, ...], sent: SharedTensors, slots: list[Slot]) -> tuple[Any, ...]:
    if message[0] == "train":
        _, order, round, k, slot, has_memory = message
        memory_in, upload, memory_out = slots[slot]
        kind = trainer.kind(k)
        answer = _train(trainer, round, k, sent.form(), memory_in.form(kind) if has_memory else {})
        if answer.error is None:  # what does not fit must not be bent into the shared memory's shapes
            answer.error = wire.misfit(answer.upload, wire.schema_of(upload.form()))
        if answer.error is None:
            answer.error = wire.misfit(answer.memory, wire.schema_of(memory_out.form(kind)))
        if answer.error is None:
            upload.write(answer.upload)
            memory_out.write(answer.memory, kind)
        return order, k, slot, answer.error
    _, order, test, has_memory = message
    memory = slots[0][0].form(trainer.kind(test.client)) if has_memory else {}
    try:
        found = trainer.evaluate(test.name, test.client, sent.form(), memory)
        return order, {head: matrix.tolist() for head, matrix in found.items()}, None
    except Exception as error:
        return order, {}, f"{type(error).__name__}: {error}"


def keep_memory() -> None:
    """Freed memory stays with this process: by default glibc gives the large blocks of every step back to the system,
    and the next step waits for as many page faults. Elsewhere than on glibc nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(ctypes.c_int(-3), ctypes.c_int(32 << 20))  # M_MMAP_THRESHOLD, at the most that it may be
        libc.mallopt(ctypes.c_int(-1), ctypes.c_int(1 << 30))  # M_TRIM_THRESHOLD


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The promise of equal bits holds for one torch thread per client; the caller's setting comes back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
