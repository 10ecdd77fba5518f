"""Datasets from files: the original archives, folders of class folders, CSV files, and the plain .npz layout.

`read` looks at what is there and says what it found: labels at once, images one by one. Nothing that is read can run
code: pickles are read with numpy's arrays and plain containers only, and archives are unpacked inside one folder.
"""

from __future__ import annotations

import csv
import hashlib
import io
import pickle
import re
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import DataError
from ..files import chunks, decompressed, most_unpacked, safe_formats
from ..randomness import numpy_generator
from . import splits, text
from .catalog import Dataset, Part, plain

Array = NDArray[Any]
Picture = Array | Image.Image
SPLITS = ("train", "test")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
BROKEN = (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile, tarfile.TarError)


@dataclass(frozen=True)
class Samples:
    """One split of one domain, as it was found."""

    where: str  # for messages
    inputs: Iterable[Picture] | Sequence[str]  # images of height x width (x channels), or texts
    labels: Array
    groups: Array | None = None  # what belongs together, where that is known


@dataclass(frozen=True)
class Found:
    """A domain: its train and test part, and the names of its classes where they came with it."""

    train: Samples
    test: Samples
    classes: tuple[str, ...] = ()


Reader = Callable[[Path, Dataset], Found]


def read(dataset: Dataset, path: Path, workspace: Path) -> dict[str, Found]:
    """What is at a path, by domain. Archives are unpacked into the workspace."""
    path = _opened(path, workspace)
    if len(dataset.parts) == 1:
        return {dataset.parts[0].name: _read_domain(dataset, dataset.parts[0], path)}
    if not path.is_dir():
        names = ", ".join(part.name for part in dataset.parts)
        raise DataError(f"{path} is a file: {dataset.name} is imported from a folder that has {names}")
    found: dict[str, Found] = {}
    for part in dataset.parts:
        place = _named(path, part.name)
        if place is not None:
            found[part.name] = _read_domain(dataset, part, _opened(place, workspace / part.name))
        elif part.name != "syn":  # is rendered
            raise DataError(
                f"{path} has no {part.name}: put {part.name}.npz there, or a folder {part.name} with {part.original}"
            )
    return found


def local_copy(folder: Path, dataset: Dataset) -> Path | None:
    """What a folder holds under the dataset's name, if anything: a folder, an .npz file or an archive."""
    return _named(folder, dataset.name)


def stamp(path: Path) -> str:
    """What changes when the files at a path do: their names, sizes and times."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    seen = [f"{each.resolve()} {each.stat().st_size} {each.stat().st_mtime_ns}" for each in files]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()


def unpack(archive: Path, folder: Path) -> None:
    """All files of a zip or tar archive, none of them outside the folder; links, devices and bombs are refused."""
    try:
        room = most_unpacked(archive)
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as opened:
                for entry in opened.infolist():
                    if not entry.is_dir():
                        with opened.open(entry) as file:
                            room = _put(file, _inside(folder, entry.filename, archive), room)
            return
        with tarfile.open(archive) as tar:
            for member in tar:
                target = _inside(folder, member.name, archive)
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    room = _put(content, target, room)
                elif not member.isdir():
                    raise DataError(f"{archive} has a link or a device in it ({member.name}): unpack it yourself")
    except DataError:
        raise
    except (*BROKEN, RuntimeError, NotImplementedError) as error:  # encrypted, or compressed in an unknown way
        raise DataError(f"{archive} cannot be unpacked ({brief(error)}): is it whole, and is there room?") from None


# --- finding out what is there ---


def _read_domain(dataset: Dataset, part: Part, path: Path) -> Found:
    folder = path if path.is_file() else _descend(path)
    for marker, reader in _formats(dataset):
        if marker(folder):
            return reader(folder, dataset)
    raise DataError(
        f"nothing in {path} looks like {part.name}: wanted are {part.original}, or an .npz file, or a folder with a "
        f"folder for each class"
    )


def _formats(dataset: Dataset) -> list[tuple[Callable[[Path], object], Reader]]:
    """How each format is told, and its reader; the first that fits is taken."""
    if dataset.kind == "text":
        return [(lambda path: path.is_dir() and any(path.glob("*.csv*")), news)]
    return [
        (lambda path: path.suffix == ".npz", npz),
        (lambda path: path.is_dir() and any(path.glob("*-images[-.]idx3-ubyte*")), idx),
        (lambda path: _find(path, "usps.bz2", "usps"), usps),
        (lambda path: _find(path, "train_32x32.mat"), svhn),
        (lambda path: _find(path, "data_batch_1", "data_batch_1.bin", "train.bin", "test_batch"), cifar),
        (lambda path: _find(path, "train") and _find(path, "meta"), cifar),
        (lambda path: _find(path, "val/val_annotations.txt"), tiny_imagenet),
        (_metadata, ham10000),
        (lambda path: path.is_dir() and _class_folders(path), class_folders),
    ]


def _find(folder: Path, *names: str) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _need(folder: Path, *names: str) -> Path:
    path = _find(folder, *names)
    if path is None:
        raise DataError(f"{folder / names[0]} is missing: put it beside the other files")
    return path


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX")))


def _descend(folder: Path) -> Path:
    """Through folders that hold nothing but one folder, as archives have them."""
    while len(inside := _visible(folder)) == 1 and inside[0].is_dir():
        if plain(inside[0].name) in SPLITS or _pictures(inside[0]):
            break
        folder = inside[0]
    return inside[0] if len(inside) == 1 and inside[0].suffix == ".npz" else folder


def _opened(path: Path, workspace: Path) -> Path:
    if not (path.is_file() and path.name.endswith(ARCHIVES)):
        return path
    workspace.mkdir(parents=True, exist_ok=True)
    unpack(path, workspace)
    return _descend(workspace)


def _named(folder: Path, name: str) -> Path | None:
    """A folder, an .npz file or an archive of that name, whatever its capitals, dashes and underscores."""
    if not folder.is_dir():
        return None
    for path in _visible(folder):
        ending = next(
            (end for end in ("", ".npz", *ARCHIVES) if path.is_dir() == (not end) and path.name.endswith(end)), None
        )
        if ending is not None and plain(path.name.removesuffix(ending)) == plain(name):
            return path
    return None


def _inside(folder: Path, name: str, archive: Path) -> Path:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if ".." in parts or PurePosixPath(name).is_absolute() or any(":" in part for part in parts[:1]):
        raise DataError(f"{archive} has a file that would be put elsewhere ({name}): it is not what it should be")
    return folder.joinpath(*parts)


def _put(content: Any, target: Path, room: int) -> int:
    """-> what is left of the room, in bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as file:
        for chunk in chunks(content, room, target):
            room -= file.write(chunk)
    return room


def brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


# --- the plain layout ---


def npz(path: Path, dataset: Dataset) -> Found:
    """x_train, y_train, x_test, y_test; or x and y of all samples, maybe with lesion_id and classes."""
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            if "x_train" in file.files or "x" not in file.files:
                x, y, x_test, y_test = (file[name] for name in names)
                return Found(Samples(str(path), x, y), Samples(str(path), x_test, y_test))
            optional = {name: file[name] for name in ("lesion_id", "classes") if name in file.files}
            x, y = file["x"], file["y"]
    except BROKEN as error:
        raise DataError(f"{path} is not a whole .npz file with {', '.join(names)}: {brief(error)}") from None
    classes = tuple(map(str, optional.get("classes", ())))
    if classes:
        y = relabel(y, classes, dataset, path)
    if len(x) != len(y):
        raise DataError(f"{path} has {len(x)} images and {len(y)} labels")
    return cut(dataset, str(path), y, lambda rows: x[rows], optional.get("lesion_id"), dataset.classes or classes)


def cut(
    dataset: Dataset,
    where: str,
    labels: Array,
    take: Callable[[Array], Iterable[Picture]],
    groups: Array | None = None,
    classes: tuple[str, ...] = (),
) -> Found:
    """Samples that come without a test part, cut once for all by a fixed seed, or as published code cuts them."""
    if dataset.cut == "mod10":
        train, test = splits.eight_of_ten(len(labels))
    else:
        _check_labels(labels, dataset, where)
        count = round(dataset.test_share * len(labels))
        rng = numpy_generator(0, "test part", dataset.name)
        train, test = splits.carve(labels.astype(np.int64), count, rng, groups)

    def samples(rows: Array) -> Samples:
        return Samples(where, take(rows), labels[rows], None if groups is None else groups[rows])

    return Found(samples(train), samples(test), classes)


def relabel(labels: Array, names: Sequence[str], dataset: Dataset, where: object) -> Array:
    """Labels that count through these names, as labels of the dataset."""
    known = [dataset.label_of(name) if dataset.classes else i for i, name in enumerate(names)]
    if strange := [name for name, label in zip(names, known, strict=True) if label is None]:
        raise DataError(
            f"{where} has a class {strange[0]!r}, and those of {dataset.name} are {', '.join(dataset.classes)}"
        )
    _check_labels(labels, dataset, str(where), len(names))
    return np.array(known, np.int64)[labels]


def _check_labels(labels: Array, dataset: Dataset, where: str, count: int | None = None) -> None:
    count = count or dataset.num_classes
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{where} has labels that are not whole numbers from 0 to {count - 1}: they are {labels.dtype}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < count:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(f"{where} has the label {wrong}: labels are whole numbers from 0 to {count - 1}")


# --- digits ---


def idx(folder: Path, dataset: Dataset) -> Found:
    """MNIST's files, compressed or not, with a dash or a dot before idx."""

    def samples(prefix: str) -> Samples:
        images, labels = (
            _need(folder, *(f"{prefix}-{kind}{dot}{form}{end}" for dot in "-." for end in ("", ".gz")))
            for kind, form in (("images", "idx3-ubyte"), ("labels", "idx1-ubyte"))
        )
        return Samples(str(images), _idx(images, 3), _idx(labels, 1))

    return Found(samples("train"), samples("t10k"))


def _idx(path: Path, dimensions: int) -> Array:
    content = _bytes(path)
    head = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) < head:
        raise DataError(f"{path} is not an idx file of bytes in {dimensions} dimensions: get it again")
    shape = tuple(np.frombuffer(content[4:head], ">i4").tolist())
    if len(content) - head != np.prod(shape):
        raise DataError(f"{path} is cut short: it should have {np.prod(shape)} bytes after its head: get it again")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


def usps(folder: Path, dataset: Dataset) -> Found:
    """The two files of the LIBSVM page: a line for each image, "label 1:value ... 256:value", values from -1 to 1."""
    train, test = _need(folder, "usps.bz2", "usps"), _need(folder, "usps.t.bz2", "usps.t")
    return Found(_usps(train), _usps(test))


def _usps(path: Path) -> Samples:
    lines = _bytes(path).decode("ascii", "replace").split("\n")
    rows = [line.split() for line in lines if line.strip()]
    images, labels = np.full((len(rows), 256), -1.0), np.zeros(len(rows), np.int64)
    for number, row in enumerate(rows):
        try:
            labels[number] = int(float(row[0])) - 1  # they count from 1
            places, values = zip(*(pair.split(":") for pair in row[1:]), strict=True)
            images[number, np.array(places, int) - 1] = np.array(values, float)
        except (ValueError, IndexError):
            raise DataError(f"{path}, line {number + 1}: this is not 'label 1:value ... 256:value'") from None
    pixels = np.clip(np.rint((images + 1) / 2 * 255), 0, 255).astype(np.uint8)
    return Samples(str(path), pixels.reshape(-1, 16, 16), labels)


def svhn(folder: Path, dataset: Dataset) -> Found:
    """The two .mat files of the cropped digits; their label 10 is the digit 0."""
    return Found(_svhn(_need(folder, "train_32x32.mat")), _svhn(_need(folder, "test_32x32.mat")))


def _svhn(path: Path) -> Samples:
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        content = loadmat(path, variable_names=("X", "y"))
        x, y = content["X"], content["y"].reshape(-1)
    except (*BROKEN, MatReadError, TypeError, NotImplementedError) as error:
        raise DataError(f"{path} is not a whole .mat file with X and y ({brief(error)}): get it again") from None
    if x.ndim != 4 or not np.issubdtype(y.dtype, np.number):
        raise DataError(f"{path} has images of shape {list(x.shape)} instead of height, width, 3, number: get it again")
    return Samples(str(path), x.transpose(3, 0, 1, 2), np.where(y == 10, 0, y).astype(np.int64))


# --- CIFAR ---


def _encode(content: str, encoding: str = "latin1") -> bytes:
    return content.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Reads what numpy arrays in plain containers need, and refuses everything else."""

    ALLOWED: ClassVar[dict[str, Any]] = {
        "ndarray": np.ndarray,
        "dtype": np.dtype,
        "_reconstruct": np.zeros(1).__reduce__()[0],  # how arrays are put together, up to protocol 4
        "_frombuffer": np.zeros(1).__reduce_ex__(5)[0],  # and in protocol 5
        "encode": _encode,  # bytes, as Python 3 writes them for Python 2
    }
    MODULES = re.compile(r"numpy|numpy\._?core\.(multiarray|numeric)|_codecs")

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.ALLOWED or not self.MODULES.fullmatch(module):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self.ALLOWED[name]


def cifar(folder: Path, dataset: Dataset) -> Found:
    """CIFAR-10 and CIFAR-100, the version for Python or the binary one."""
    fine = dataset.num_classes == 100
    train, test = (["train"], "test") if fine else ([f"data_batch_{i}" for i in range(1, 6)], "test_batch")
    if _find(folder, f"{train[0]}.bin", f"{test}.bin"):
        read, ending = _binary, ".bin"
        classes = tuple(_bytes(_need(folder, "fine_label_names.txt" if fine else "batches.meta.txt")).decode().split())
    else:
        read, ending = _pickled, ""
        meta = _pickle(_need(folder, "meta" if fine else "batches.meta"))
        names = meta.get(b"fine_label_names" if fine else b"label_names", ())
        classes = tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
    if len(classes) != dataset.num_classes:
        raise DataError(f"{folder} names {len(classes)} classes, and {dataset.name} has {dataset.num_classes}")
    paths = [_need(folder, f"{name}{ending}") for name in (*train, test)]
    return Found(read(paths[:-1], fine), read(paths[-1:], fine), classes)


def _pickle(path: Path) -> dict[Any, Any]:
    try:
        with open(path, "rb") as file:
            content = _ArraysOnly(file, encoding="bytes").load()
    except (*BROKEN, pickle.UnpicklingError, AttributeError, TypeError, IndexError, MemoryError) as error:
        raise DataError(f"{path} is not a file of CIFAR for Python ({brief(error)}): get it again") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a file of CIFAR for Python (it holds no dict): get it again")
    return content


def _pickled(paths: Sequence[Path], fine: bool) -> Samples:
    key = b"fine_labels" if fine else b"labels"
    images, labels = [], []
    for path in paths:
        batch = _pickle(path)
        pixels = batch.get(b"data")
        if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != 3072 or key not in batch:
            raise DataError(f"{path} has no data of 3072 bytes an image, or no {key.decode()}: get it again")
        images.append(pixels)
        labels.append(np.asarray(batch[key]))
    return Samples(str(paths[0]), _from_planes(np.concatenate(images)), np.concatenate(labels))


def _binary(paths: Sequence[Path], fine: bool) -> Samples:
    """Rows of one label, or a coarse and a fine one, and 3072 pixels."""
    head, rows = 1 + fine, []
    for path in paths:
        content = np.frombuffer(_bytes(path), np.uint8)
        if not len(content) or len(content) % (head + 3072):
            raise DataError(
                f"{path} is cut short: it is no whole number of images of {head + 3072} bytes: get it again"
            )
        rows.append(content.reshape(-1, head + 3072))
    every = np.concatenate(rows)
    return Samples(str(paths[0]), _from_planes(every[:, head:]), every[:, head - 1].astype(np.int64))


def _from_planes(pixels: Array) -> Array:
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


# --- folders of images ---


def class_folders(folder: Path, dataset: Dataset) -> Found:
    """A folder for each class: in train/ and test/ (or val/), or in one folder, which is cut."""
    train = _named(folder, "train")
    test = next((found for name in ("test", "val", "valid", "validation") if (found := _named(folder, name))), None)
    if train is None or test is None or not train.is_dir() or not test.is_dir():
        files, labels, classes = _labelled(folder, dataset)
        return cut(dataset, str(folder), labels, lambda rows: pictures([files[i] for i in rows]), None, classes)
    (files, labels, classes), (test_files, test_labels, other) = (_labelled(each, dataset) for each in (train, test))
    if classes != other:
        strange = sorted(set(classes) ^ set(other))[0]
        raise DataError(
            f"{folder} has the class {strange!r} in {train.name} or in {test.name} only: both need all classes"
        )
    return Found(
        Samples(str(train), pictures(files), labels), Samples(str(test), pictures(test_files), test_labels), classes
    )


def _class_folders(folder: Path) -> list[Path]:
    """The folders that hold images, at any depth."""
    return sorted({path.parent for path in folder.rglob("*") if path.suffix.lower() in PICTURES} - {folder})


def _labelled(folder: Path, dataset: Dataset) -> tuple[list[Path], Array, tuple[str, ...]]:
    """Files, labels and classes, in the order of the folders' names."""
    found = _class_folders(folder)
    names = [path.relative_to(folder).as_posix() for path in found]
    if len(names) != dataset.num_classes:
        raise DataError(
            f"{folder} has {len(names)} folders of images, and {dataset.name} has {dataset.num_classes} classes"
        )
    files = [(path, label) for label, each in enumerate(found) for path in _pictures(each)]
    labels = relabel(np.array([label for _, label in files], np.int64), names, dataset, folder)
    return [path for path, _ in files], labels, dataset.classes or tuple(names)


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)


def pictures(files: Sequence[Path]) -> Iterator[Picture]:
    """The images of some files, opened one by one."""
    for path in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(path, formats=safe_formats()) as image:
                    picture = image.convert("RGB")
        except (
            OSError,
            ValueError,
            SyntaxError,
            Image.DecompressionBombError,
            Image.DecompressionBombWarning,
        ) as error:
            raise DataError(f"{path} is not a whole image ({brief(error)}): get it again, or take it out") from None
        yield picture


def tiny_imagenet(folder: Path, dataset: Dataset) -> Found:
    """train/CLASS/images/*, and val/images/* with the classes in val/val_annotations.txt."""
    names = (
        sorted(path.name for path in _visible(folder / "train") if path.is_dir()) if (folder / "train").is_dir() else []
    )
    if len(names) != dataset.num_classes:
        raise DataError(
            f"{folder / 'train'} has {len(names)} class folders instead of {dataset.num_classes}: unpack it again"
        )
    files = [
        (path, label) for label, name in enumerate(names) for path in _pictures(folder / "train" / name / "images")
    ]
    annotations = folder / "val" / "val_annotations.txt"
    rows = [line.split("\t") for line in _bytes(annotations).decode("utf-8", "replace").splitlines() if line]
    test, labels = [], []
    for number, row in enumerate(rows, 1):
        if len(row) < 2 or row[1] not in names:
            raise DataError(f"{annotations}, line {number}: this is not an image and a class of train/")
        test.append(folder / "val" / "images" / row[0])
        labels.append(names.index(row[1]))
    train = Samples(
        str(folder / "train"), pictures([path for path, _ in files]), np.array([y for _, y in files], np.int64)
    )
    return Found(train, Samples(str(annotations), pictures(test), np.array(labels, np.int64)), tuple(names))


def _metadata(folder: Path) -> Path | None:
    return _find(folder, "HAM10000_metadata.csv", "HAM10000_metadata", "HAM10000_metadata.tab")


def ham10000(folder: Path, dataset: Dataset) -> Found:
    """HAM10000_metadata.csv with lesion_id, image_id and dx, and the images in any folder below."""
    path = _need(folder, "HAM10000_metadata.csv", "HAM10000_metadata", "HAM10000_metadata.tab")
    content = _bytes(path).decode("utf-8-sig", "replace")
    table = csv.DictReader(io.StringIO(content), delimiter="\t" if "\t" in content.partition("\n")[0] else ",")
    rows = list(table)
    missing = {"lesion_id", "image_id", "dx"} - set(table.fieldnames or ())
    if missing or not rows:
        raise DataError(f"{path} has no column {sorted(missing)[0]}" if missing else f"{path} has no rows")
    images = {each.stem: each for each in folder.rglob("*") if each.suffix.lower() in PICTURES}
    files, labels = [], np.zeros(len(rows), np.int64)
    for number, row in enumerate(rows):
        label = dataset.label_of(row["dx"] or "")
        if label is None:
            raise DataError(
                f"{path}, row {number + 2}: the diagnosis {row['dx']!r} is none of {', '.join(dataset.classes)}"
            )
        if row["image_id"] not in images:
            raise DataError(
                f"{folder} has no image {row['image_id']}, which {path.name} names: put all images below it"
            )
        files.append(images[row["image_id"]])
        labels[number] = label
    lesions = np.array([row["lesion_id"] for row in rows])
    return cut(dataset, str(folder), labels, lambda chosen: pictures([files[i] for i in chosen]), lesions)


# --- texts ---


def news(folder: Path, dataset: Dataset) -> Found:
    """train.csv and test.csv, compressed or not."""

    def samples(split: str) -> Samples:
        path = text.news_file(folder, split)
        texts, labels = text.read_news(path)
        return Samples(str(path), texts, labels)

    return Found(samples("train"), samples("test"))


def _bytes(path: Path) -> bytes:
    try:
        return decompressed(path)
    except DataError:
        raise
    except BROKEN as error:
        raise DataError(f"{path} cannot be read ({brief(error)}): get it again, it may be cut short") from None
