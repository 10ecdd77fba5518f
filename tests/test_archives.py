"""Datasets of FEDHPRO_DATA in the plain .npz layout, on small files that the tests write, and on the real ones."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from fedhpro.data import ingest, load, sources, store
from fedhpro.data.catalog import CATALOG
from fedhpro.data.clients import cut
from fedhpro.data.partition import with_all_classes
from fedhpro.errors import DataError

SHARED = Path(__file__).parents[2] / "shared" / "data"


def write(path, n=60, shape=(32, 32, 3), **replace):
    rng = np.random.default_rng(len(path.stem))
    arrays = {}
    for part, size in (("train", n), ("test", 20)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (size, *shape), dtype=np.uint8)
        arrays[f"y_{part}"] = (np.arange(size) % 10).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{name: array for name, array in (arrays | replace).items() if array is not None})


@pytest.fixture(scope="session")
def digits_lite():
    return load("digits-lite")


@pytest.fixture
def folder(tmp_path, monkeypatch, digits_lite):
    monkeypatch.setattr(sources, "_digits_lite", lambda: digits_lite)  # not rendered again in each private cache
    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDHPRO_DATA", str(tmp_path))
    for name, size in (("caltech", 400), ("webcam", 200), ("amazon", 400), ("dslr", 120)):
        write(tmp_path / "office_caltech" / f"{name}.npz", size)
    write(tmp_path / "digits" / "mnist.npz", 2300, (28, 28))
    write(tmp_path / "digits" / "usps.npz", 700, (16, 16))
    write(tmp_path / "digits" / "svhn.npz", 5300)
    return tmp_path


def test_office_caltech(folder):
    source = load("office-caltech")
    assert [domain.name for domain in source.domains] == ["caltech", "webcam", "amazon", "dslr"]
    assert source.allocation == {"caltech": (3, 80), "webcam": (1, 40), "amazon": (2, 80), "dslr": (4, 24)}
    assert source.shape == (3, 32, 32) and source.flip and source.complete
    for domain, held in zip(source.domains, sources.with_validation(source).domains, strict=True):
        assert len(domain.validation) == 0 and len(held.validation) == round(0.15 * len(domain.train))
        assert len(held.train) + len(held.validation) == len(domain.train)
        assert len(torch.unique(torch.bincount(held.validation.y))) <= 2  # the same share of each class
    clients = cut(source, scenario="domains", seed=0)
    assert sorted(client.domain for client in clients) == ["amazon"] * 2 + ["caltech"] * 3 + ["dslr"] * 4 + ["webcam"]
    for client in clients:
        assert len(set(client.train.y.tolist())) == 10
        assert len(client.train) == source.allocation[client.domain][1]


def test_digits_come_in_one_size_and_three_channels(folder):
    source = load("digits")
    assert [domain.name for domain in source.domains] == ["mnist", "usps", "svhn", "syn*"]
    assert source.allocation == {"mnist": (3, 600), "usps": (7, 72), "svhn": (6, 732), "syn*": (4, 100)}
    for domain in source.domains:
        assert domain.train.x.shape[1:] == (3, 32, 32) and domain.train.x.is_contiguous()
    grey = source.domains[0].train.x
    assert (grey[:, 0] == grey[:, 2]).all()
    assert not source.domains[-1].real and source.domains[0].real


def test_completion_keeps_the_size_and_one_sample_of_each_class():
    labels = np.repeat(np.arange(10), 30)
    rng = np.random.default_rng(0)
    for size in (10, 12, 25):
        indices = rng.permutation(60)[:size]  # classes 0 and 1 only
        found = with_all_classes(indices, labels, rng)
        assert len(found) == size and set(labels[found]) == set(range(10))
        assert len(set(found)) == size


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), ["has no webcam", "webcam.npz", "class folders"]),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), ["not a whole .npz"]),
        (lambda path: write(path, y_test=None), ["y_test"]),
        (lambda path: write(path, x_train=np.zeros((60, 32, 32, 3))), ["float64", "uint8"]),
        (lambda path: write(path, x_train=np.zeros((60, 32, 32, 4), np.uint8)), ["[32, 32, 4]", "RGB"]),
        (lambda path: write(path, y_train=np.full(60, 11)), ["label 11", "0 to 9", "train"]),
        (lambda path: write(path, y_train=np.arange(60) % 10 - 1), ["label -1", "0 to 9"]),
        (lambda path: write(path, y_train=np.zeros(60)), ["whole numbers"]),
        (lambda path: write(path, y_train=np.arange(59) % 10), ["60 images", "59 labels"]),
        (lambda path: write(path, y_train=np.full(60, 3)), ["one class only, headphones"]),
        (lambda path: write(path, y_train=np.arange(60) % 9), ["no sample of class projector"]),
        (
            lambda path: write(path, x_test=np.zeros((0, 32, 32, 3), np.uint8), y_test=np.zeros(0, int)),
            ["test", "empty"],
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(folder, damage, words):
    path = folder / "office_caltech" / "webcam.npz"
    damage(path)
    with pytest.raises(DataError) as error:
        load("office-caltech")
    for word in [str(path.parent), *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)
    assert not store.is_there(store.mirror_of("office-caltech"))


def test_changed_files_are_read_again(folder):
    assert len(load("office-caltech").domains[1].train) == 200
    before = os.stat(store.mirror_of("office-caltech") / store.MANIFEST).st_mtime_ns
    load("office-caltech")
    assert os.stat(store.mirror_of("office-caltech") / store.MANIFEST).st_mtime_ns == before
    write(folder / "office_caltech" / "webcam.npz", 100)
    assert len(load("office-caltech").domains[1].train) == 100


def test_of_many_that_start_together_one_makes_the_copy(folder, monkeypatch):
    made, write_copy = [], ingest._write

    def slowly(*given):
        made.append(given)
        time.sleep(0.2)
        return write_copy(*given)

    monkeypatch.setattr(ingest, "_write", slowly)
    with ThreadPoolExecutor(4) as pool:
        sizes = list(pool.map(lambda _: len(load("office-caltech").domains[1].train), range(4)))
    assert sizes == [200] * 4 and len(made) == 1


def test_a_copy_of_another_version_is_made_again(folder):
    load("office-caltech")
    path = store.mirror_of("office-caltech") / store.MANIFEST
    path.write_text(path.read_text().replace(f'"format": {store.FORMAT}', '"format": 0'))
    load("office-caltech")
    assert store.read(path.parent).manifest["format"] == store.FORMAT


def test_larger_than_memory(folder, monkeypatch):
    whole = load("digits")
    monkeypatch.setenv("FEDHPRO_MEMORY", "0.0001")
    mapped = load("digits")
    assert torch.equal(whole.domains[2].train.x, mapped.domains[2].train.x)
    assert isinstance(store.read(store.mirror_of("digits")).array("svhn.train.x"), np.memmap)
    assert len(cut(mapped, scenario="domains", seed=0)) == 20


def test_one_file_for_a_dataset(folder):
    write(folder / "cifar10.npz", 50)
    source = load("CIFAR-10")
    assert source.name == "cifar10" and source.shape == (3, 32, 32) and source.classes[3] == "cat"
    assert source.allocation == {"cifar10": (10, 5)}


def test_ham10000_with_lesions(folder):
    rng = np.random.default_rng(0)
    lesions, names = np.repeat(np.arange(70), 2), np.array(CATALOG["ham10000"].classes)[::-1]  # in another order
    x = rng.integers(0, 256, (140, 96, 128, 3), dtype=np.uint8)
    arrays = {"x": x, "y": (lesions % 7).astype(np.uint8), "lesion_id": lesions.astype(str), "classes": names}
    np.savez(folder / "ham10000.npz", **arrays)
    (domain,) = load("ham10000").domains
    assert len(domain.train) + len(domain.test) == 140 and domain.train.x.shape[1:] == (3, 96, 128)
    places = {image.tobytes(): i for i, image in enumerate(x.transpose(0, 3, 1, 2))}
    rows = [places[image.numpy().tobytes()] for image in domain.train.x]
    assert domain.train.y.tolist() == [6 - lesions[i] % 7 for i in rows]
    assert not {lesions[i] for i in rows} & {lesions[places[image.numpy().tobytes()]] for image in domain.test.x}
    np.savez(folder / "ham10000.npz", **arrays | {"classes": np.array([*names[:-1], "wart"])})
    with pytest.raises(DataError, match="has a class 'wart'"):
        load("ham10000")


def test_not_at_hand(folder, monkeypatch):
    for name, get in (("cifar100", True), ("sun397", True), ("office-caltech", False)):
        monkeypatch.delenv("FEDHPRO_DATA", raising=False)
        with pytest.raises(DataError) as error:
            load(name)
        assert f"`fedhpro data import {name} PATH`" in str(error.value)
        assert (f"`fedhpro data get {name}`" in str(error.value)) == get


@pytest.mark.skipif(not SHARED.exists(), reason="the real datasets are not beside this checkout")
def test_the_real_ones(tmp_path, monkeypatch, digits_lite):
    """Clients of the paper's sizes. CIFAR-10 and HAM10000 take long to unpack: `fedhpro data verify` is run by hand."""
    monkeypatch.setattr(sources, "_digits_lite", lambda: digits_lite)
    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDHPRO_DATA", str(tmp_path))
    names = ("digits", "office_caltech", "ag_news")
    subprocess.run([sys.executable, SHARED / "unpack.py", tmp_path, *names], check=True, capture_output=True)
    digits = cut(load("digits"), scenario="domains", seed=0)
    sizes = {client.domain: len(client.train) for client in digits}
    assert len(digits) == 20 and sizes == {"mnist": 600, "usps": 72, "svhn": 732, "syn*": 100}
    office = cut(load("office_caltech"), scenario="domains", seed=0)
    sizes = {client.domain: len(client.train) for client in office}
    assert len(office) == 10 and sizes == {"caltech": 179, "webcam": 47, "amazon": 153, "dslr": 25}
    (news,) = load("ag_news").domains
    assert (len(news.train), len(news.test)) == (29_779, 7_600)
