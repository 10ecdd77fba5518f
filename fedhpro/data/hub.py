"""Datasets from the Hugging Face Hub, through the library `datasets` (extra `hub`).

An interrupted download goes on where it stopped: the library keeps what it has in a cache of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from . import importers
from .catalog import Dataset, Hub, Part
from .importers import Found, Picture, Samples

Array = NDArray[Any]


def read(dataset: Dataset) -> dict[str, Found]:
    """The domains that the hub has, downloaded; images are decoded as they are asked for."""
    if not dataset.fetched:
        wanted = "; ".join(f"{part.name}: {part.original}" for part in dataset.parts if part.hub is None)
        raise DataError(
            f"{dataset.title} is not on the hub: get it yourself and run `fedhpro data import {dataset.name} PATH` "
            f"({wanted})"
        )
    return {part.name: _domain(dataset, part, part.hub) for part in dataset.parts if part.hub is not None}


def origin(dataset: Dataset) -> dict[str, str]:
    copies = [part.hub for part in dataset.parts if part.hub is not None]
    return {
        "from": " ".join(f"https://huggingface.co/datasets/{copy.id}" for copy in copies),
        "revision": " ".join(copy.revision for copy in copies),
    }


def load_dataset(*arguments: Any, **options: Any) -> Any:
    """`datasets.load_dataset`, in one place so that tests need no network."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            "fetching needs the library `datasets`: run `pip install 'fedhpro[hub]'`, or bring the files and run "
            "`fedhpro data import NAME PATH`"
        ) from None
    return datasets.load_dataset(*arguments, **options)


def _domain(dataset: Dataset, part: Part, copy: Hub) -> Found:
    if copy.pooled:
        return _pooled(dataset, part, copy)
    train, test = (_split(dataset, part, copy, split) for split in (copy.train, copy.test))

    def samples(rows: Any, split: str) -> Samples:
        return Samples(f"{copy.id} ({split})", _inputs(rows, dataset, copy), _labels(rows, dataset, copy))

    return Found(samples(train, copy.train), samples(test, copy.test), dataset.classes or _names(train, copy))


def _pooled(dataset: Dataset, part: Part, copy: Hub) -> Found:
    """All samples of all splits, those that are there twice once, cut anew."""
    every = [_split(dataset, part, copy, split) for split in copy.pooled]
    places = [(which, row) for which, rows in enumerate(every) for row in range(len(rows))]
    labels = np.concatenate([_labels(rows, dataset, copy) for rows in every])
    keys, groups = (np.array([each for rows in every for each in rows[column]]) for column in (copy.key, copy.group))
    once = np.unique(keys, return_index=True)[1]  # in the order of the keys, whatever that of the splits

    def take(rows: Array) -> Iterator[Picture]:
        for which, row in (places[once[i]] for i in rows):
            yield every[which][row][copy.inputs]

    return importers.cut(dataset, copy.id, labels[once], take, groups[once], dataset.classes)


def _split(dataset: Dataset, part: Part, copy: Hub, split: str) -> Any:
    try:
        rows = load_dataset(copy.id, copy.config, split=split, revision=copy.revision)
    except DataError:
        raise
    except Exception as error:  # the library raises what its many libraries raise
        raise DataError(
            f"{part.name} cannot be fetched from huggingface.co/datasets/{copy.id} ({importers.brief(error)}): run the "
            f"command again to go on where it stopped, or `fedhpro data import {dataset.name} PATH` with "
            f"{part.original}"
        ) from None
    for column in filter(None, (copy.inputs, copy.label, copy.key, copy.group)):
        if column not in rows.column_names:
            raise DataError(
                f"{copy.id} ({split}) has no column {column}, only {', '.join(rows.column_names)}: it has "
                f"changed; bring the files and run `fedhpro data import {dataset.name} PATH`"
            )
    return rows


def _inputs(rows: Any, dataset: Dataset, copy: Hub) -> Sequence[str] | Iterator[Picture]:
    if dataset.kind == "text":
        return [str(each) for each in rows[copy.inputs]]
    return (row[copy.inputs] for row in rows)


def _names(rows: Any, copy: Hub) -> tuple[str, ...]:
    """The names of the classes, where the copy has them."""
    return tuple(getattr(rows.features[copy.label], "names", None) or ())


def _labels(rows: Any, dataset: Dataset, copy: Hub) -> Array:
    values = np.asarray(list(rows[copy.label]))
    names = _names(rows, copy)
    if values.dtype.kind in "UO":  # the names themselves
        names, values = tuple(map(str, np.unique(values))), np.unique(values, return_inverse=True)[1]
    return importers.relabel(values, names, dataset, copy.id) if names else values
