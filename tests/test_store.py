"""The cache of datasets: whole or not there, mapped when large, refused when it is of another version."""

import json
import os

import numpy as np
import pytest
import torch

from fedhpro.data import store
from fedhpro.data.splits import carve, eight_of_ten
from fedhpro.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path))
    monkeypatch.delenv("FEDHPRO_DATA", raising=False)
    return tmp_path


def fill(draft):
    x = draft.array("a.train.x", (4, 3, 2, 2), np.uint8)
    x[:] = np.arange(48).reshape(x.shape)
    draft.save("a.train.y", np.array([0, 1, 0, 1]))
    draft.text("note.txt", "é")
    draft.domains["a"] = {"train": 4, "test": 0}


@pytest.fixture
def folder():
    target = store.folder_of("toy")
    with store.draft(target) as draft:
        fill(draft)
        draft.finish("toy", ("no", "yes"), {"from": "here"})
    return target


def one_sentence(error, *words):
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_what_is_written_is_read(folder):
    stored = store.read(folder)
    stored.check_sums()
    assert (stored.classes, stored.domains, stored.samples("a", "train")) == (("no", "yes"), ("a",), 4)
    assert stored.array("a.train.x").ravel().tolist() == list(range(48))
    assert stored.text("note.txt") == "é" and stored.has("a.train.y") and not stored.has("a.train.groups")
    assert stored.bytes == sum(path.stat().st_size for path in folder.iterdir() if path.name != store.MANIFEST)
    assert os.listdir(folder.parent) == ["toy"]


def test_a_large_dataset_is_mapped_and_its_files_stay_as_they_are(folder, monkeypatch):
    assert not isinstance(store.read(folder).array("a.train.x"), np.memmap)
    monkeypatch.setenv("FEDHPRO_MEMORY", "1e-8")
    stored = store.read(folder)
    mapped = stored.array("a.train.x")
    assert isinstance(mapped, np.memmap)
    torch.from_numpy(mapped)[0] = 7  # no warning, and no effect on the disk
    stored.check_sums()
    monkeypatch.setenv("FEDHPRO_MEMORY", "much")
    with pytest.raises(DataError, match="FEDHPRO_MEMORY=much: write a number of GiB"):
        stored.array("a.train.x")


def test_a_broken_import_leaves_nothing(cache):
    target = store.folder_of("toy")
    with pytest.raises(KeyError), store.draft(target) as draft:
        fill(draft)
        raise KeyError
    assert not store.is_there(target) and os.listdir(target.parent) == []


def test_a_broken_import_leaves_the_former_one(folder):
    with pytest.raises(KeyError), store.draft(folder) as draft:
        fill(draft)
        raise KeyError
    store.read(folder).check_sums()
    assert os.listdir(folder.parent) == ["toy"]


def test_a_new_import_takes_the_place_of_the_former_one(folder):
    (folder / "old").write_text("")
    with store.draft(folder) as draft:
        fill(draft)
        draft.finish("toy", ("a", "b"), {"from": "elsewhere"})
    assert store.read(folder).classes == ("a", "b") and not (folder / "old").exists()


def test_what_a_killed_process_left_is_removed(folder):
    dead, alive = (folder.with_name(f".toy.{pid}.tmp") for pid in (2**22 + 1, 1))
    dead.mkdir()
    alive.mkdir()
    with store.draft(folder) as draft:
        fill(draft)
        draft.finish("toy", ("a", "b"), {})
    assert not dead.exists() and alive.exists()


def test_a_disk_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot write") as error, store.draft(store.folder_of("toy")):
        pass
    one_sentence(error, "toy")


def test_truncated_changed_and_missing_files(folder):
    path = folder / "a.train.x.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\xff")
    stored = store.read(folder)  # the size fits
    with pytest.raises(DataError) as error:
        stored.check_sums()
    one_sentence(error, str(path), "checksum", "fedhpro data get toy", "fedhpro data import toy PATH")
    path.write_bytes(content[:-1])
    with pytest.raises(DataError) as error:
        store.read(folder)
    one_sentence(error, str(path), f"{len(content) - 1} bytes instead of {len(content)}")
    path.unlink()
    with pytest.raises(DataError) as error:
        store.read(folder)
    one_sentence(error, str(path), "is missing")


@pytest.mark.parametrize("version", [0, 2])
def test_a_cache_of_another_version_is_refused(folder, version):
    path = folder / store.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": version}))
    with pytest.raises(DataError) as error:
        store.read(folder)
    one_sentence(error, str(folder), f"format {version}", f"reads format {store.FORMAT}", "fedhpro data get toy")


@pytest.mark.parametrize("content", ["", "[]", "{}", "null"])
def test_a_manifest_that_is_none(folder, content):
    (folder / store.MANIFEST).write_text(content)
    with pytest.raises(DataError) as error:
        store.read(folder)
    one_sentence(error, store.MANIFEST, "is not the manifest")


def test_carve_takes_the_same_share_of_each_class():
    labels = np.repeat([0, 1, 2], [100, 50, 7])
    kept, taken = carve(labels, 31, np.random.default_rng(0))
    assert sorted([*kept, *taken]) == list(range(157)) and (np.diff(taken) > 0).all()
    assert np.bincount(labels[taken]).tolist() == [20, 10, 1]
    assert np.array_equal(taken, carve(labels, 31, np.random.default_rng(0))[1])


def test_carve_never_cuts_a_group_apart_and_hits_the_number():
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(300), rng.integers(1, 5, 300))
    labels = (groups % 7 > 4).astype(np.int64)
    groups = groups[order := rng.permutation(len(groups))]
    labels = labels[order]
    kept, taken = carve(labels, 80, rng, groups)
    assert not set(groups[kept]) & set(groups[taken]) and len(taken) == 80
    assert len(carve(np.zeros(4, np.int64), 4, rng, np.array(["a", "a", "b", "b"]))[1]) == 2  # one group stays


def test_the_order_of_the_rows_is_no_matter():
    """HAM10000 is cut alike whether it comes from the hub, from a folder or from an .npz file."""
    groups = np.repeat([f"HAM_{i}" for i in range(80)], 2)
    labels = np.repeat(np.arange(80) % 3, 2)
    order = np.random.default_rng(1).permutation(160)
    taken = carve(labels, 30, np.random.default_rng(0), groups)[1]
    other = carve(labels[order], 30, np.random.default_rng(0), groups[order])[1]
    assert set(groups[taken]) == set(groups[order][other])


def test_eight_of_ten():
    kept, taken = eight_of_ten(25)
    assert taken.tolist() == [8, 9, 18, 19] and len(kept) == 21
