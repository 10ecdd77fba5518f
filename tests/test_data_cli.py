"""fedhpro data list, get, import, verify."""

import re

import numpy as np
import pytest

from fedhpro.cli import main
from fedhpro.data import hub, store
from fedhpro.data_cli import EMBEDDED


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.delenv("FEDHPRO_DATA", raising=False)
    return tmp_path


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    found = capsys.readouterr()
    return left.value.code or 0, found.out, found.err


def write(path, n=20):
    x = np.random.default_rng(0).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    np.savez(path, x_train=x, y_train=np.arange(n) % 10, x_test=x[:10], y_test=np.arange(10))
    return path


def sentence(error):
    assert error.startswith("fedhpro: ") and error.count("\n") == 1 and "Traceback" not in error
    return error


def test_list_says_where_everything_is(capsys, folder):
    code, text, _ = call(capsys, "data", "list")
    assert code == 0
    assert re.search(r"digits-lite +image +10 +3,600 +3,200 +embedded", text)
    assert re.search(r"cifar10 +image +10 +50,000 +10,000 +can be fetched", text)
    assert re.search(r"office-caltech +image +10 .* import only", text)
    assert re.search(r"ag-news +text +4 +120,000 +7,600 +can be fetched", text)
    call(capsys, "data", "import", "cifar10", write(folder / "some.npz"))
    assert re.search(r"cifar10 +image +10 +20 +10 +in the cache", call(capsys, "data", "list")[1])


def test_what_is_embedded(capsys):
    from fedhpro.data import digits_lite, text

    images = {"train": 0, "test": 2}
    for split, at in images.items():
        images[split] = 10 * sum(counts[at] or 0 for counts in digits_lite.PER_CLASS.values())
    texts = {split: len(text.PACKAGES) * count for split, count in text.PER_CLASS.items()}
    assert [row[3:] for row in EMBEDDED] == [(each["train"], each["test"]) for each in (images, texts)]
    code, shown, _ = call(capsys, "data", "get", "docs-lite")
    assert code == 0 and "embedded" in shown


def test_import_and_verify(capsys, folder):
    code, text, error = call(capsys, "data", "import", "CIFAR_10", write(folder / "some.npz"))
    assert code == 0 and "cifar10: 20 to train and 10 to test on" in text
    assert error == "the whole CIFAR-10 has 50,000 and 10,000\n"
    assert str(store.folder_of("cifar10")) in text
    code, text, error = call(capsys, "data", "verify")
    assert (code, error) == (0, "") and text.startswith("ok cifar10: cifar10 20 / 10")
    path = store.folder_of("cifar10") / "cifar10.test.x.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    code, text, error = call(capsys, "data", "verify", "cifar10")
    assert (code, text) == (2, "") and "checksum" in sentence(error)


def test_verify_goes_on_after_a_damaged_one(capsys, folder, monkeypatch):
    monkeypatch.setenv("FEDHPRO_DATA", str(folder))
    write(folder / "cifar10.npz")
    (folder / "ag_news").mkdir()
    for split in ("train", "test"):
        rows = "".join(f"{i % 4 + 1},title,words of {i}\n" for i in range(16))
        (folder / "ag_news" / f"{split}.csv").write_text(rows)
    code, text, _ = call(capsys, "data", "verify")
    assert code == 0 and re.findall(r"^ok (\S+):", text, re.MULTILINE) == ["cifar10", "ag-news"]
    assert re.search(r"cifar10 .* in FEDHPRO_DATA", call(capsys, "data", "list")[1])
    (folder / "cifar10.npz").write_bytes(b"PK")
    code, text, error = call(capsys, "data", "verify")
    assert code == 2 and text.startswith("ok ag-news") and "cifar10.npz" in sentence(error)


def test_get(capsys, monkeypatch, folder):
    class Rows(dict):
        column_names, features = ("img", "label"), {"label": None}

        def __len__(self):
            return 20

        def __iter__(self):
            return ({"img": image} for image in self["img"])

    asked = []

    def load_dataset(name, config, *, split, revision):
        asked.append(split)
        return Rows(img=np.zeros((20, 32, 32, 3), np.uint8), label=np.arange(20) % 10)

    monkeypatch.setattr(hub, "load_dataset", load_dataset)
    code, text, _ = call(capsys, "data", "get", "cifar10")
    assert code == 0 and "20 to train" in text and asked == ["train", "test"]
    code, text, _ = call(capsys, "data", "get", "cifar10")
    assert code == 0 and "in the cache already" in text and asked == ["train", "test"]
    code, _, _ = call(capsys, "data", "get", "cifar10", "--again")
    assert code == 0 and len(asked) == 4
    path = store.folder_of("cifar10") / store.MANIFEST
    path.write_text(path.read_text().replace(f'"format": {store.FORMAT}', '"format": 0'))
    code, _, error = call(capsys, "run", "data=cifar10", "scenario=iid")
    assert code == 2 and "cache of format 0" in sentence(error)
    assert re.search("cifar10 .* not usable", call(capsys, "data", "list")[1])
    code, _, _ = call(capsys, "data", "get", "cifar10")  # what the sentence says to do
    assert code == 0 and len(asked) == 6 and call(capsys, "data", "verify")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["get", "cifar11"], ["cifar11", "cifar100"]),
        (["get", "office-caltech"], ["not on the hub", "fedhpro data import office-caltech PATH"]),
        (["import", "cifar10", "nowhere"], ["there is nothing at nowhere"]),
        (["import", "cifar10", "."], ["nothing in", "cifar-10-python.tar.gz"]),
        (["import", "nothing", "."], ["nothing", "cifar10"]),
        (["verify"], ["no dataset is in the cache"]),
        (["verify", "sun397"], ["sun397 is not in the cache"]),
        (["show", "sun397"], ["SUN397 is not in the cache", "fedhpro data get sun397"]),
    ],
)
def test_one_sentence(capsys, folder, arguments, words):
    code, text, error = call(capsys, "data", *arguments)
    assert (code, text) == (2, "")
    for word in words:
        assert word in sentence(error)


def test_a_run_fetches_what_is_not_at_hand_once(monkeypatch, tmp_path):
    from fedhpro import data_cli
    from fedhpro.data import ingest

    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path))
    fetched = []
    monkeypatch.setattr(ingest, "fetch", lambda dataset, track: fetched.append(dataset.name))
    data_cli.bring("cifar10")
    data_cli.bring("digits-lite")  # embedded
    data_cli.bring("office-caltech")  # not on the hub
    data_cli.bring("folder:somewhere")
    assert fetched == ["cifar10"]
