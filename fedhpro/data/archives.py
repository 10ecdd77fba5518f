"""Image sources from files of the plain layout: one .npz per domain with x_train, y_train, x_test, y_test.

Images are uint8, NHWC or NHW; they are resized to 32x32 and grey ones get three channels. The folder is FEDHPRO_DATA,
or the cache. A validation part is cut off the training part once, with a fixed seed; clients never hold it.
"""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ..errors import DataError
from ..files import data_folder
from ..randomness import numpy_generator
from .sources import Domain, Source, Split

SIDE = 32
VALIDATION = 0.15  # of the training part


def office_caltech() -> Source:
    """Office-Caltech: 10 clients, each with 20 % of its domain's training part and all ten classes (as in FPL)."""
    folder = data_folder() / "office_caltech"
    clients = {"caltech": 3, "webcam": 1, "amazon": 2, "dslr": 4}
    sizes = {name: len(_read(folder / f"{name}.npz")["y_train"]) for name in clients}
    domains = tuple(_domain(folder / f"{name}.npz", "photographs, resized to 32x32") for name in clients)
    classes = (
        "backpack",
        "bike",
        "calculator",
        "headphones",
        "keyboard",
        "laptop",
        "monitor",
        "mouse",
        "mug",
        "projector",
    )
    allocation = {name: (count, int(0.2 * sizes[name])) for name, count in clients.items()}
    return Source("office-caltech", domains, classes, allocation, flip=True, complete=True)


def digits() -> Source:
    """Digits: 20 clients with 1 % of a domain each. SYN* is rendered here, a substitute for Synthetic Digits."""
    from . import digits_lite

    folder = data_folder() / "digits"
    real = [_domain(folder / f"{name}.npz", "real digits") for name in ("mnist", "usps", "svhn")]
    rendered = next(domain for domain in digits_lite.load().domains if domain.name == "syn")
    syn = dataclasses.replace(rendered, name="syn*")
    # SVHN's 732 is 1 % of its full training set of 73,257
    allocation = {"mnist": (3, 600), "usps": (7, 72), "svhn": (6, 732), "syn*": (4, 100)}
    return Source("digits", (*real, syn), tuple("0123456789"), allocation)


def _domain(path: Path, about: str) -> Domain:
    arrays = _read(path)
    train, test = (
        Split(_images(arrays[f"x_{part}"], path), _labels(arrays[f"y_{part}"], path)) for part in ("train", "test")
    )
    order = torch.from_numpy(numpy_generator(0, "validation", path.stem).permutation(len(train)))
    held, kept = (
        order[: int(VALIDATION * len(train))].sort().values,
        order[int(VALIDATION * len(train)) :].sort().values,
    )
    return Domain(
        path.stem, Split(train.x[kept], train.y[kept]), Split(train.x[held], train.y[held]), test, True, about
    )


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise DataError(
            f"{path} is missing: put it there, or set FEDHPRO_DATA to the folder that has {path.parent.name}/"
        )
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a whole .npz file with x_train, y_train, x_test, y_test: {error}") from None
    for part in ("train", "test"):
        images, labels = len(arrays[f"x_{part}"]), len(arrays[f"y_{part}"])
        if images != labels:
            raise DataError(f"{path} has {images} images and {labels} labels in its {part} part")
    return arrays


def _images(x: np.ndarray, path: Path) -> torch.Tensor:
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise DataError(
            f"{path} has images of type {x.dtype} and shape {list(x.shape)}, not uint8 [n, h, w] or [n, h, w, 3]"
        )
    if x.shape[1:3] != (SIDE, SIDE):
        resized = (Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for image in x)
        x = np.stack([np.asarray(image) for image in resized])
    x = np.repeat(x[..., None], 3, axis=3) if x.ndim == 3 else x
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))


def _labels(y: np.ndarray, path: Path) -> torch.Tensor:
    if not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() > 9:
        raise DataError(f"{path} has labels that are not whole numbers from 0 to 9")
    return torch.from_numpy(y.astype(np.int64))
