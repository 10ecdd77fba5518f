"""The cache of datasets: for each a folder with plain .npy arrays and a manifest that says what they are.

A folder gets its name only when it is whole: it is written beside its place and moved there at the end, so that a
download or an import that breaks leaves nothing that looks like a dataset.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import DataError
from ..files import cache_folder
from ..version import __version__

FORMAT = 1
MANIFEST = "manifest.json"
BUDGET = 4.0  # GiB: what is larger stays on the disk and is read as it is used

Array = NDArray[Any]


def folder_of(name: str) -> Path:
    """Where a dataset that was fetched or imported is kept."""
    return cache_folder() / "datasets" / name


def mirror_of(name: str) -> Path:
    """Where the arrays of a dataset in FEDHPRO_DATA are kept: beside one that was fetched, and not in its place."""
    return cache_folder() / "datasets" / "FEDHPRO_DATA" / name


def budget() -> float:
    """Bytes that a dataset may take in memory."""
    given = os.environ.get("FEDHPRO_MEMORY") or str(BUDGET)
    try:
        return float(given) * 2**30
    except ValueError:
        raise DataError(f"FEDHPRO_MEMORY={given}: write a number of GiB, as in 0.5") from None


@dataclass(frozen=True)
class Stored:
    """A dataset in the cache, as its manifest describes it."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.manifest["classes"])

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self.manifest["domains"])

    @property
    def origin(self) -> Mapping[str, str]:
        """Where it comes from: "from", and a "revision" or the "stamp" of its files."""
        found: Mapping[str, str] = self.manifest["origin"]
        return found

    @property
    def bytes(self) -> int:
        return sum(file["bytes"] for file in self.manifest["files"].values())

    def samples(self, domain: str, split: str) -> int:
        return int(self.manifest["domains"][domain][split])

    def array(self, name: str) -> Array:
        """An array, in memory; of a dataset larger than the budget, mapped: its pages are read as they are used."""
        path = self.folder / f"{name}.npy"
        mapped = self.bytes > budget()
        try:
            # mapped copy-on-write: torch wants memory that can be written, and the file must stay as it is
            found: Array = np.load(path, mmap_mode="c" if mapped else None, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read ({error}): {self._mend}") from None
        return found

    def has(self, name: str) -> bool:
        return f"{name}.npy" in self.manifest["files"]

    def text(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def check_sizes(self) -> None:
        """All files are there and have the size they were written with: what each use looks at."""
        for name, file in self.manifest["files"].items():
            path = self.folder / name
            if not path.is_file():
                raise DataError(f"{path} is missing: {self._mend}")
            if path.stat().st_size != file["bytes"]:
                raise DataError(f"{path} has {path.stat().st_size} bytes instead of {file['bytes']}: {self._mend}")

    def check_sums(self) -> None:
        """Every byte is what was written."""
        self.check_sizes()
        for name, file in self.manifest["files"].items():
            if sha256(self.folder / name) != file["sha256"]:
                raise DataError(f"{self.folder / name} is damaged, its checksum does not fit: {self._mend}")

    @property
    def _mend(self) -> str:
        return _again(self.folder)


def is_there(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read(folder: Path) -> Stored:
    """The dataset in a folder; DataError where it is not whole, or was written by another version."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is not the manifest of a dataset ({error!r}): {_again(folder)}") from None
    if version != FORMAT:
        raise DataError(
            f"{folder} is a cache of format {version}, and this version of fedhpro reads format {FORMAT}: "
            f"{_again(folder)}"
        )
    stored = Stored(folder, manifest)
    stored.check_sizes()
    return stored


class Draft:
    """A dataset that is being written."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.domains: dict[str, dict[str, int]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """A new array on the disk, to be filled."""
        made: Array = np.lib.format.open_memmap(self.folder / f"{name}.npy", "w+", np.dtype(dtype), shape)
        return made

    def save(self, name: str, array: Array) -> None:
        np.save(self.folder / f"{name}.npy", array, allow_pickle=False)

    def text(self, name: str, content: str) -> None:
        (self.folder / name).write_text(content, encoding="utf-8")

    def finish(self, name: str, classes: tuple[str, ...], origin: Mapping[str, str]) -> None:
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(self.folder.iterdir())
        }
        manifest = {"format": FORMAT, "name": name, "fedhpro": __version__, "origin": dict(origin)}
        manifest |= {"classes": list(classes), "domains": self.domains, "files": files}
        self.text(MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def draft(target: Path) -> Iterator[Draft]:
    """A folder to write a dataset into; it is moved to its place if all goes well, and removed otherwise."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        temporary.mkdir()
        made = Draft(temporary)
        yield made
        _move(temporary, target)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _move(folder: Path, target: Path) -> None:
    """Put the folder in its place. A folder cannot be replaced in one step: the old one is moved away first."""
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    while True:
        with contextlib.suppress(FileNotFoundError):
            os.replace(target, old)
            shutil.rmtree(old, ignore_errors=True)
        try:
            return os.replace(folder, target)
        except OSError:
            if not target.exists():  # otherwise another process was faster
                raise


def _remove_abandoned(target: Path) -> None:
    """What processes that were killed left half-written."""
    for path in target.parent.glob(f".{target.name}.*"):
        pid = path.name.split(".")[-2]
        if not pid.isdecimal() or int(pid) == os.getpid() or not _is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _again(folder: Path) -> str:
    if folder.parent.name == "FEDHPRO_DATA":
        return f"delete {folder}, and it is made again"
    name = folder.name
    return f"run `fedhpro data get {name}` or `fedhpro data import {name} PATH` again"
