"""Your own data as a source: a folder of pictures, a CSV file that lists them, or tensors. See docs/your-own-data.md.

Where samples belong to sites, each site is a domain and, in scenario "domains", a client with all its training samples.
"""

from __future__ import annotations

import csv
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, RunError
from ..files import delimiter_of
from ..randomness import numpy_generator
from .clients import POOLED
from .sources import Domain, Source, Split
from .splits import carve

log = logging.getLogger("fedhpro")
SMALLEST = 8  # pixels of a side
PARTS = {"train": "train", "validation": "validation", "val": "validation", "valid": "validation", "test": "test"}
RESERVED = {"AVG", POOLED}  # names that results have for all domains together
COLUMNS = {  # names that are looked for in a CSV file, in any case
    "image": ("image", "path", "file", "filename"),
    "label": ("label", "class", "diagnosis"),
    "site": ("site", "hospital", "domain"),
    "split": ("split", "part"),
    "group": ("group", "patient", "patient_id"),
}

AnyPath = str | os.PathLike[str]
Names = Sequence[str | int] | np.ndarray | Tensor


@dataclass(frozen=True)
class Options:
    """What all of your own data have in common; `from_folder` and the others take these as keywords."""

    size: int = 32  # pictures are resized to size x size pixels
    test_share: float = 0.2  # where no test part is given: of each class of each site
    validation_share: float = 0.1  # of what is left to train on
    seed: int = 0  # of that cut
    crop: int | None = None  # pixels of random shift in training; none: an eighth of the side
    flip: bool = False  # in training, at random, left to right
    partial: bool = False  # one site of several: a class may be missing, or be the only one

    def __post_init__(self) -> None:
        if self.size < SMALLEST:
            raise DataError(f"size={self.size} is too small: pictures need at least {SMALLEST} pixels")
        if self.crop is not None and self.crop < 0:
            raise DataError(f"crop={self.crop} must not be negative")
        for name in ("test_share", "validation_share"):
            if not 0 < getattr(self, name) < 1:
                raise DataError(f"{name}={getattr(self, name)} must lie between 0 and 1")


def _chosen(options: dict[str, Any], *others: str) -> Options:
    """`others` are keywords that the caller takes beside these."""
    known = [*Options.__dataclass_fields__, *others]
    if strange := [key for key in options if key not in known]:
        raise DataError(f"there is no option {strange[0]!r}: choose from {', '.join(known)}")
    return Options(**options)


@dataclass(frozen=True)
class Sample:
    """What is known of a sample beside its pixels; empty: not known."""

    label: str
    site: str = ""
    part: str = ""
    group: str = ""


def from_folder(path: AnyPath, **options: Any) -> Source:
    """Pictures in path/CLASS/, or path/SITE/CLASS/; either may lie in path/train and path/test. Keywords: Options."""
    from ..use import SUFFIXES

    folder, chosen = Path(path), _chosen(options)
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: check the path")
    places = {file: file.relative_to(folder).parts for file in sorted(folder.rglob("*")) if file.is_file()}
    seen = [file for file in places if not any(map(_unseen, places[file]))]
    files = [file for file in seen if file.suffix.lower() in SUFFIXES]
    if not files:
        raise DataError(f"there are no images in {folder}: it needs files ending in {', '.join(SUFFIXES)}")
    if others := Counter(
        file.suffix.lower() or "without an ending" for file in seen if file.suffix.lower() not in SUFFIXES
    ):
        what = ", ".join(f"{number} {kind}" for kind, number in others.most_common())
        log.warning("%s: left out what is no picture that can be read here: %s", folder, what)
    tops = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and not _unseen(entry.name)]
    filled = {places[file][0] for file in files}
    for top in tops:
        if top.name not in filled:
            raise DataError(f"the folder {top} has no images: add some, or remove it")
    given = all(top.name.lower() in PARTS for top in tops) and len(tops) > 1
    depth = {len(places[file]) - given for file in files}
    if len(depth) > 1 or not depth <= {2, 3}:
        odd = next((file for file in files if len(places[file]) - given not in (2, 3)), files[-1])
        raise DataError(
            f"{odd} is not where it should be: all pictures must be in {folder}/CLASS/, or all in {folder}/SITE/CLASS/"
        )
    samples = []
    for file in files:
        part, *site, label = ["", *places[file][:-1]] if not given else places[file][:-1]
        samples.append(Sample(label, "".join(site), PARTS.get(part.lower(), "")))
    return _source(folder.resolve().name, _pictures(files, chosen.size), samples, chosen, f"pictures in {folder}")


def _unseen(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"  # which archives made on a Mac have beside their content


def from_csv(
    path: AnyPath,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    site_column: str | None = None,
    split_column: str | None = None,
    group_column: str | None = None,
    **options: Any,
) -> Source:
    """Pictures that a CSV file lists, with their class and maybe their site, their part (train, validation or test) and
    a group (a patient) that is not to be cut apart. Paths are relative to the file. A column that is not named is
    looked for under usual names (COLUMNS). Tables of numbers are out of scope. Keywords: Options.
    """
    file, chosen = Path(path), _chosen(options, *(f"{key}_column" for key in COLUMNS))
    wanted = {"image": image_column, "label": label_column, "site": site_column}
    wanted |= {"split": split_column, "group": group_column}
    rows = _rows(file)
    header, rows = rows[0][1], rows[1:]
    columns = {key: _column(file, header, key, name) for key, name in wanted.items()}
    if not rows:
        raise DataError(f"{file} has a header but no rows: add some")
    listed, samples = [], []
    for number, row in rows:
        if len(row) != len(header):
            raise DataError(f"row {number} of {file} has {len(row)} values, not {len(header)}: repair it")
        cells = {key: row[column].strip() for key, column in columns.items() if column is not None}
        if empty := [key for key, cell in cells.items() if not cell]:
            raise DataError(f"row {number} of {file} has no {empty[0]}: complete or remove it")
        part = cells.get("split", "")
        if part and part.lower() not in PARTS:
            raise DataError(f"row {number} of {file} has the split {part!r}: it must be train, validation or test")
        image = file.parent / cells["image"]
        if not image.is_file() or image.suffix.lower() == ".csv":
            raise DataError(f"row {number} of {file}: there is no image {image}: check the path")
        listed.append(image)
        samples.append(
            Sample(cells["label"], cells.get("site", ""), PARTS[part.lower()] if part else "", cells.get("group", ""))
        )
    return _source(file.stem, _pictures(listed, chosen.size), samples, chosen, f"pictures listed in {file}")


def from_tensors(
    x: Any,
    y: Any,
    *,
    classes: int | Sequence[str] | None = None,
    sites: Names | None = None,
    groups: Names | None = None,
    test: tuple[Any, ...] | None = None,
    name: str = "own",
    **options: Any,
) -> Source:
    """Images as bytes [n, channels, height, width] and labels from 0, as tensors, arrays or lists; `sites` and `groups`
    have a name for each. `test` is (x, y), or (x, y, sites); without it a test part is cut off. Keywords: Options but
    size: images keep theirs.
    """
    if "size" in options:
        raise DataError("from_tensors takes images as they are: resize them first")
    chosen = _chosen(options, "classes", "sites", "groups", "test", "name")
    images, numbers, where = _checked(x, y, sites)
    parts, together = [""] * len(images), _names(groups, len(images), "groups")
    if test is not None:
        if len(test) != (2 if sites is None else 3):
            raise DataError(f"test must be ({'x, y' if sites is None else 'x, y, sites'}), as the samples to train on")
        more, more_numbers, more_where = _checked(test[0], test[1], None if sites is None else test[2], "test ")
        if more.shape[1:] != images.shape[1:]:
            raise DataError(f"test images are {_shape(more[0])} and the others {_shape(images[0])}: resize them first")
        parts, together = ["train"] * len(images) + ["test"] * len(more), together + [""] * len(more)
        images, numbers, where = torch.cat([images, more]), np.concatenate([numbers, more_numbers]), where + more_where
    count = int(numbers.max()) + 1 if classes is None else classes if isinstance(classes, int) else len(classes)
    if numbers.min() < 0 or numbers.max() >= count:
        raise DataError(
            f"labels run from {numbers.min()} to {numbers.max()}: with {count} classes, from 0 to {count - 1}"
        )
    titles = (
        [str(c) for c in range(count)] if classes is None or isinstance(classes, int) else [str(c) for c in classes]
    )
    if len(set(titles)) < count:
        raise DataError(f"the names of classes must differ: {', '.join(titles)}")
    samples = [
        Sample(titles[number], site, part, group)
        for number, site, part, group in zip(numbers, where, parts, together, strict=True)
    ]
    return _source(name, images, samples, chosen, "tensors", titles)


YES_OR_NO = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def open_own(spec: str, **more: Any) -> Source | None:
    """The source that `data=folder:PATH` or `data=csv:PATH` means, with options behind commas, such as
    `csv:list.csv,label_column=finding,size=64`; None for anything else. More options win over those.
    """
    kind, colon, rest = spec.partition(":")
    if not colon or kind not in ("folder", "csv"):
        return None
    numbers = {"size": int, "seed": int, "crop": int, "test_share": float, "validation_share": float}
    known = [*numbers, "flip"] + [f"{key}_column" for key in COLUMNS if kind == "csv"]
    path, *pairs = rest.split(",")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals and not options:  # a comma in the path
            path += f",{pair}"
            continue
        if key not in known:
            raise DataError(f"{spec}: there is no option {key!r}: choose from {', '.join(known)}")
        try:
            options[key] = YES_OR_NO[value.lower()] if key == "flip" else numbers.get(key, str)(value)
        except KeyError:
            raise DataError(f"{spec}: {key}={value} is neither true nor false") from None
        except ValueError:
            raise DataError(f"{spec}: {key}={value} is not a number") from None
    if not path:
        raise DataError(f"{spec} names no file: write {kind}:PATH")
    return (from_folder if kind == "folder" else from_csv)(Path(path).expanduser(), **(options | more))


# --- from samples to a source ------------------------------------------------------------------------------------


def _source(
    name: str, x: Tensor, samples: list[Sample], options: Options, about: str, classes: list[str] | None = None
) -> Source:
    classes = classes or sorted({sample.label for sample in samples}, key=_natural)
    if len(classes) < 2 and not options.partial:
        raise DataError(f"there is only one class, {classes[0]!r}: a classifier needs at least two")
    places = {label: number for number, label in enumerate(classes)}
    y = np.array([places[sample.label] for sample in samples])
    sites = sorted({sample.site for sample in samples}, key=_natural)
    if taken := RESERVED & set(sites):
        raise DataError(f"a site cannot be called {taken.pop()!r}: results have that name for all of them together")
    domains = []
    for site in sites:
        rows = np.array([i for i, sample in enumerate(samples) if sample.site == site])
        what = f"site {site!r}" if site else f"the data of {name!r}"
        parts = _parts([samples[i] for i in rows], y[rows], what, numpy_generator(options.seed, "own", site), options)
        train, validation, test = (Split(x[rows[part]], torch.from_numpy(y[rows[part]])) for part in parts)
        domains.append(Domain(site or name, train, validation, test, True, f"{about}, {site}" if site else about))
    learnt = torch.cat([domain.train.y for domain in domains]).unique().tolist()
    missing = [title for number, title in enumerate(classes) if number not in learnt]
    if missing and not options.partial:
        raise DataError(f"class {missing[0]!r} has no training sample: add some, or remove the class")
    _warn_of_leaks(domains)
    mean, std = _statistics([domain.train.x for domain in domains])
    return Source(
        name,
        tuple(domains),
        tuple(classes),
        allocation={domain.name: (1, len(domain.train)) for domain in domains if sites != [""]},
        mean=mean,
        std=std,
        crop=min(x.shape[2:]) // 8 if options.crop is None else options.crop,
        flip=options.flip,
    )


def _warn_of_leaks(domains: Sequence[Domain]) -> None:
    """Test samples that a model has trained on, at any site, make it look better than it is."""
    seen = {hash(each.tobytes()) for domain in domains for each in domain.train.x.numpy()}
    tested = [hash(each.tobytes()) for domain in domains for each in domain.test.x.numpy()]
    if twice := sum(each in seen for each in tested):
        log.warning(
            "%d of %d test samples are training samples too, pixel for pixel: remove copies, or give those that belong "
            "together one group (a column of a CSV file), or accuracies look better than they are", twice, len(tested)
        )  # fmt: skip


def _parts(
    samples: list[Sample], y: np.ndarray, what: str, rng: np.random.Generator, options: Options
) -> list[np.ndarray]:
    """The rows of train, validation and test: as given, else cut off by class."""
    given = np.array([sample.part for sample in samples])
    groups = np.array([sample.group for sample in samples]) if any(sample.group for sample in samples) else None
    rows = {part: np.flatnonzero(given == part) for part in ("train", "validation", "test")}
    rows["train"] = np.flatnonzero((given == "train") | (given == ""))
    for part, share in (("test", options.test_share), ("validation", options.validation_share)):
        train = rows["train"]
        if not len(rows[part]) and not (part == "test" and (given != "").any()):
            wanted = max(1, round(share * len(train)))
            while not len(rows[part]) and wanted < len(train):
                kept, taken = carve(y[train], wanted, rng, None if groups is None else groups[train])
                rows["train"], rows[part] = train[kept], train[taken]
                wanted *= 2  # every group may be larger than what is wanted
    for part, found in rows.items():
        if not len(found):
            raise DataError(f"{what} has no sample in its {part} part: it has {len(samples)} in all, add some")
    return list(rows.values())


def _statistics(images: Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of values from 0 to 1."""
    total, squares, count = torch.zeros(1), torch.zeros(1), 0
    for chunk in (chunk for x in images for chunk in x.split(256)):
        values = chunk.transpose(0, 1).flatten(1).double() / 255
        total, squares, count = total + values.sum(1), squares + (values**2).sum(1), count + values.shape[1]
    mean = total / count
    std = (squares / count - mean**2).clamp(min=0).sqrt().clamp(min=1 / 255)  # a channel may have one value only
    return tuple(mean.tolist()), tuple(std.tolist())


def _natural(name: str) -> tuple[bool, int, str]:
    return (False, int(name), "") if name.isdecimal() else (True, 0, name)


# --- reading -----------------------------------------------------------------------------------------------------


def _pictures(files: Sequence[Path], size: int) -> Tensor:
    """uint8 [n, 3, size, size], read as `fedhpro predict` reads pictures."""
    from ..use import read_images

    x = torch.empty(len(files), 3, size, size, dtype=torch.uint8)
    try:
        for i, (_, pixels) in enumerate(read_images(files, (3, size, size))):
            x[i] = pixels
    except RunError as error:
        raise DataError(str(error)) from None
    return x


def _rows(file: Path) -> list[tuple[int, list[str]]]:
    """The rows that are not blank, with their numbers from 1; the first is the header."""
    if not file.is_file():
        raise DataError(f"there is no file {file}: check the path")
    try:
        with open(file, encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, delimiter=delimiter_of(lines))
            rows = [(number, row) for number, row in enumerate(reader, start=1) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read, save it as CSV in UTF-8: {error}") from None
    if not rows:
        raise DataError(f"{file} is empty: it needs a header and a row for each picture")
    return rows


def _column(file: Path, header: list[str], key: str, name: str | None) -> int | None:
    """Where a column is; one that nobody named may be missing, unless it is needed."""
    names = [cell.strip().lower() for cell in header]
    for candidate in COLUMNS[key] if name is None else (name.strip().lower(),):
        if candidate in names:
            return names.index(candidate)
    if name is not None:
        raise DataError(f"{file} has no column {name!r}: it has {', '.join(header)}")
    if key in ("image", "label"):
        hint = " (tables of numbers are out of scope)" if key == "image" else ""
        wanted, there = " or ".join(COLUMNS[key]), ", ".join(map(repr, header))
        raise DataError(f"{file} has no column {wanted}: name it with {key}_column{hint}; it has {there}")
    return None


def _checked(x: Any, y: Any, sites: Names | None = None, of: str = "") -> tuple[Tensor, np.ndarray, list[str]]:
    images, numbers = _images(x, f"{of}x"), _labels(y, f"{of}y")
    if len(images) != len(numbers):
        raise DataError(f"{of}x has {len(images)} images and {of}y has {len(numbers)} labels")
    return images, numbers, _names(sites, len(images), f"{of}sites")


def _images(x: Any, name: str) -> Tensor:
    if isinstance(x, (list, tuple)):
        items = [torch.as_tensor(item) for item in x]
        for i, item in enumerate(items):
            if item.shape != items[0].shape:
                raise DataError(f"{name}[{i}] is {_shape(item)} and {name}[0] {_shape(items[0])}: resize them first")
        x = torch.stack(items) if items else torch.empty(0)
    if isinstance(x, np.ndarray):
        x = x if x.flags.writeable else x.copy()
    images = torch.as_tensor(x).cpu()
    if not len(images):
        raise DataError(f"{name} is empty: it needs images")
    if images.dtype != torch.uint8:
        kind = str(images.dtype).removeprefix("torch.")
        what = "floats from 0 to 1 have to be scaled" if images.is_floating_point() else "convert it to uint8"
        raise DataError(f"{name} must be bytes (uint8, 0 to 255), not {kind}: {what}")
    if images.ndim != 4 or (images.shape[1] > 4 and images.shape[3] <= 4) or min(images.shape[2:]) < SMALLEST:
        raise DataError(
            f"{name} must be [n, channels, height, width] with sides from {SMALLEST} pixels, not {list(images.shape)}"
        )
    return images


def _labels(y: Any, name: str) -> np.ndarray:
    numbers = np.asarray(y.cpu() if isinstance(y, Tensor) else y)
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise DataError(f"{name} must be whole numbers [n], not {numbers.dtype} {list(numbers.shape)}")
    return numbers.astype(np.int64)


def _names(names: Names | None, count: int, what: str) -> list[str]:
    if names is None:
        return [""] * count
    found = [str(name) for name in (names.tolist() if isinstance(names, (np.ndarray, Tensor)) else names)]
    if len(found) != count:
        raise DataError(f"there are {len(found)} {what} for {count} images")
    if not all(found):
        raise DataError(f"{what} must have a name for each image: number {found.index('')} is empty")
    return found


def _shape(image: Tensor) -> str:
    return "x".join(map(str, image.shape))
