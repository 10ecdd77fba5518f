"""Files: the old one or the whole new one, and no tensor that is not what was written."""

import os
import stat

import pytest
import torch

from fedhpro import files
from fedhpro.files import DamagedFile, checksum, load_tensors, save_tensors, write_atomically

TENSORS = {
    "float": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "bool": torch.tensor([True, False]),
    "int64": torch.tensor([-(2**40), 2**40]),
    "uint8": torch.tensor([[255, 0]], dtype=torch.uint8),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "parameter": torch.nn.Parameter(torch.tensor([1.0])),
    "odd name/ä": torch.tensor(1),
}


# write_atomically


@pytest.mark.parametrize("content", [b"\x00new", "neu: ä\n", b""])
def test_writes_over_the_old_file_and_makes_folders(tmp_path, content):
    path = tmp_path / "a" / "b" / "file.txt"
    write_atomically(path, b"old")
    write_atomically(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(path.parent) == ["file.txt"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, error):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")

    def fail(*_):
        raise error

    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(type(error)):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


# checksum


def test_checksum_depends_on_the_content_alone():
    value = torch.arange(6, dtype=torch.int32)
    one = checksum({"a": value, "b": value[:2]})
    assert one == checksum({"b": value[:2].clone(), "a": value})
    assert checksum({"t": TENSORS["transposed"]}) == checksum({"t": TENSORS["transposed"].contiguous()})


def test_checksum_sees_every_change():
    value = torch.arange(6, dtype=torch.int32)
    versions = {
        "as it is": {"a": value},
        "name": {"b": value},
        "type": {"a": value.view(torch.float32)},
        "shape": {"a": value.reshape(2, 3)},
        "other shape": {"a": value.reshape(3, 2)},
        "bytes": {"a": value + (value == 5).int()},
        "empty": {"a": value[:0]},
        "more": {"a": value, "b": value},
        "nothing": {},
    }
    assert len({checksum(version) for version in versions.values()}) == len(versions)


@pytest.mark.parametrize("name", TENSORS)
def test_checksum_takes_every_kind_of_tensor(name):
    value = TENSORS[name].detach()
    assert len(checksum({"x": value})) == 64
    if value.numel():
        changed = value.flatten().clone()
        changed[0] = 0 if changed[0] else 1
        assert checksum({"x": changed.reshape(value.shape)}) != checksum({"x": value})


# tensors


def test_tensors_round_trip(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS, recipe="r1", note="ä")
    loaded, about = load_tensors(path)
    assert about == {"recipe": "r1", "note": "ä"}
    assert loaded.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert loaded[name].dtype == value.dtype
        assert loaded[name].shape == value.shape
        assert torch.equal(loaded[name], value.detach())


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"w": torch.ones(1000)})
    loaded, _ = load_tensors(path)
    path.write_bytes(b"\xff" * path.stat().st_size)  # in place, under a mapping if there were one
    assert torch.equal(loaded["w"], torch.ones(1000))


def test_no_tensors_round_trip(tmp_path):
    save_tensors(tmp_path / "x", {})
    assert load_tensors(tmp_path / "x") == ({}, {})


@pytest.fixture
def small_file(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"w": torch.tensor([1.0, 2.0]), "flag": torch.tensor(True)}
    save_tensors(path, tensors, recipe="r1")
    return path, path.read_bytes(), tensors


def test_truncated_files_are_damaged(small_file):
    path, content, _ = small_file
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedFile, match=str(path)):
            load_tensors(path)


def test_no_flipped_bit_changes_a_tensor(small_file):
    """Anywhere in the file: it is noticed, or the tensors are as written (the flip is in the header's notes)."""
    path, content, tensors = small_file
    unnoticed = 0
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 7
        path.write_bytes(damaged)
        try:
            loaded, _ = load_tensors(path)
        except DamagedFile:
            continue
        unnoticed += 1
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert unnoticed <= len("reciper1") + 1  # a byte that means True still does with another bit set


def test_a_file_without_checksum_is_damaged(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "x")
    with pytest.raises(DamagedFile, match="its checksum does not fit"):
        load_tensors(tmp_path / "x")


def test_a_missing_file_is_missing_and_not_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_tensors(tmp_path / "x")


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path))
    assert files.cache_folder() == tmp_path
    monkeypatch.setenv("FEDHPRO_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / ".cache" / "fedhpro"
