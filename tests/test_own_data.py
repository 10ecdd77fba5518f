"""Your own data: folders, CSV files and tensors become sources; whatever is wrong with them is said in one sentence."""

import csv
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedhpro
from fedhpro.data.clients import cut
from fedhpro.data.own import Options, from_csv, from_folder, from_tensors, open_own
from fedhpro.errors import DataError
from fedhpro.use import read_images

ROOT = Path(__file__).parent.parent
TINY = {"local_epochs": 1, "batch_size": 8, "workers": 0, "rounds": 1}
PARTS = ("train", "validation", "test")


def picture(path, value, size=(20, 14), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 255 - value, 7)).save(path)


def fill(folder, counts):
    """folder/.../CLASS with so many pictures; no two have the same colour."""
    for value, (place, count) in enumerate(counts.items()):
        for number in range(count):
            picture(folder / place / f"{number}.png", 60 * value + number)
    return folder


@pytest.fixture
def sites(tmp_path):
    return fill(tmp_path / "data", {"north/cat": 20, "north/dog": 10, "south/cat": 6, "south/dog": 14})


def listing(folder, rows, header="image,label,site", delimiter=","):
    with open(folder / "list.csv", "w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header.split(","), *rows])
    return folder / "list.csv"


def tensors(n=40, classes=2, channels=3, side=12):
    x = torch.arange(n)[:, None, None, None].expand(n, channels, side, side).to(torch.uint8).contiguous()
    return x, torch.arange(n) % classes


def sizes(source):
    return {d.name: tuple(len(getattr(d, part)) for part in PARTS) for d in source.domains}


def content(source):
    """Every sample as (site, part, label, first pixel)."""
    return sorted(
        (domain.name, part, int(y), *map(int, x[:, 0, 0]))
        for domain in source.domains
        for part in PARTS
        for x, y in zip(getattr(domain, part).x, getattr(domain, part).y, strict=True)
    )


# folders


def test_a_folder_of_sites(sites):
    source = from_folder(sites, size=16)
    assert source.name == "data" and source.classes == ("cat", "dog") and source.shape == (3, 16, 16)
    assert sizes(source) == {"north": (22, 2, 6), "south": (14, 2, 4)}
    assert source.allocation == {"north": (1, 22), "south": (1, 14)}
    assert (source.crop, source.flip) == (2, False)
    for domain, counts in zip(source.domains, ([4, 2], [1, 3]), strict=True):
        assert torch.bincount(domain.test.y).tolist() == counts  # the same share of each class
    clients = cut(source, scenario="domains", seed=0)
    assert sorted((client.domain, len(client.train)) for client in clients) == [("north", 22), ("south", 14)]


def test_every_picture_is_in_one_part_with_its_class(sites):
    found = content(from_folder(sites))
    assert len({pixel for *_, pixel, _, _ in found}) == 50
    for site, _, label, red, green, blue in found:
        assert (red // 60, green, blue) == (2 * (site == "south") + label, 255 - red, 7)


def test_a_folder_of_classes(tmp_path):
    source = from_folder(fill(tmp_path / "xray", {"ill": 20, "well": 30}))
    assert sizes(source) == {"xray": (36, 4, 10)}
    assert source.allocation == {} and source.shape == (3, 32, 32)
    assert len(cut(source, scenario="iid", clients=3, seed=0)) == 3


def test_train_and_test_folders_are_taken_as_they_are(tmp_path):
    folder = fill(tmp_path, {"train/a": 10, "train/b": 10, "test/a": 3, "test/b": 4})
    found = from_folder(folder)
    assert sizes(found) == {tmp_path.name: (18, 2, 7)}
    assert {red // 60 for _, part, _, red, *_ in content(found) if part == "test"} == {2, 3}
    for place in ("north", "south"):
        fill(tmp_path / "sites", {f"{part}/{place}/{c}": 5 for part in ("train", "val", "test") for c in "ab"})
    assert sizes(from_folder(tmp_path / "sites")) == {"north": (10, 10, 10), "south": (10, 10, 10)}


def test_the_cut_depends_on_the_seed_alone(sites):
    assert content(from_folder(sites)) == content(from_folder(sites, seed=0))
    assert content(from_folder(sites)) != content(from_folder(sites, seed=1))
    assert sizes(from_folder(sites, test_share=0.7)) == {"north": (8, 1, 21), "south": (5, 1, 14)}
    assert sizes(from_folder(sites, test_share=0.5, validation_share=0.2)) == {
        "north": (12, 3, 15),
        "south": (8, 2, 10),
    }


def test_statistics_are_those_of_the_training_pixels(sites):
    source = from_folder(sites)
    pixels = torch.cat([domain.train.x for domain in source.domains]).double() / 255
    torch.testing.assert_close(torch.tensor(source.mean).double(), pixels.mean((0, 2, 3)))
    assert source.std[:2] == pytest.approx(pixels.std((0, 2, 3), correction=0)[:2].tolist())
    assert source.std[2] == 1 / 255  # one value only: it must not divide by zero


def test_pictures_of_any_mode_and_size_are_read_as_predict_reads_them(tmp_path):
    folder = fill(tmp_path / "d", {"a": 8, "b": 8})
    picture(folder / "a" / "grey.jpg", 200, (99, 50), mode="L")
    Image.new("RGBA", (40, 40), (0, 0, 0, 0)).save(folder / "b" / "clear.png")
    (folder / "a" / "notes.txt").write_text("not a picture")
    (folder / "a" / "._grey.jpg").write_bytes(b"left by macOS")
    source = from_folder(folder, size=24)
    stored = torch.cat([getattr(source.domains[0], part).x for part in PARTS])
    assert len(stored) == 18
    for name in ("a/grey.jpg", "b/clear.png"):
        ((_, wanted),) = read_images(folder / name, (3, 24, 24))
        assert (stored == wanted).flatten(1).all(1).sum() == 1


def test_numbers_as_names_are_in_their_order(tmp_path):
    assert from_folder(fill(tmp_path, dict.fromkeys(("10", "9", "2", "x"), 3))).classes == ("2", "9", "10", "x")


# CSV files


def test_a_csv_file_says_what_a_folder_would(sites):
    files = sorted(sites.rglob("*.png"))
    rows = [(file.relative_to(sites), file.parts[-2], file.parts[-3]) for file in files]
    assert content(from_csv(listing(sites, rows))) == content(from_folder(sites))
    assert sizes(from_csv(listing(sites, rows, "image,label,ward"))) == {"list": (36, 4, 10)}
    named = from_csv(listing(sites, rows, "x-ray,Finding,ward", ";"), image_column="x-ray", label_column="finding")
    assert sizes(named) == {"list": (36, 4, 10)}


def test_a_csv_file_can_give_the_parts_and_keep_patients_together(sites):
    files = sorted(sites.rglob("*.png"))
    parts = ["train", "Test", "train", "validation", "train"]
    rows = [(file, file.parts[-2], parts[i % 5]) for i, file in enumerate(files)]
    assert sizes(from_csv(listing(sites, rows, "file,class,split"))) == {"list": (30, 10, 10)}
    rows = [(file, file.parts[-2], f"{file.parts[-3:-1]} {i // 4}") for i, file in enumerate(files)]
    source = from_csv(listing(sites, rows, "file,class,patient"), test_share=0.4)
    patient = {
        int(pixels[0, 0, 0]): row[2] for (_, pixels), row in zip(read_images(files, (3, 8, 8)), rows, strict=True)
    }
    held = {part: {patient[red] for _, p, _, red, *_ in content(source) if p == part} for part in PARTS}
    assert all(held.values()) and not held["train"] & (held["test"] | held["validation"])


# tensors


def test_tensors_with_sites(tmp_path):
    x, y = tensors()
    source = from_tensors(x, y, classes=["no", "yes"], sites=["A"] * 15 + ["B"] * 25, flip=True, crop=3)
    assert sizes(source) == {"A": (11, 1, 3), "B": (18, 2, 5)}
    assert source.allocation == {"A": (1, 11), "B": (1, 18)}
    assert (source.classes, source.flip, source.crop, source.shape) == (("no", "yes"), True, 3, (3, 12, 12))
    for name, _, label, value, *_ in content(source):
        assert name == ("A" if value < 15 else "B") and label == value % 2
    same = from_tensors(x.numpy(), y.tolist(), classes=2, sites=np.array(["A"] * 15 + ["B"] * 25))
    assert content(same) == content(source) and same.classes == ("0", "1")


def test_tensors_with_a_test_set():
    x, y = tensors()
    assert sizes(from_tensors(x[:30], y[:30], test=(x[30:], y[30:]))) == {"own": (27, 3, 10)}
    names = ["A", "B"] * 20
    both = from_tensors(list(x[:30]), y[:30], sites=names[:30], groups=range(30), test=(x[30:], y[30:], names[30:]))
    assert sizes(both) == {"A": (13, 2, 5), "B": (13, 2, 5)}


def test_a_run_on_tensors_of_one_channel(tmp_path):
    x, y = tensors(channels=1)
    source = from_tensors(x, y, sites=["A", "B"] * 20, name="mine")
    result = fedhpro.run(source=source, method="fedavg", out=str(tmp_path / "run"), **TINY)
    assert set(result.accuracy) == {"A", "B", "AVG"}


# what data=... means


def test_open_own(sites, monkeypatch):
    assert open_own("digits-lite") is None and open_own("other:thing") is None
    assert content(open_own(f"folder:{sites}")) == content(from_folder(sites))
    with pytest.raises(DataError, match="flip=maybe is neither true nor false"):
        open_own(f"folder:{sites},flip=maybe")
    found = open_own(f"folder:{sites},size=16,flip=true,seed=3,test_share=0.5")
    assert content(found) == content(from_folder(sites, size=16, seed=3, test_share=0.5)) and found.flip
    rows = [(file, file.parts[-2], file.parts[-3]) for file in sorted(sites.rglob("*.png"))]
    assert sizes(open_own(f"csv:{listing(sites, rows, 'image,label,ward')},site_column=ward")) == sizes(found) | {
        "north": (22, 2, 6),
        "south": (14, 2, 4),
    }
    sites.rename(sites.parent / "a, b")
    monkeypatch.setenv("HOME", str(sites.parent))
    assert open_own("folder:~/a, b,size=8").shape == (3, 8, 8)
    for spec, words in {
        "folder:": "names no file",
        f"folder:{sites},side=3": "no option 'side'",
        f"folder:{sites},size=big": "size=big is not a number",
    }.items():
        with pytest.raises(DataError, match=words):
            open_own(spec)


# bad input


def refused(make, *words):
    with pytest.raises(DataError) as error:
        make()
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_bad_folders(tmp_path, sites):
    refused(lambda: from_folder(tmp_path / "none"), "no folder", "none")
    (tmp_path / "empty" / "north").mkdir(parents=True)
    refused(lambda: from_folder(tmp_path / "empty"), "no images", "empty", ".png")
    refused(lambda: from_folder(sites / "north" / "cat"), "not where it should be", "CLASS")
    refused(lambda: from_folder(fill(tmp_path / "one", {"cat": 5})), "only one class", "'cat'")
    refused(lambda: from_folder(fill(tmp_path / "few", {"A/cat": 9, "A/dog": 9, "B/cat": 1})), "site 'B'", "1 in all")
    refused(lambda: from_folder(fill(tmp_path / "name", {"AVG/cat": 9, "AVG/dog": 9})), "cannot be called 'AVG'")
    refused(
        lambda: from_folder(fill(tmp_path / "cut", {"train/a": 9, "train/b": 9, "test/c": 2})), "'c'", "no training"
    )
    refused(lambda: from_folder(sites, size=2), "size=2")
    refused(lambda: from_folder(sites, test_share=1.0), "test_share=1.0")
    refused(lambda: from_folder(sites, crop=-1), "crop=-1")
    (sites / "south" / "cat" / "broken.png").write_bytes(b"\x89PNG...")
    refused(lambda: from_folder(sites), "broken.png", "cannot be read")
    (sites / "south" / "cat" / "broken.png").unlink()
    picture(sites / "stray.png", 1)
    refused(lambda: from_folder(sites), "stray.png", "SITE/CLASS")
    (sites / "stray.png").unlink()
    (sites / "west" / "cat").mkdir(parents=True)
    refused(lambda: from_folder(sites), "west", "no images")


def test_bad_csv_files(tmp_path, sites):
    good = [(file, file.parts[-2], file.parts[-3]) for file in sorted(sites.rglob("*.png"))]
    refused(lambda: from_csv(tmp_path / "none.csv"), "no file", "none.csv")
    (sites / "list.csv").write_text("")
    refused(lambda: from_csv(sites / "list.csv"), "is empty")
    (sites / "list.csv").write_bytes(b"image,label\n\xff\xfe,1\n")
    refused(lambda: from_csv(sites / "list.csv"), "cannot be read")
    for rows, header, words in (
        ([], "image,label", ["no rows"]),
        ([(1.5, 2.5, "a")], "age,weight,label", ["no column image", "out of scope"]),
        (good, "image,finding,site", ["no column label", "label_column"]),
        ([*good, ("x.png", "cat")], "image,label,site", ["row 52", "2 values"]),
        ([*good, ("x.png", "cat", "north")], "image,label,site", ["row 52", "no image", "x.png"]),
        ([*good, (good[0][0], "", "north")], "image,label,site", ["row 52", "no label"]),
        ([*good, (good[0][0], "cat", " ")], "image,label,site", ["row 52", "no site"]),
        (good, "image,label,split", ["row 2", "'north'", "train, validation or test"]),
        ([row[:2] for row in good if row[1] == "cat"], "image,label", ["only one class"]),
    ):
        refused(lambda rows=rows, header=header: from_csv(listing(sites, rows, header)), *words)
    refused(lambda: from_csv(listing(sites, good), site_column="ward"), "no column 'ward'", "image, label, site")


def test_bad_tensors():
    x, y = tensors()
    sites = ["A", "B"] * 20
    for arguments, options, words in (
        ((x.float() / 255, y), {}, ["uint8", "float32"]),
        ((x[:, 0], y), {}, ["[n, channels, height, width]"]),
        ((x.permute(0, 2, 3, 1), y), {}, ["[n, channels, height, width]", "[40, 12, 12, 3]"]),
        (([x[0], x[1, :, 1:]], y[:2]), {}, ["x[1] is 3x11x12", "x[0] 3x12x12"]),
        ((x[:0], y[:0]), {}, ["x is empty"]),
        ((x, y[:-1]), {}, ["40 images", "39 labels"]),
        ((x, y.float()), {}, ["whole numbers", "float32"]),
        ((x, y - 1), {}, ["from -1 to 0"]),
        ((x, y + 1), {"classes": 2}, ["from 1 to 2", "from 0 to 1"]),
        ((x, y), {"classes": ["a", "b", "c"]}, ["class 'c'", "no training sample"]),
        ((x, y), {"classes": ["a", "a"]}, ["must differ"]),
        ((x, torch.zeros_like(y)), {}, ["only one class"]),
        ((x, y), {"sites": sites[:-1]}, ["39 sites", "40 images"]),
        ((x, y), {"sites": ["", *sites[1:]]}, ["number 0 is empty"]),
        ((x, y), {"sites": ["C", *sites[1:]]}, ["site 'C'", "1 in all"]),
        ((x, y), {"sites": sites, "test": (x, y)}, ["x, y, sites"]),
        ((x, y), {"sites": sites, "test": (x, y, ["A"] * 40)}, ["site 'B'", "test part"]),
        ((x, y), {"test": (x[..., 1:], y)}, ["3x12x11", "3x12x12"]),
        ((x, y), {"test": (x, y[1:])}, ["test x has 40", "test y has 39"]),
        ((x, y), {"size": 16}, ["resize"]),
    ):
        refused(lambda a=arguments, o=options: from_tensors(*a, **o), *words)


# the page and the example


def test_the_example_runs(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("own_data", ROOT / "examples" / "own_data.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.main(tmp_path)
    assert found.label in example.FINDINGS and set(found.probabilities) == set(example.FINDINGS)
    assert (tmp_path / "run" / "MODEL_CARD.md").is_file()
    shown = capsys.readouterr().out
    assert "north: 43 to train, 12 to test" in shown
    # the page shows another machine's: a picture or two may be taken for another
    (line,) = (line for line in shown.splitlines() if line.startswith("accuracy"))
    assert re.fullmatch(r"accuracy in per cent: \{'north': .*, 'south': .*, 'AVG': [\d.]+\}", line)
    assert float(line.rsplit(" ", 1)[1].rstrip("}")) > 70  # of three classes: it has learnt to tell them apart


def test_the_page_names_what_there_is():
    text = (ROOT / "docs" / "your-own-data.md").read_text(encoding="utf-8")
    options = re.findall(r"^\| `(\w+)` \| ([\w.]+) \|", text, flags=re.MULTILINE)
    assert dict(options) == {name: str(value).lower() for name, value in vars(Options()).items()}
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / target).is_file(), target
    assert all(len(line) <= 120 or line.startswith("|") for line in text.splitlines())
