"""Every original format, on small files that are written here, whole and broken."""

import bz2
import gzip
import io
import os
import pickle
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fedhpro import files
from fedhpro.data import importers, ingest, sources, store
from fedhpro.data.catalog import CATALOG, canonical, find
from fedhpro.errors import DataError

RNG = np.random.default_rng(0)
CIFAR10 = CATALOG["cifar10"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDHPRO_DATA", raising=False)


def images(n, *shape):
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def labels(n, classes=10):
    return np.arange(n) % classes


def one_domain(name):
    """A dataset of which only one domain is looked at."""
    part = next(part for part in CATALOG["digits"].parts if part.name == name)
    return replace(CATALOG["digits"], name=name, parts=(part,))


def stored(dataset, path):
    """train x, y and test x, y after a way through the cache; nothing else is left there."""
    made = ingest.import_files(dataset, path)
    made.check_sums()
    assert [name for name in os.listdir(store.folder_of("")) if name.startswith(".")] == []
    domain = dataset.parts[0].name
    return [made.array(f"{domain}.{split}.{key}") for split in ("train", "test") for key in "xy"]


def refused(dataset, path, *words):
    with pytest.raises(DataError) as error:
        ingest.import_files(dataset, path)
    text = str(error.value)
    assert "\n" not in text and all(str(word) in text for word in words), text
    assert not store.is_there(store.folder_of(dataset.name))
    folder = store.folder_of("")
    assert not folder.exists() or os.listdir(folder) == []


def rgb(x):
    """Grey or colour, as they are kept."""
    return np.repeat(x[:, None], 3, 1) if x.ndim == 3 else x.transpose(0, 3, 1, 2)


# --- MNIST, USPS, SVHN ---


def idx(array):
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">i4").tobytes() + array.astype(np.uint8).tobytes()


def write_mnist(folder, dot="-", end="", side=32):
    x, y = images(20, side, side), labels(20)
    pack = gzip.compress if end else bytes
    for prefix, rows in (("train", slice(None)), ("t10k", slice(10))):
        (folder / f"{prefix}-images{dot}idx3-ubyte{end}").write_bytes(pack(idx(x[rows])))
        (folder / f"{prefix}-labels{dot}idx1-ubyte{end}").write_bytes(pack(idx(y[rows])))
    return x, y


@pytest.mark.parametrize(("dot", "end"), [("-", ""), ("-", ".gz"), (".", "")])
def test_mnist(tmp_path, dot, end):
    x, y = write_mnist(tmp_path, dot, end)
    train, train_y, test, test_y = stored(one_domain("mnist"), tmp_path)
    assert np.array_equal(train, rgb(x)) and np.array_equal(train_y, y)
    assert np.array_equal(test, rgb(x[:10])) and test_y.tolist() == list(range(10)) and test_y.dtype == np.int64


def test_mnist_is_resized(tmp_path):
    x, _ = write_mnist(tmp_path, side=28)
    train = stored(one_domain("mnist"), tmp_path)[0]
    expected = np.asarray(Image.fromarray(x[3]).resize((32, 32), Image.Resampling.BILINEAR))
    assert train.shape == (20, 3, 32, 32) and np.array_equal(train[3, 1], expected)


def test_broken_mnist(tmp_path):
    write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    refused(one_domain("mnist"), tmp_path, path, "cut short")
    path.write_bytes(b"<html>")
    refused(one_domain("mnist"), tmp_path, path, "not an idx file")
    path.write_bytes(content)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    refused(one_domain("mnist"), tmp_path, "t10k-labels-idx1-ubyte", "is missing")
    path.rename(f"{path}.gz")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels(10)))
    refused(one_domain("mnist"), tmp_path, "train-images-idx3-ubyte.gz", "cannot be read")


def write_usps(folder, line=None):
    x, y = images(20, 16, 16), labels(20)
    rows = [
        f"{label + 1} " + " ".join(f"{i}:{v / 127.5 - 1:.6f}" for i, v in enumerate(image.ravel(), 1))
        for image, label in zip(x, y, strict=True)
    ]
    rows[1:1] = [line] if line else []
    (folder / "usps.bz2").write_bytes(bz2.compress("\n".join(rows).encode()))
    (folder / "usps.t.bz2").write_bytes(bz2.compress("\n".join(rows[:5]).encode()))
    return x, y


def test_usps(tmp_path):
    x, y = write_usps(tmp_path)
    train, train_y, _, test_y = stored(replace(one_domain("usps"), size=(16, 16)), tmp_path)
    assert np.array_equal(train, rgb(x)) and np.array_equal(train_y, y) and test_y.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("line", ["1 1:a", "x 1:0.5", "1 257:0", "3", "2 0.5"])
def test_broken_usps(tmp_path, line):
    write_usps(tmp_path, line)
    refused(one_domain("usps"), tmp_path, tmp_path / "usps.bz2", "line 2")


def test_truncated_usps(tmp_path):
    write_usps(tmp_path)
    path = tmp_path / "usps.bz2"
    path.write_bytes(path.read_bytes()[:-9])
    refused(one_domain("usps"), tmp_path, path, "cannot be read", "get it again")


def test_svhn(tmp_path):
    from scipy.io import savemat

    x, y = images(20, 32, 32, 3), labels(20)
    for split, n in (("train", 20), ("test", 10)):
        content = {"X": x[:n].transpose(1, 2, 3, 0), "y": np.where(y[:n] == 0, 10, y[:n]).astype(np.uint8)[:, None]}
        savemat(tmp_path / f"{split}_32x32.mat", content)
    train, train_y, test, _ = stored(one_domain("svhn"), tmp_path)
    assert np.array_equal(train, rgb(x)) and np.array_equal(train_y, y) and len(test) == 10
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:3000])
    store_folder = store.folder_of("svhn")
    with pytest.raises(DataError, match=r"not a whole \.mat file"):
        ingest.import_files(one_domain("svhn"), tmp_path)
    store.read(store_folder).check_sums()  # the former import is untouched


def test_a_mat_file_that_is_none(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}_32x32.mat").write_bytes(b"nothing of the kind" * 20)
    refused(one_domain("svhn"), tmp_path, "train_32x32.mat", "not a whole .mat file")


# --- CIFAR ---


def planes(x):
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


def write_cifar(folder, protocol=2):
    x, y = images(60, 32, 32, 3), labels(60)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for i, name in enumerate(names):
        rows = slice(10 * i, 10 * i + 10)
        batch = {b"data": planes(x[rows]), b"labels": y[rows].tolist(), b"batch_label": b"x", b"filenames": [b"a"] * 10}
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
    meta = {b"label_names": [name.encode() for name in CIFAR10.classes]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol))
    return x, y


@pytest.mark.parametrize("protocol", [2, 5])
def test_cifar10_for_python(tmp_path, protocol):
    x, y = write_cifar(tmp_path, protocol)
    train, train_y, test, test_y = stored(CIFAR10, tmp_path)
    assert np.array_equal(train, rgb(x[:50])) and np.array_equal(train_y, y[:50])
    assert np.array_equal(test, rgb(x[50:])) and np.array_equal(test_y, y[50:])


def test_cifar10_as_python_2_wrote_it(tmp_path):
    """Strings of bytes in the old opcodes, and numpy's old module names."""
    write_cifar(tmp_path)
    for path in tmp_path.iterdir():
        content = path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        path.write_bytes(content)
    assert len(stored(CIFAR10, tmp_path)[0]) == 50
    assert importers._pickle(_write(tmp_path / "p", b"\x80\x02}U\x06labelsK\x01s.")) == {b"labels": 1}


def _write(path, content):
    path.write_bytes(content)
    return path


def test_cifar10_from_the_archive(tmp_path):
    inner = tmp_path / "cifar-10-batches-py"
    inner.mkdir()
    x, _ = write_cifar(inner)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(inner, inner.name)
    assert np.array_equal(stored(CIFAR10, tmp_path / "cifar-10-python.tar.gz")[0], rgb(x[:50]))
    assert os.listdir(tmp_path / "cache") == ["datasets"]  # what was unpacked is gone


def test_cifar_binary(tmp_path):
    x, y = images(60, 32, 32, 3), labels(60)
    rows = np.concatenate([y[:, None].astype(np.uint8), planes(x)], 1)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (tmp_path / f"{name}.bin").write_bytes(rows[10 * i : 10 * i + 10].tobytes())
    (tmp_path / "batches.meta.txt").write_text("\n".join(CIFAR10.classes) + "\n\n")
    train, train_y, _, _ = stored(CIFAR10, tmp_path)
    assert np.array_equal(train, rgb(x[:50])) and np.array_equal(train_y, y[:50])
    (tmp_path / "data_batch_3.bin").write_bytes(rows[:4].tobytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3\.bin is cut short"):
        ingest.import_files(CIFAR10, tmp_path)


@pytest.mark.parametrize("binary", [False, True])
def test_cifar100_takes_the_fine_labels(tmp_path, binary):
    names = [f"kind{i:02}" for i in range(100)]
    x, y = images(100, 32, 32, 3), labels(100, 100)
    for split in ("train", "test"):
        if binary:
            content = np.concatenate([np.stack([y // 5, y], 1).astype(np.uint8), planes(x)], 1).tobytes()
        else:
            batch = {b"data": planes(x), b"fine_labels": y.tolist(), b"coarse_labels": (y // 5).tolist()}
            content = pickle.dumps(batch, 2)
        (tmp_path / (f"{split}.bin" if binary else split)).write_bytes(content)
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": [name.encode() for name in names]}, 2))
    (tmp_path / "fine_label_names.txt").write_text("\n".join(names))
    train, train_y, _, _ = stored(CATALOG["cifar100"], tmp_path)
    assert np.array_equal(train, rgb(x)) and np.array_equal(train_y, y)
    assert store.read(store.folder_of("cifar100")).classes == tuple(names)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/fedhpro-was-here",)


def test_a_pickle_that_would_run_code(tmp_path):
    write_cifar(tmp_path)
    path = _write(tmp_path / "data_batch_2", pickle.dumps({b"data": Evil()}))
    refused(CIFAR10, tmp_path, path, "system")
    assert not os.path.exists("/tmp/fedhpro-was-here")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"no pickle", pickle.dumps([1]), pickle.dumps({b"labels": [1]}),
     pickle.dumps({b"data": images(2, 9)}), pickle.dumps({b"data": io.BytesIO})],
)  # fmt: skip
def test_broken_cifar(tmp_path, content):
    write_cifar(tmp_path)
    refused(CIFAR10, tmp_path, _write(tmp_path / "data_batch_2", content), "get it again")


# --- folders ---


def write_images(folder, n, size=(32, 32), mode="RGB"):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        shape = size[::-1] if mode == "L" else (*size[::-1], 3)
        Image.fromarray(images(1, *shape)[0]).save(folder / f"{i:03}.png")


def test_class_folders_with_train_and_test(tmp_path):
    for label, name in enumerate(CIFAR10.classes):
        write_images(tmp_path / "train" / name, 2 + label % 2)
        write_images(tmp_path / "Test" / name, 1)
    train, train_y, _, test_y = stored(CIFAR10, tmp_path)
    assert np.bincount(train_y).tolist() == [2, 3] * 5 and test_y.tolist() == list(range(10))
    with Image.open(tmp_path / "train" / "bird" / "001.png") as image:
        assert np.array_equal(train[6].transpose(1, 2, 0), np.asarray(image))


def test_one_folder_of_classes_is_cut_the_same_way_each_time(tmp_path):
    for name in CIFAR10.classes:
        write_images(tmp_path / name, 5)
    first = stored(CIFAR10, tmp_path)
    assert np.bincount(first[1]).tolist() == [4] * 10 and np.bincount(first[3]).tolist() == [1] * 10
    assert all(np.array_equal(a, b) for a, b in zip(first, stored(CIFAR10, tmp_path), strict=True))


def test_office_caltech_folders_of_several_sizes_and_names(tmp_path):
    dataset = find("Office_Caltech")
    assert dataset.name == canonical("office-caltech") == "office-caltech"
    other = {"bike": "touring-bike", "backpack": "back_pack", "laptop": "laptop-101", "mug": "coffee-mug"}
    for part in dataset.parts:
        for label, name in enumerate(dataset.classes):
            folder = tmp_path / part.name / (other.get(name, name) if part.name == "caltech" else name)
            write_images(folder, 10, (20 + label, 30))
    found = ingest.import_files(dataset, tmp_path)
    assert found.domains == ("caltech", "webcam", "amazon", "dslr")
    for name in found.domains:
        y = found.array(f"{name}.train.y")
        assert np.bincount(y).tolist() == [8] * 10 and found.array(f"{name}.train.x").shape == (80, 3, 32, 32)
    names = sorted(other.get(name, name) for name in dataset.classes)
    assert names.index("touring-bike") != 1  # sorted by name it would be another class
    assert found.array("caltech.train.y").tolist() == [dataset.label_of(name) for name in names for _ in range(8)]
    assert sources.load("office_caltech").allocation == {
        "caltech": (3, 16),
        "webcam": (1, 16),
        "amazon": (2, 16),
        "dslr": (4, 16),
    }


def test_folders_that_do_not_fit(tmp_path):
    for name in CIFAR10.classes[:-1]:
        write_images(tmp_path / name, 2)
    refused(CIFAR10, tmp_path, tmp_path, "9 folders of images", "10 classes")
    write_images(tmp_path / "zebra", 2)
    refused(CIFAR10, tmp_path, "'zebra'", "airplane")
    (tmp_path / "zebra").rename(tmp_path / "truck")
    write_images(tmp_path / "truck", 3, (33, 32))
    refused(CIFAR10, tmp_path, "several sizes", "32x32", "33x32")


def test_a_truncated_image(tmp_path):
    for name in CIFAR10.classes:
        write_images(tmp_path / name, 5)
    path = tmp_path / "cat" / "002.png"
    path.write_bytes(path.read_bytes()[:400])
    refused(CIFAR10, tmp_path, path, "not a whole image")
    path.write_text("no image")
    refused(CIFAR10, tmp_path, path, "not a whole image")


def test_tiny_imagenet(tmp_path):
    dataset = replace(CATALOG["tinyimagenet"], num_classes=3)
    root = tmp_path / "tiny-imagenet-200"
    for name in ("n01", "n02", "n03"):
        write_images(root / "train" / name / "images", 2, (64, 64), "L" if name == "n02" else "RGB")
    write_images(root / "val" / "images", 3, (64, 64))
    annotations = root / "val" / "val_annotations.txt"
    annotations.write_text(
        "".join(f"{i:03}.png\t{name}\t0\t0\t62\t62\n" for i, name in enumerate(["n03", "n01", "n02"]))
    )
    write_images(root / "test" / "images", 1, (64, 64))  # has no labels, is not used
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as archive:
        for path in root.rglob("*"):
            archive.write(path, path.relative_to(tmp_path))
    for path in (root, tmp_path / "tiny-imagenet-200.zip"):
        train, train_y, _, test_y = stored(dataset, path)
        assert train.shape == (6, 3, 64, 64) and train_y.tolist() == [0, 0, 1, 1, 2, 2] and test_y.tolist() == [2, 0, 1]
        assert store.read(store.folder_of("tinyimagenet")).classes == ("n01", "n02", "n03")
    annotations.write_text("000.png\tn09\n")
    with pytest.raises(DataError, match=r"val_annotations\.txt, line 1"):
        ingest.import_files(dataset, root)


def write_ham(folder, n=120):
    rng = np.random.default_rng(1)
    names = CATALOG["ham10000"].classes
    lesions = np.sort(rng.integers(0, 60, n))
    rows = [f"HAM_{lesion},ISIC_{i:04},{names[lesion % 7]},histo" for i, lesion in enumerate(lesions)]
    (folder / "HAM10000_metadata.csv").write_text("\n".join(["lesion_id,image_id,dx,dx_type", *rows]))
    for i in range(n):
        part = folder / f"HAM10000_images_part_{1 + i % 2}"
        part.mkdir(exist_ok=True)
        Image.new("RGB", (60, 45), (i, 255 - i, 0)).save(part / f"ISIC_{i:04}.png")
    return lesions


def test_ham10000_is_cut_by_lesion(tmp_path):
    lesions = write_ham(tmp_path)
    train, train_y, test, _ = stored(CATALOG["ham10000"], tmp_path)
    assert train.shape[1:] == (3, 96, 128) and len(train) + len(test) == 120 and len(test) == round(120 * 1103 / 10015)
    in_train, in_test = ({lesions[i] for i in part[:, 0, 0, 0]} for part in (train, test))
    assert not in_train & in_test
    assert train_y.tolist() == [lesions[i] % 7 for i in train[:, 0, 0, 0]]
    source = sources.load("ham10000")
    groups = source.domains[0].groups
    assert len(set(groups.tolist())) == len(in_train) and len(source.domains[0].validation) == 0
    held = sources.with_validation(source).domains[0]
    assert 0 < len(held.validation) <= round(0.1 * len(train)) and len(held.train) + len(held.validation) == len(train)
    first = {lesions[i] for i in held.train.x[:, 0, 0, 0].tolist()}
    assert not first & {lesions[i] for i in held.validation.x[:, 0, 0, 0].tolist()}
    assert len(held.groups) == len(held.train)


def test_broken_ham10000(tmp_path):
    write_ham(tmp_path)
    path = tmp_path / "HAM10000_metadata.csv"
    content = path.read_text()
    path.write_text(content.replace("lesion_id", "lesion"))
    refused(CATALOG["ham10000"], tmp_path, path, "no column lesion_id")
    path.write_text(content.replace(",nv,", ",mole,", 1))
    refused(CATALOG["ham10000"], tmp_path, path, "row ", "'mole'")
    path.write_text(content + "\nHAM_9,ISIC_9999,nv,x")
    refused(CATALOG["ham10000"], tmp_path, "ISIC_9999")


# --- archives ---


@pytest.mark.parametrize("name", ["../outside.txt", "/tmp/outside.txt", "a/../../outside.txt", "..\\outside.txt"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archives_stay_inside_their_folder(tmp_path, name, kind):
    path = tmp_path / f"x.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, "x")
    else:
        with tarfile.open(path, "w") as archive:
            archive.addfile(tarfile.TarInfo(name))
    refused(CIFAR10, path, path, "outside.txt", "elsewhere")
    assert not list(tmp_path.rglob("outside.txt"))


def test_archives_with_links_or_cut_short(tmp_path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    refused(CIFAR10, path, "link or a device")
    for name, content in (("x.zip", b"PK\x03\x04nothing"), ("x.tar.gz", gzip.compress(b"x" * 600)[:-12])):
        refused(CIFAR10, _write(tmp_path / name, content), name, "cannot be unpacked")


def test_archives_that_would_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "most_unpacked", lambda path: 10**6)
    monkeypatch.setattr(importers, "most_unpacked", lambda path: 10**6)
    zeros = bytes(4 * 10**5)
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(3):  # each would fit
            archive.writestr(f"{i}.bin", zeros)
    refused(CIFAR10, tmp_path / "x.zip", "2.bin would come to more than 100 times the size of its archive")
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        bomb = tarfile.TarInfo("bomb")
        bomb.size = 2 * 10**6
        archive.addfile(bomb, io.BytesIO(bytes(bomb.size)))
    refused(CIFAR10, tmp_path / "x.tar.gz", "bomb would come to more than")
    with pytest.raises(DataError, match=r"x\.gz would come to more than"):
        files.decompressed(_write(tmp_path / "x.gz", gzip.compress(bytes(2 * 10**6))))
    assert files.decompressed(_write(tmp_path / "y.gz", gzip.compress(zeros))) == zeros


# --- anything else ---


def test_nothing_that_fits(tmp_path):
    refused(CIFAR10, tmp_path / "nowhere", "there is nothing at", "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    refused(CIFAR10, tmp_path, f"nothing in {tmp_path} looks like cifar10", "cifar-10-python.tar.gz", ".npz")
    refused(CATALOG["digits"], tmp_path, f"{tmp_path} has no mnist", "train-images-idx3-ubyte.gz")
    refused(CATALOG["digits"], tmp_path / "notes.txt", "is a file", "mnist, usps, svhn, syn")
    refused(CATALOG["ag-news"], tmp_path, "looks like ag-news", "train.csv")
    with pytest.raises(DataError, match="there is no dataset 'cifar11'"):
        find("cifar11")


def test_digits_with_a_copy_of_syn(tmp_path):
    for name in ("mnist", "usps", "svhn"):
        (tmp_path / name).mkdir()
        write_mnist(tmp_path / name)
    for digit in range(10):
        write_images(tmp_path / "SYN" / "train" / str(digit), 20)
        write_images(tmp_path / "SYN" / "val" / str(digit), 1)
    ingest.import_files(CATALOG["digits"], tmp_path)
    source = sources.load("digits")
    assert [domain.name for domain in source.domains] == ["mnist", "usps", "svhn", "syn"]
    assert source.allocation["syn"] == (4, 2) and not source.domains[-1].real
