"""From what was found, on the hub or in files, to a dataset in the cache: checked, in one size, as plain arrays."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import DataError
from ..files import cache_folder, in_turn
from . import hub, importers, store
from .catalog import Dataset
from .importers import Found, Picture, Samples
from .text import LONGEST, Tokenizer

Array = NDArray[Any]


class Track(Protocol):
    """Goes through samples and shows how far it is: `rich.progress.Progress.track` is one."""

    def __call__(self, items: Iterable[Any], *, total: float, description: str) -> Iterable[Any]: ...


def silently(items: Iterable[Any], *, total: float, description: str) -> Iterable[Any]:
    return items


def fetch(dataset: Dataset, track: Track = silently) -> store.Stored:
    """Fetch a dataset from the hub into the cache."""
    return _write(dataset, hub.read(dataset), store.folder_of(dataset.name), hub.origin(dataset), track)


def import_files(dataset: Dataset, path: Path, track: Track = silently, target: Path | None = None) -> store.Stored:
    """Read files into the cache."""
    if not path.exists():
        raise DataError(f"there is nothing at {path}: give the file or the folder that has {dataset.title}")
    origin = {"from": str(path.absolute()), "stamp": importers.stamp(path)}
    with _workspace() as workspace:
        found = importers.read(dataset, path, workspace)
        return _write(dataset, found, target or store.folder_of(dataset.name), origin, track)


@contextlib.contextmanager
def _workspace() -> Iterator[Path]:
    """A folder to unpack archives in; on the disk of the cache, where there should be room."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".unpacked-", dir=cache_folder())
    except OSError as error:
        raise DataError(
            f"cannot write {cache_folder()}: {error.strerror or error}; FEDHPRO_CACHE names another"
        ) from None
    with folder:
        yield Path(folder.name)


def mirror(dataset: Dataset, track: Track = silently) -> store.Stored | None:
    """The copy of what FEDHPRO_DATA holds under the dataset's name, made anew when those files change."""
    given = os.environ.get("FEDHPRO_DATA")
    path = importers.local_copy(Path(given), dataset) if given else None
    if path is None:
        return None
    target = store.mirror_of(dataset.name)
    if (made := _mirrored(target, path)) is not None:
        return made
    with contextlib.ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(in_turn(target.with_name(f"{target.name}.lock")))  # of many that start, one makes it
        except OSError as error:
            raise DataError(f"cannot write {target}: {error.strerror or error}; FEDHPRO_CACHE names another") from None
        return _mirrored(target, path) or import_files(dataset, path, track, target)


def _mirrored(target: Path, path: Path) -> store.Stored | None:
    """The copy that was made of these very files, if there is one."""
    if not store.is_there(target):
        return None
    try:
        stored = store.read(target)
    except DataError:  # another version of the format, or damaged: the files are at hand to make it again
        return None
    return stored if stored.origin.get("stamp") == importers.stamp(path) else None


def _write(
    dataset: Dataset, found: dict[str, Found], target: Path, origin: dict[str, str], track: Track
) -> store.Stored:
    classes = _classes(dataset, found)
    with store.draft(target) as draft:
        for domain, parts in found.items():
            vocabulary = _vocabulary(draft, parts) if dataset.kind == "text" else None
            for split, samples in (("train", parts.train), ("test", parts.test)):
                labels = _checked(samples, classes, split)
                draft.save(f"{domain}.{split}.y", labels)
                if samples.groups is not None:
                    draft.save(f"{domain}.{split}.groups", np.unique(samples.groups, return_inverse=True)[1])
                title = f"{dataset.title} {domain} {split}" if len(found) > 1 else f"{dataset.title} {split}"
                if vocabulary is not None:
                    _write_texts(draft, f"{domain}.{split}.x", samples, vocabulary)
                else:
                    _write_images(draft, f"{domain}.{split}.x", samples, len(labels), dataset, track, title)
                draft.domains.setdefault(domain, {})[split] = len(labels)
        draft.finish(dataset.name, classes, origin)
    return store.read(target)


def _classes(dataset: Dataset, found: dict[str, Found]) -> tuple[str, ...]:
    named = {parts.classes for parts in found.values() if parts.classes}
    if dataset.classes:
        return dataset.classes
    if named:
        return named.pop()
    return tuple(map(str, range(dataset.num_classes)))


def _checked(samples: Samples, classes: tuple[str, ...], split: str) -> NDArray[np.int64]:
    """Labels that can be trained and tested on; DataError says what is wrong with them."""
    labels, where = samples.labels, samples.where
    if not len(labels):
        raise DataError(f"{where}: its {split} part is empty")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{where} has labels that are not whole numbers from 0 to {len(classes) - 1} in its {split} part: "
            f"they are {labels.dtype}"
        )
    if labels.min() < 0 or labels.max() >= len(classes):
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(
            f"{where} has the label {wrong} in its {split} part: labels are whole numbers from 0 to {len(classes) - 1}"
        )
    present = np.unique(labels)
    if split == "train" and len(present) == 1:
        raise DataError(
            f"{where} has one class only, {classes[present[0]]}, in its train part: at least two are needed"
        )
    if split == "train" and len(present) < len(classes):
        absent = next(name for label, name in enumerate(classes) if label not in present)
        raise DataError(f"{where} has no sample of class {absent} in its train part: all {len(classes)} are needed")
    return labels.astype(np.int64)


def _write_images(
    draft: store.Draft, name: str, samples: Samples, count: int, dataset: Dataset, track: Track, title: str
) -> None:
    """uint8 [n, 3, height, width]."""
    inputs, where = cast(Iterable[Picture], samples.inputs), samples.where
    if isinstance(inputs, np.ndarray):
        if inputs.dtype != np.uint8 or inputs.ndim not in (3, 4):
            raise DataError(
                f"{where} has images of type {inputs.dtype} and shape {list(inputs.shape)}, not uint8 [n, h, w] or "
                "[n, h, w, 3]"
            )
        if len(inputs) != count:
            raise DataError(f"{where} has {len(inputs)} images and {count} labels in its {name.split('.')[1]} part")
    out = draft.array(name, (count, 3, *dataset.size), np.uint8)
    size: tuple[int, int] | None = None
    done = 0
    for picture in track(_reading(inputs, where), total=count, description=title):
        image = picture if isinstance(picture, Image.Image) else _image(picture, where)
        size = size or image.size
        if image.size != size and not dataset.varied:
            raise DataError(
                f"{where} has images of several sizes: the first is {_times(size)}, number {done + 1} is "
                f"{_times(image.size)}; those of {dataset.title} are all alike, so bring an unchanged copy"
            )
        out[done] = _fitted(image, dataset.size)
        done += 1
    if done != count:
        raise DataError(f"{where} has {done} images and {count} labels in its {name.split('.')[1]} part")
    cast(np.memmap, out).flush()


def _reading(inputs: Iterable[Picture], where: str) -> Iterator[Picture]:
    try:
        yield from inputs
    except OSError as error:
        raise DataError(
            f"{where} cannot be read to its end ({importers.brief(error)}): run the command again"
        ) from None


def _image(picture: Array, where: str) -> Image.Image:
    if picture.ndim == 3 and picture.shape[2] == 1:
        picture = picture[..., 0]
    if picture.dtype != np.uint8 or not (picture.ndim == 2 or picture.shape[2:] == (3,)):
        raise DataError(
            f"{where} has an image of type {picture.dtype} and shape {list(picture.shape)}, not grey or RGB bytes"
        )
    return Image.fromarray(np.ascontiguousarray(picture))


def _fitted(image: Image.Image, size: tuple[int, int]) -> Array:
    """[3, height, width] of the size that is wanted; grey images get three channels."""
    image = image if image.mode in ("L", "RGB") else image.convert("RGB")
    if image.size != size[::-1]:
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return np.broadcast_to(pixels, (3, *size)) if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _times(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _vocabulary(draft: store.Draft, parts: Found) -> Tokenizer:
    """The words of the training part, kept beside the arrays."""
    tokenizer = Tokenizer.fit(cast(Sequence[str], parts.train.inputs))
    draft.text("tokenizer.json", tokenizer.to_json())
    return tokenizer


def _write_texts(draft: store.Draft, name: str, samples: Samples, tokenizer: Tokenizer) -> None:
    """Token ids; there are at most 20,000, so two bytes hold them."""
    draft.save(name, tokenizer.encode(cast(Sequence[str], samples.inputs), LONGEST).numpy().astype(np.uint16))
