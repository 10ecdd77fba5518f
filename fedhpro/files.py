"""Files that are whole or not there: atomic writes, and tensors with a checksum."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor


class DamagedFile(ValueError):
    """A file that is not what was written."""


def cache_folder() -> Path:
    return Path(os.environ.get("FEDHPRO_CACHE") or os.path.expanduser("~/.cache/fedhpro"))


def safe_formats() -> list[str]:
    """The image formats to open files of strangers with."""
    from PIL import Image

    Image.init()
    return [name for name in Image.OPEN if name != "EPS"]  # a program, which Pillow would let Ghostscript run


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


def packed(tensors: Mapping[str, Tensor], **about: str) -> bytes:
    """The tensors in the format of safetensors, which gives one name to one memory."""
    return save(_owned(tensors), about or None)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], **about: str) -> None:
    """With the checksum of the content, and whatever else is to be remembered, in the header."""
    owned = _owned(tensors)
    write_atomically(path, packed(owned, **about, sha256=checksum(owned)))


def _owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    owned: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():
        value = value.detach().cpu().contiguous()
        owned[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return owned


def is_whole(path: Path) -> bool:
    """Whether there are tensors as long as their header says: a look that does not read them."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


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
