"""Files that are whole or not there: atomic writes, tensors and JSON with a checksum; and folders with one writer."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

try:
    import fcntl
except ImportError:  # Windows, where nobody is locked out
    fcntl = None  # type: ignore[assignment]

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .errors import DataError, RunError

LOCK = "lock"
GROWTH = 100  # so many times its own size, and a GB, may be in an archive: what holds more is a bomb


class DamagedFile(ValueError):
    """A file that is not what was written."""


def cache_folder() -> Path:
    return Path(os.environ.get("FEDHPRO_CACHE") or os.path.expanduser("~/.cache/fedhpro"))


def safe_formats() -> list[str]:
    """The image formats to open files of strangers with."""
    from PIL import Image

    Image.init()
    return [name for name in Image.OPEN if name != "EPS"]  # a program, which Pillow would let Ghostscript run


def most_unpacked(archive: Path) -> int:
    return GROWTH * archive.stat().st_size + 10**9


def chunks(file: Any, room: int, name: Path) -> Iterator[bytes]:
    """What is in an opened file, of at most so many bytes."""
    while chunk := file.read(2**20):
        room -= len(chunk)
        if room < 0:
            raise DataError(f"{name} would come to more than {GROWTH} times the size of its archive: this is no data")
        yield chunk


def decompressed(path: Path) -> bytes:
    """The content of a file, which may be .gz or .bz2."""
    opened: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    with opened(path, "rb") as file:
        return b"".join(chunks(file, most_unpacked(path), path))


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)  # numpy has no bfloat16
    return digest.hexdigest()


def write_atomically(path: Path, content: bytes | str) -> None:
    """Readers see the old file or the whole new one, whatever happens on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """What was written into it, renamed and removed is so even if the machine stops now."""
    if os.name == "nt":  # where folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sealed(content: Mapping[str, Any]) -> str:
    """JSON that knows its own checksum."""
    found = json.loads(json.dumps(content))  # as it will be read: keys are texts
    return json.dumps(found | {"sha256": _digest(found)})


def unsealed(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if content.pop("sha256") == _digest(content):
            return dict(content)
    except (ValueError, AttributeError, TypeError, KeyError):
        pass
    raise DamagedFile(f"{path} is damaged, or of an earlier version: its checksum does not fit")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time writes to a folder. The lock goes with its process, however that ends; the file stays."""
    with _opened(folder / LOCK) as descriptor:
        _take(descriptor, folder)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)


def _take(descriptor: int, folder: Path) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 1000).decode(errors="replace") or "another process"
        raise RunError(f"{folder} is being written by {holder}: wait for its end, or end it") from None
    except OSError:  # a file system without locks
        return
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%F %T}".encode())


@contextlib.contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """One process after the other: who comes while another is inside waits for it. The file stays."""
    with _opened(path) as descriptor:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The descriptor of a lock's file; a process that is forked meanwhile does not keep it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _locks.add(descriptor)
    try:
        yield descriptor
    finally:
        _locks.discard(descriptor)
        os.close(descriptor)


_locks: set[int] = set()


def _let_go() -> None:
    """In a forked worker, which may outlive its parent for a moment, and must not hold the folder."""
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """The tensors in the format of safetensors, which gives one name to one memory."""
    return save(_owned(tensors))


def save_tensors(path: Path, tensors: Mapping[str, Tensor], **about: str) -> str:
    """With the checksum of the content, and whatever else is to be remembered, in the header. -> the checksum"""
    owned = _owned(tensors)
    write_atomically(path, save(owned, about | {"sha256": (digest := checksum(owned))}))
    return digest


def _owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    owned: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():
        value = value.detach().cpu().contiguous()
        owned[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return owned


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and what was remembered with them; DamagedFile where the content is not what was written."""
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from None
    if checksum(tensors) != about.pop("sha256", None):
        raise DamagedFile(f"{path} is damaged: its checksum does not fit")
    return tensors, about


def built_once(path: Path, recipe: str, build: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `build` makes, from the cache where a sound copy made by this very recipe is there."""
    with contextlib.suppress(OSError, DamagedFile):  # without a sound cache it is built again
        tensors, about = load_tensors(path)
        if about.get("recipe") == recipe:
            return tensors
    tensors = build()
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        save_tensors(path, tensors, recipe=recipe)
    return tensors


def delimiter_of(file: TextIO) -> str:
    """Of a CSV file, by its first line: spreadsheets of half the world write semicolons."""
    first = file.readline()
    file.seek(0)
    return ";" if first.count(";") > first.count(",") else ","
