"""Real datasets in the plain .npz layout, on small files that the tests write."""

from pathlib import Path

import numpy as np
import pytest

from fedhpro.data import load
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


@pytest.fixture
def folder(tmp_path, monkeypatch):
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
    for domain in source.domains:
        assert len(domain.validation) == int(0.15 * (len(domain.train) + len(domain.validation)))
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
    "damage, words",
    [
        (lambda path: path.unlink(), ["is missing", "FEDHPRO_DATA"]),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), ["not a whole .npz"]),
        (lambda path: write(path, y_test=None), ["y_test"]),
        (lambda path: write(path, x_train=np.zeros((60, 32, 32, 3))), ["float64", "uint8"]),
        (lambda path: write(path, y_train=np.full(60, 11)), ["0 to 9"]),
        (lambda path: write(path, y_train=np.zeros(60)), ["whole numbers"]),
        (lambda path: write(path, y_train=np.zeros(59, dtype=int)), ["60 images", "59 labels"]),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(folder, damage, words):
    path = folder / "office_caltech" / "webcam.npz"
    damage(path)
    with pytest.raises(DataError) as error:
        load("office-caltech")
    for word in [str(path), *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not SHARED.exists(), reason="the real datasets are not beside this checkout")
def test_the_real_office_caltech_has_the_papers_clients(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHPRO_DATA", str(tmp_path))
    (tmp_path / "office_caltech").mkdir()
    with np.load(SHARED / "office_caltech_32.npz") as file:
        for name in ("caltech", "webcam", "amazon", "dslr"):
            keys = ("x_train", "y_train", "x_test", "y_test")
            np.savez(tmp_path / "office_caltech" / f"{name}.npz", **{key: file[f"{name}_{key}"] for key in keys})
    allocation = load("office-caltech").allocation
    assert allocation == {"caltech": (3, 179), "webcam": (1, 47), "amazon": (2, 153), "dslr": (4, 25)}
