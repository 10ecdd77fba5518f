"""Fetching from the hub, without a network: copies of the same schema, and the real library where it is installed."""

import builtins
import importlib.util

import numpy as np
import pytest
from PIL import Image

from fedhpro.config import configure
from fedhpro.data import hub, ingest, sources, store
from fedhpro.data.catalog import CATALOG, Hub
from fedhpro.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDHPRO_DATA", raising=False)


class Feature:
    def __init__(self, names=None):
        self.names = names


class Rows:
    """As much of a `datasets.Dataset` as is used."""

    def __init__(self, columns, **names):
        self.columns, self.features = columns, {name: Feature(names.get(name)) for name in columns}
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        return {name: column[key] for name, column in self.columns.items()}

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def serve(monkeypatch, answer):
    """The hub answers with answer(id, config, split); gives back what it was asked."""
    asked = []

    def load_dataset(name, config, *, split, revision):
        asked.append((name, config, split, revision))
        return answer(name, config, split)

    monkeypatch.setattr(hub, "load_dataset", load_dataset)
    return asked


def pictures(n, size=(32, 32), mode="RGB"):
    return [Image.new(mode, size, i if mode == "L" else (i, 255 - i, 7)) for i in range(n)]


def test_every_row_of_the_table_is_complete():
    for dataset in CATALOG.values():
        assert len(dataset.classes) in (0, dataset.num_classes)
        for part in dataset.parts:
            assert part.original and part.about
            if part.hub is not None:
                assert part.hub.id.count("/") == 1
                assert part.hub.revision == "main" or len(part.hub.revision) == 40
                assert bool(part.hub.pooled) == bool(part.hub.key) == bool(part.hub.group)
    assert {name for name, dataset in CATALOG.items() if not dataset.fetched} == {"office-caltech"}


def test_cifar10(monkeypatch):
    names = list(CATALOG["cifar10"].classes)

    def answer(name, config, split):
        return Rows({"img": pictures(20), "label": [i % 10 for i in range(20)]}, label=names)

    asked = serve(monkeypatch, answer)
    stored = ingest.fetch(CATALOG["cifar10"])
    assert [call[:3] for call in asked] == [("uoft-cs/cifar10", None, "train"), ("uoft-cs/cifar10", None, "test")]
    assert all(len(call[3]) == 40 for call in asked)
    assert stored.origin["revision"] == asked[0][3] and "uoft-cs/cifar10" in stored.origin["from"]
    (domain,) = sources.load("cifar10").domains
    assert domain.train.y.tolist() == [i % 10 for i in range(20)]
    assert domain.train.x[5, :, 3, 3].tolist() == [5, 250, 7]


def test_names_decide_where_a_copy_counts_in_another_order(monkeypatch):
    names = list(CATALOG["cifar10"].classes)[::-1]
    serve(monkeypatch, lambda *_: Rows({"img": pictures(20), "label": [i % 10 for i in range(20)]}, label=names))
    ingest.fetch(CATALOG["cifar10"])
    assert sources.load("cifar10").domains[0].train.y.tolist() == [9 - i % 10 for i in range(20)]


def test_digits_are_fetched_and_syn_is_rendered(monkeypatch):
    sizes = {"ylecun/mnist": (28, 28), "flwrlabs/usps": (16, 16), "ufldl-stanford/svhn": (32, 32)}

    def answer(name, config, split):
        assert config == ("cropped_digits" if "svhn" in name else None)
        grey = pictures(20, sizes[name], "RGB" if "svhn" in name else "L")
        return Rows({"image": grey, "label": [i % 10 for i in range(20)]}, label=list("0123456789"))

    serve(monkeypatch, answer)
    assert ingest.fetch(CATALOG["digits"]).domains == ("mnist", "usps", "svhn")
    source = sources.load("digits")
    assert [domain.name for domain in source.domains] == ["mnist", "usps", "svhn", "syn*"]
    assert source.shape == (3, 32, 32) and not source.domains[-1].real and "SYN*" in source.domains[-1].about


def test_tiny_imagenet_is_tested_on_its_validation_part(monkeypatch):
    names = [f"n{i:08}" for i in range(200)]
    answer = Rows({"image": pictures(200, (64, 64), "L"), "label": list(range(200))}, label=names)
    asked = serve(monkeypatch, lambda *_: answer)
    assert ingest.fetch(CATALOG["tinyimagenet"]).classes == tuple(names)
    assert [call[2] for call in asked] == ["train", "valid"]


def test_ham10000_is_pooled_without_twins_and_cut_by_lesion(monkeypatch):
    """This copy has the same image in several of its splits."""
    diagnoses = list(CATALOG["ham10000"].aliases)

    def answer(name, config, split):
        ids = {"train": range(100), "validation": range(60, 130), "test": range(90, 140)}[split]
        images = [Image.new("RGB", (60, 45), (i, 0, 0)) for i in ids]
        lesions = [f"HAM_{i // 2}" for i in ids]
        columns = {"image": images, "image_id": [f"ISIC_{i:03}" for i in ids], "lesion_id": lesions}
        return Rows(columns | {"dx": [diagnoses[(i // 2) % 7] for i in ids]})

    serve(monkeypatch, answer)
    ingest.fetch(CATALOG["ham10000"])
    (domain,) = sources.load("ham10000").domains
    train, test = (split.x[:, 0, 0, 0].tolist() for split in (domain.train, domain.test))
    assert sorted(train + test) == list(range(140))
    assert not {i // 2 for i in train} & {i // 2 for i in test}
    assert domain.train.y.tolist() == [(i // 2) % 7 for i in train]


def test_ag_news(monkeypatch):
    texts = [f"Words of class{i % 4} and more" for i in range(40)]
    rows = Rows({"text": texts, "label": [i % 4 for i in range(40)]}, label=list(CATALOG["ag-news"].classes))
    serve(monkeypatch, lambda *_: rows)
    ingest.fetch(CATALOG["ag-news"])
    source = sources.load("ag-news")
    assert source.tokenizer.decode(source.domains[0].train.x[2]) == "words of class2 and more"


def refused(name, *words):
    with pytest.raises(DataError) as error:
        ingest.fetch(CATALOG[name])
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text
    assert not store.is_there(store.folder_of(name))


def test_what_goes_wrong(monkeypatch):
    def offline(*_):
        raise ConnectionError("Couldn't reach\nthe Hub")

    serve(monkeypatch, offline)
    refused("cifar10", "uoft-cs/cifar10", "Couldn't reach the Hub", "again", "fedhpro data import cifar10 PATH")
    serve(monkeypatch, lambda *_: Rows({"image": [], "label": []}))
    refused("cifar10", "no column img", "image, label", "fedhpro data import cifar10 PATH")
    serve(monkeypatch, lambda *_: Rows({"img": [], "label": []}))
    refused("cifar10", "uoft-cs/cifar10 (train)", "empty")
    serve(monkeypatch, lambda *_: Rows({"img": pictures(2), "label": [0, 10]}))
    refused("cifar10", "the label 10", "0 to 9")
    serve(monkeypatch, lambda *_: Rows({"img": pictures(2), "label": [0, 1]}, label=["cat", "zebra"]))
    refused("cifar10", "'zebra'")
    refused("office-caltech", "not on the hub", "fedhpro data import office-caltech PATH")


def test_a_download_that_breaks_off_leaves_nothing(monkeypatch):
    class Breaks(Rows):
        def __iter__(self):
            yield self[0]
            raise OSError("connection lost")

    serve(monkeypatch, lambda *_: Breaks({"img": pictures(20), "label": [i % 10 for i in range(20)]}))
    refused("cifar10", "uoft-cs/cifar10 (train) cannot be read to its end (connection lost)", "again")


def test_without_the_library(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    refused("cifar10", "pip install 'fedhpro[hub]'", "fedhpro data import")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="the extra hub is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_library_itself(monkeypatch, tmp_path):
    """Parquet files on this disk, read by the real `load_dataset`."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=list(CATALOG["cifar10"].classes))}
    )
    columns = {"img": pictures(20), "label": [i % 10 for i in range(20)]}
    for split in ("train", "test"):
        datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / f"{split}.parquet")
    real = hub.load_dataset

    def local(name, config, *, split, revision):
        path = str(tmp_path / f"{split}.parquet")
        return real("parquet", data_files={split: path}, split=split, cache_dir=str(tmp_path / "hf"))

    monkeypatch.setattr(hub, "load_dataset", local)
    ingest.fetch(CATALOG["cifar10"])
    (domain,) = sources.load("cifar10").domains
    assert np.array_equal(domain.train.x[:, 0, 0, 0], np.arange(20)) and domain.test.y[13] == 3


def test_runs_can_be_configured_with_every_dataset():
    for name in CATALOG:
        assert configure(data=name).data == name


def test_a_copy_may_have_a_config_and_columns_of_its_own():
    copy = Hub("a/b", "img", "fine_label", test="valid", config="c")
    assert (copy.inputs, copy.label, copy.test, copy.revision) == ("img", "fine_label", "valid", "main")
