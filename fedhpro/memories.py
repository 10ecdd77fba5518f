"""What clients keep between their rounds (MOON's previous model, a private extractor): on disk, so that main memory
does not grow with the clients.

A generation of a client's memory is one file, named after the round that wrote it and never changed. A checkpoint names
the generation of each client, so it costs nothing but what is new; a generation goes when neither a kept checkpoint nor
the present refers to it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .errors import ConfigError, RunError
from .files import DamagedFile, load_tensors, save_tensors, write_atomically
from .methods.base import Tensors

GB = 10**9
RUN_ID = "run-id"
Generations = dict[int, int]  # client -> the round that wrote its memory


def generations_of(checkpoint: Mapping[str, Any]) -> Generations:
    """Those that a checkpoint's JSON file names."""
    return {int(k): round for k, round in checkpoint.get("memories", {}).items()}


class ClientMemories(Mapping[int, Tensors]):
    """client -> named tensors, read from disk when they are asked for."""

    def __init__(self, folder: Path | None = None) -> None:
        """Without a folder, a temporary one that goes with this object."""
        self._folder = folder
        self.elsewhere = False  # the files are with the clients, on machines of their own
        self.generations: Generations = {}
        self.pinned: set[tuple[int, int]] = set()  # what checkpoints refer to
        self._write: Callable[[Path, Tensors], object] = save_tensors

    def __getitem__(self, k: int) -> Tensors:
        return self._load(k, self.generations[k])

    def _load(self, k: int, round: int) -> Tensors:
        try:
            return load_tensors(self.path(k, round))[0]
        except (OSError, DamagedFile) as error:
            raise RunError(f"what client {k} remembers is lost: {error}") from None

    def __contains__(self, k: object) -> bool:
        return k in self.generations

    def __iter__(self) -> Iterator[int]:
        return iter(self.generations)

    def __len__(self) -> int:
        return len(self.generations)

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedhpro-memories-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    @property
    def run_id(self) -> str:
        """The name of the run for those who keep its memories elsewhere: the same after a resume."""
        path = self.folder / RUN_ID
        if not path.exists():
            write_atomically(path, uuid.uuid4().hex)
        return path.read_text(encoding="utf-8")

    def store(self, k: int, round: int, tensors: Tensors) -> None:
        self._write(self.path(k, round), tensors)
        self.note(k, round)

    @contextlib.contextmanager
    def written_beside(self, threads: int) -> Iterator[None]:
        """Inside, `store` leaves the writing to so many threads; on the way out all is on disk, or what failed is
        raised. Few memories wait at a time, so that they do not fill main memory when the disk is slow.
        """
        if threads == 0:
            yield
            return
        room, writes = threading.Semaphore(2 * threads), list[Future[str]]()
        with ThreadPoolExecutor(threads) as pool:

            def write(path: Path, tensors: Tensors) -> None:
                room.acquire()
                writes.append(pool.submit(save_tensors, path, tensors))
                writes[-1].add_done_callback(lambda _: room.release())

            before, self._write = self._write, write
            try:
                yield
            finally:
                self._write = before
        for done in writes:
            done.result()

    def note(self, k: int, round: int) -> None:
        """That a client's memory of that round is there now."""
        before = self.generations.get(k)
        self.generations[k] = round
        if before is not None and before != round and (k, before) not in self.pinned:
            self.path(k, before).unlink(missing_ok=True)

    def check(self, generations: Generations) -> None:
        """RunError where one of them is not what was written."""
        for k, round in generations.items() if not self.elsewhere else ():
            self._load(k, round)

    def prune(self, pinned: set[tuple[int, int]]) -> None:
        """Keep what checkpoints refer to, and the present."""
        self.pinned = pinned
        if self._folder is not None and self._folder.exists():
            wanted = {self.path(k, round) for k, round in pinned | set(self.generations.items())}
            wanted.add(self.folder / RUN_ID)
            for path in self._folder.iterdir():
                if path not in wanted:
                    path.unlink()

    def path(self, k: int, round: int) -> Path:
        return self.folder / f"client-{k}-round-{round}.safetensors"


def most_files(clients: int, per_round: int, rounds: int, checkpoint_every: int, keep_checkpoints: int) -> int:
    """How many generations there can be at once: one of every client, and what each kept checkpoint holds back."""
    between = min(clients, per_round * checkpoint_every)  # clients that change from one checkpoint to the next
    return min(per_round * rounds, clients + keep_checkpoints * between)


def check_budget(each: int, files: int, budget: float) -> None:
    """Refuse a run whose client memories may come to more than the budget, before anything is written."""
    if each * files > budget * GB:
        raise ConfigError(
            f"{_need(each, files)}, and memory_budget is {budget:g} GB: raise it, or lower clients, participation, "
            "keep_checkpoints or checkpoint_every"
        )


def check_disk(each: int, files: int, folder: Path) -> None:
    """The same for the disk that the folder is or will be on; what the folder holds already is counted as free."""
    held = sum(path.stat().st_size for path in folder.iterdir()) if folder.exists() else 0
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free + held
    if each * files > free:
        raise ConfigError(
            f"{_need(each, files)}, and {place} has {_size(free)} free: choose another folder with out, or lower "
            "clients, participation, keep_checkpoints or checkpoint_every"
        )


def _need(each: int, files: int) -> str:
    return (
        f"the memories of clients may take {_size(each * files)} on disk "
        f"({_size(each)} each, {files:,} of them with those that checkpoints hold)"
    )


def _size(count: int) -> str:
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / 10**6:.1f} MB"
