"""A trained model in use: loading, images from outside, predictions, exports, the card, and what is refused."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from fedhpro import models, use
from fedhpro.data.batches import Transform
from fedhpro.use import RunError, export, load_model, predict, read_images, write_card

SHAPE = (3, 32, 32)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MODEL = {"name": "resnet10", "num_classes": 10, "width": 16, "dim": None, "stem": "3x3/2", "channels": 3,
         "image_size": 32}  # fmt: skip
RESULT = {
    "status": "finished", "rounds": 15, "method": "fedhpro", "data": "digits-lite", "seed": 7, "clients": 20,
    "samples": 1180, "final": {"final": 80.125, "best": 81.5, "best_round": 14, "last5": 79.75},
    "accuracy": {"mnist": 91.0, "uci": 88.5, "syn": 61.25, "AVG": 80.25}, "bytes_up": 12_345_678,
    "bytes_down": 23_456_789, "seconds": 61.5, "versions": {"fedhpro": "0.1.0", "torch": "2.13.0"},
}  # fmt: skip
CONFIG = (
    'method = "fedhpro"\nrounds = 15\nseed = 7\nout = "auto"\ndata = "digits-lite"\nscenario = "domains"\n'
    'local_epochs = 2\nlr = 0.03\ndim = "none"\nevaluation = "central"\nsplit = "test"\nM = 0\n'
)


@pytest.fixture(scope="module")
def net() -> models.Net:
    """Random, with BatchNorm statistics of real batches: without them its probabilities would all be 0 or 1."""
    net = models.build(**MODEL)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(5):
            net.train()(Transform(MEAN, STD).plain(torch.randint(0, 256, (16, *SHAPE), generator=rng).byte()))
        net.classifier.weight.mul_(10)
    return net.eval()


@pytest.fixture
def run(net: models.Net, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder, net)
    return folder


def write_run(folder: Path, net: models.Net, **about: Any) -> None:
    content = save(net.state_dict())
    (folder / "model.safetensors").write_bytes(content)
    written = {"format": 1, "model": MODEL, "classes": [f"c{i}" for i in range(10)], "mean": MEAN, "std": STD}
    written |= {"shape": SHAPE, "sha256": hashlib.sha256(content).hexdigest()} | about
    (folder / "model.json").write_text(json.dumps(written))
    (folder / "result.json").write_text(json.dumps(RESULT))
    (folder / "config.toml").write_text(CONFIG)
    (folder / "metrics.jsonl").write_text("")


def pixels(n: int = 4, seed: int = 1) -> Tensor:
    return torch.randint(0, 256, (n, *SHAPE), generator=torch.Generator().manual_seed(seed)).byte()


def save_image(path: Path, image: Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(path)
    return path


def read_one(path: Path, shape: tuple[int, int, int] = SHAPE) -> Tensor:
    [(_, image)] = read_images([path], shape)
    assert image.dtype == torch.uint8 and image.shape == shape and image.is_contiguous()
    return image


def csv_of(path: Path, *rows: list[Any]) -> Path:
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def refusal(paths: Any, shape: tuple[int, int, int] = SHAPE) -> str:
    with pytest.raises(RunError) as caught:
        list(read_images(paths, shape))
    return str(caught.value)


# --- loading


def test_probabilities_are_those_of_the_net(run: Path, net: models.Net) -> None:
    predictor = load_model(run)
    expected = net(Transform(MEAN, STD).plain(pixels())).softmax(1)
    assert torch.equal(predictor(pixels()), expected)
    assert torch.equal(predictor(pixels().float()), expected)
    assert 0.1 < expected.max() < 0.999  # else the test would compare nothing
    assert predictor.classes == tuple(f"c{i}" for i in range(10)) and predictor.shape == SHAPE
    assert not predictor.training and not predictor(pixels()).requires_grad


def test_predictor_refuses_another_size(run: Path) -> None:
    with pytest.raises(ValueError, match=r"\[n, 3, 32, 32\], not \[1, 3, 28, 28\]"):
        load_model(run)(torch.zeros(1, 3, 28, 28))


def test_a_model_of_images_has_no_words(run: Path, net: models.Net) -> None:
    for about in ({}, {"kind": "image"}):  # folders of older versions do not say
        write_run(run, net, **about)
        with pytest.raises(RunError, match="takes images, not texts"):
            load_model(run).encode(["a"])


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"there is no run folder .*nowhere"):
        load_model(tmp_path / "nowhere")


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        load_model(tmp_path)
    with pytest.raises(RunError, match="is not a run folder"):
        load_model(csv_of(tmp_path / "file"))


def test_models_that_stay_with_the_clients(run: Path) -> None:
    (run / "model.safetensors").unlink()
    with pytest.raises(RunError, match="no global model, its models stay with the clients"):
        load_model(run)


@pytest.mark.parametrize("result", [None, {"status": "interrupted"}])
def test_an_unfinished_run(run: Path, result: dict[str, Any] | None) -> None:
    for name in ("model.safetensors", "model.json", "result.json"):
        (run / name).unlink()
    if result:
        (run / "result.json").write_text(json.dumps(result))
    with pytest.raises(RunError, match="unfinished and has no model yet"):
        load_model(run)


def test_a_damaged_model(run: Path) -> None:
    content = bytearray((run / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "model.safetensors").write_bytes(content)
    with pytest.raises(RunError, match=r"model\.safetensors is damaged, its checksum"):
        load_model(run)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"format": 2}, "has format 2, not 1: update fedhpro"),
        ({"classes": ["a", "b"]}, "must name 10 different classes"),
        ({"classes": ["a"] * 10}, "must name 10 different classes"),
        ({"shape": [20]}, "does not take images"),
        ({"shape": 3}, "does not take images"),
        ({"model": MODEL | {"width": 8}}, "does not describe model.safetensors"),
        ({"model": MODEL | {"name": "resnet11"}}, "unknown model 'resnet11'"),
        ({"model": MODEL | {"depth": 8}}, "does not describe model.safetensors"),
        ({"mean": None}, "does not describe model.safetensors"),
    ],
)
def test_a_model_json_that_does_not_fit(run: Path, net: models.Net, about: dict[str, Any], message: str) -> None:
    write_run(run, net, **about)
    with pytest.raises(RunError, match=message):
        load_model(run)


@pytest.mark.parametrize("content", ["{", "[1]", "\udcff"])
def test_broken_json(run: Path, content: str) -> None:
    (run / "model.json").write_text(content, errors="surrogateescape")
    with pytest.raises(RunError, match=r"model\.json is not"):
        load_model(run)


# --- images


def test_an_image_of_the_right_size_is_read_as_it_is(tmp_path: Path) -> None:
    image = pixels()[0]
    assert torch.equal(read_one(save_image(tmp_path / "a.png", image)), image)
    [(name, _)] = read_images(str(tmp_path / "a.png"), SHAPE)  # one path need not be a list
    assert name == str(tmp_path / "a.png")


def test_grey_and_colour(tmp_path: Path) -> None:
    Image.new("L", (32, 32), 77).save(tmp_path / "grey.png")
    Image.new("CMYK", (32, 32)).save(tmp_path / "cmyk.jpg")
    assert (read_one(tmp_path / "grey.png") == 77).all()
    assert (read_one(tmp_path / "grey.png", (1, 32, 32)) == 77).all()
    assert (read_one(tmp_path / "cmyk.jpg") > 250).all()


def test_sixteen_bits_are_scaled_and_transparency_is_white(tmp_path: Path) -> None:
    deep = Image.new("I;16", (32, 32))
    deep.paste(128 * 257, (0, 0, 32, 32))
    deep.save(tmp_path / "deep.png")
    Image.new("RGBA", (32, 32), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (read_one(tmp_path / "deep.png") == 128).all()
    assert (read_one(tmp_path / "clear.png") == 255).all()


def test_thirty_two_bits_are_refused(tmp_path: Path) -> None:
    Image.new("F", (32, 32), 0.5).save(tmp_path / "float.tif")
    assert "float.tif cannot be used: it has 32 bits per pixel" in refusal([tmp_path / "float.tif"])


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("L", (32, 32))
    image.paste(255, (0, 0, 16, 32))  # left half white
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise for viewing: what is left goes up
    image.save(tmp_path / "turned.png", exif=exif)
    seen = read_one(tmp_path / "turned.png", (1, 32, 32))
    assert (seen[0, :16] == 255).all() and (seen[0, 16:] == 0).all()


def test_resizing_is_antialiased(tmp_path: Path) -> None:
    stripes = torch.zeros(1, 320, 320, dtype=torch.uint8)
    stripes[:, :, ::2] = 255  # sampling without antialiasing gives black or white, never grey
    Image.fromarray(stripes[0].numpy()).save(tmp_path / "stripes.png")
    seen = read_one(tmp_path / "stripes.png").float()
    assert ((seen - 127.5).abs() < 20).all()


def test_unreadable_images(tmp_path: Path) -> None:
    whole = save_image(tmp_path / "whole.png", pixels()[0])
    (tmp_path / "cut.png").write_bytes(whole.read_bytes()[:1500])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "eps.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    for name in ("cut.png", "text.png", "eps.png"):
        assert f"{name} cannot be read, repair or remove it" in refusal([tmp_path / name])
    assert "there is no image" in refusal([tmp_path / "missing.png"])
    assert "there is no image" in refusal([tmp_path / "missing.csv"])


@pytest.mark.parametrize("limit", [1000, 500])  # Pillow warns above its limit and stops above twice that
def test_decompression_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    path = save_image(tmp_path / "bomb.png", pixels()[0])  # 1024 pixels
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    assert "bomb.png cannot be read" in refusal([path])


def test_a_model_with_odd_channels(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.png", pixels()[0])
    assert "the model takes 2 channels" in refusal([path], (2, 32, 32))


def test_folders_are_read_recursively_and_sorted(tmp_path: Path) -> None:
    images = pixels(4)
    for name, image in zip(("b.png", "a/z.PNG", "c/d/e.bmp", "a/b.png"), images, strict=True):
        save_image(tmp_path / "all" / name, image)
    (tmp_path / "all" / "notes.txt").write_text("no image")
    (tmp_path / "all" / "._b.png").write_text("macOS leaves such files")
    (tmp_path / "all" / "a" / "loop").symlink_to(tmp_path / "all")
    names = [str(Path(name).relative_to(tmp_path / "all")) for name, _ in read_images([tmp_path / "all"], SHAPE)]
    assert names == ["a/b.png", "a/z.PNG", "b.png", "c/d/e.bmp"]


def test_empty_input(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    assert "there are no images in" in refusal([tmp_path])
    assert "there is nothing to read" in refusal([])


def test_reading_is_lazy(tmp_path: Path) -> None:
    """The broken second image is only met when it is its turn: nothing is read ahead."""
    save_image(tmp_path / "a.png", pixels()[0])
    (tmp_path / "b.png").write_text("broken")
    images = read_images([tmp_path], SHAPE)
    assert next(images)[0].endswith("a.png")
    with pytest.raises(RunError, match=r"b\.png"):
        next(images)


# --- CSV files


def test_csv_of_paths(tmp_path: Path) -> None:
    image = pixels()[0]
    save_image(tmp_path / "images" / "a.png", image)
    for column in ("path", "File", "filename", " image "):
        listed = csv_of(tmp_path / "list.csv", ["id", column], [1, "images/a.png"], [], [2, "images/a.png"])
        found = list(read_images([listed], SHAPE))
        assert [name for name, _ in found] == ["images/a.png"] * 2
        assert all(torch.equal(read, image) for _, read in found)


def test_csv_of_paths_says_which_row(tmp_path: Path) -> None:
    listed = csv_of(tmp_path / "list.csv", ["path"], ["missing.png"])
    message = refusal([listed])
    assert message.startswith(f"row 2 of {listed}: there is no image") and "missing.png" in message


@pytest.mark.parametrize("header", [None, "names", "counted"])
@pytest.mark.parametrize("label", [False, True])
def test_csv_of_pixels(tmp_path: Path, header: str | None, label: bool) -> None:
    images = pixels(2)
    rows: list[list[Any]] = [image.flatten().tolist() for image in images]
    names: list[Any] = [f"pixel{i}" if header == "names" else i for i in range(len(rows[0]))]
    if label:
        rows, names = [[4, *row] for row in rows], ["label", *names]
    path = csv_of(tmp_path / "rows.csv", *([names] if header else []), *rows)
    found = list(read_images([path], SHAPE))
    first = 2 if header else 1
    assert [name for name, _ in found] == [f"{path}:{first}", f"{path}:{first + 1}"]
    assert all(torch.equal(read, image) for (_, read), image in zip(found, images, strict=True))


@pytest.mark.parametrize("prefix", ["p", ""])
def test_csv_with_the_index_that_pandas_writes(tmp_path: Path, prefix: str) -> None:
    path = csv_of(tmp_path / "rows.csv", ["", *(f"{prefix}{i}" for i in range(784))], [0, *[9] * 784])
    assert (read_one(path) == 9).all()


@pytest.mark.parametrize("side", [8, 28, 32, 64])
def test_csv_of_grey_squares(tmp_path: Path, side: int) -> None:
    row = [200] * (side * side // 2) + [10] * (side * side // 2)
    for shape in (SHAPE, (1, 32, 32)):
        image = read_one(csv_of(tmp_path / "rows.csv", row), shape)
        assert (image[:, 0] == 200).all() and (image[:, -1] == 10).all()
    assert (image[:, :14] > 150).all() and (image[:, 18:] < 60).all()


def test_csv_with_floats_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xef\xbb\xbf" + ",".join(["7.0"] * 1024).encode() + b"\r\n")
    assert (read_one(path) == 7).all()


@pytest.mark.parametrize("cell", ["x", "", "-1", "256", "0.5", "nan", "inf"])
def test_csv_with_a_broken_row(tmp_path: Path, cell: str) -> None:
    row: list[Any] = [0] * 1024
    path = csv_of(tmp_path / "rows.csv", row, [cell, *row[1:]])
    assert f"row 2 of {path} has {cell!r}: pixels must be whole numbers from 0 to 255" in refusal([path])


def test_csv_with_a_broken_first_row(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "rows.csv", ["x", *[0] * 1023])
    assert f"row 1 of {path} has 'x'" in refusal([path])


def test_csv_with_a_short_row(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "rows.csv", [0] * 1024, [0] * 1023)
    assert f"row 2 of {path} has 1023 values, not 1024" in refusal([path])


def test_csv_without_usable_columns(tmp_path: Path) -> None:
    message = refusal([csv_of(tmp_path / "a.csv", ["label", "age", "size"], [1, 2, 3])])
    assert "has no usable columns" in message and message.endswith(
        "1024 or 3072 (or another square, grey or colour) pixels, not 2"
    )
    assert "pixels, not 1000" in refusal([csv_of(tmp_path / "a.csv", [0] * 1000)])
    assert "pixels, not 1" in refusal([csv_of(tmp_path / "a.csv", [0])])


def test_csv_without_content(tmp_path: Path) -> None:
    assert "is empty" in refusal([csv_of(tmp_path / "a.csv")])
    assert "has a header but no rows" in refusal([csv_of(tmp_path / "a.csv", ["path"])])


def test_csv_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00" * 100)
    assert "a.csv cannot be read after row 0" in refusal([tmp_path / "a.csv"])
    csv_of(tmp_path / "b.csv", ["path"], ["x" * 200_000])
    assert "b.csv cannot be read after row 1" in refusal([tmp_path / "b.csv"])


# --- predictions


def test_predictions_do_not_depend_on_the_batch(run: Path, tmp_path: Path) -> None:
    images = pixels(7)
    for i, image in enumerate(images):
        save_image(tmp_path / "images" / f"{i}.png", image)
    expected = load_model(run)(images)
    for batch in (1, 3, 64):
        found = list(predict(run, [tmp_path / "images"], batch=batch))
        assert [Path(p.name).name for p in found] == [f"{i}.png" for i in range(7)]
        for prediction, row in zip(found, expected, strict=True):
            assert prediction.label == f"c{int(row.argmax())}"
            assert prediction.probability == pytest.approx(float(row.max()), abs=1e-5)
            assert list(prediction.probabilities) == [f"c{i}" for i in row.topk(3).indices.tolist()]


def test_top_may_exceed_the_classes(run: Path, tmp_path: Path) -> None:
    [prediction] = predict(run, save_image(tmp_path / "a.png", pixels()[0]), top=50)
    assert len(prediction.probabilities) == 10
    assert sum(prediction.probabilities.values()) == pytest.approx(1, abs=1e-5)


def test_predict_refuses_at_the_call(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run folder"):
        predict(tmp_path / "nowhere", [])
    for keys in ({"top": 0}, {"batch": 0}):
        with pytest.raises(RunError, match="at least 1"):
            predict(run, [], **keys)


def test_memory_does_not_grow_with_the_files(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one batch of images is alive at any time."""
    save_image(tmp_path / "a.png", pixels()[0])
    paths = (tmp_path / "a.png" for _ in range(40))
    sizes, read = [], use._read_image
    monkeypatch.setattr(use, "_read_image", lambda *a: sizes.append(1) or read(*a))
    found = predict(run, paths, batch=8)
    for done, _ in enumerate(found):
        assert len(sizes) <= 8 * (done // 8 + 1)
    assert len(sizes) == 40


# --- exports

INSTALLED = [name for name, kind in use.FORMATS.items() if all(map(importlib.util.find_spec, kind.needs))]
EVERY_FORMAT = [
    pytest.param(name, marks=pytest.mark.skipif(name not in INSTALLED, reason="needs pip install fedhpro[onnx]"))
    for name in use.FORMATS
]


@pytest.mark.parametrize("format", EVERY_FORMAT)
def test_exports_equal_the_predictor(run: Path, tmp_path: Path, format: str, recwarn: Any) -> None:
    out = export(run, tmp_path / "new" / "exported.bin", format)
    predictor, kind = load_model(run), use.FORMATS[format]
    assert not recwarn.list
    assert out.stat().st_mode & 0o777 == 0o644
    assert out.is_file() and [path.name for path in out.parent.iterdir()] == [out.name]
    shutil.copy(out, tmp_path / f"copy{kind.suffix}")  # torch asks for its own suffix
    loaded = kind.load(predictor, tmp_path / f"copy{kind.suffix}")
    for n in (1, 2, 5):
        images = pixels(n).float()
        torch.testing.assert_close(loaded(images), predictor(images), rtol=0, atol=1e-5)


def test_exported_safetensors_are_the_weights(run: Path, net: models.Net) -> None:
    loaded = load_file(export(run, None, "safetensors"))
    assert (run / "exported.safetensors").is_file()
    assert loaded.keys() == net.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in net.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*torch.jit.load:DeprecationWarning")
def test_exports_carry_the_names_of_the_classes(run: Path, tmp_path: Path) -> None:
    found = {"model.json": ""}
    torch.jit.load(str(export(run, tmp_path / "a.pt", "torchscript")), _extra_files=found)
    assert json.loads(found["model.json"])["classes"][3] == "c3"
    found = {"model.json": ""}
    torch.export.load(export(run, tmp_path / "a.pt2", "torch-export"), extra_files=found)
    assert json.loads(found["model.json"])["classes"][3] == "c3"


@pytest.mark.skipif("onnx" not in INSTALLED, reason="needs pip install fedhpro[onnx]")
def test_onnx_is_one_file_with_a_free_batch_and_the_classes(run: Path, tmp_path: Path) -> None:
    import onnx

    model = onnx.load(export(run, tmp_path / "a.onnx", "onnx"), load_external_data=False)
    onnx.checker.check_model(model)
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert dims[0].dim_param and [dim.dim_value for dim in dims[1:]] == list(SHAPE)
    assert json.loads({p.key: p.value for p in model.metadata_props}["model.json"])["classes"][3] == "c3"


def test_onnx_says_what_to_install(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else find(name))
    with pytest.raises(RunError, match=r"onnx needs onnx and onnxscript: pip install fedhpro\[onnx\]"):
        export(run, tmp_path / "a.onnx", "onnx")


def test_exports_overwrite_only_when_allowed(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    out.write_text("mine")
    with pytest.raises(RunError, match="exists already"):
        export(run, out, "safetensors")
    assert out.read_text() == "mine"
    export(run, out, "safetensors", overwrite=True)
    assert load_file(out)


@pytest.mark.parametrize("name", ["model.safetensors", "result.json"])
def test_exports_leave_the_run_alone(run: Path, name: str) -> None:
    before = (run / name).read_bytes()
    with pytest.raises(RunError, match="belongs to the run itself"):
        export(run, run / name, "safetensors", overwrite=True)
    assert (run / name).read_bytes() == before


def test_exports_are_what_their_name_says(run: Path, tmp_path: Path) -> None:
    torch.export.load(export(run, tmp_path / "a.pt2"))
    assert load_file(export(run, tmp_path / "a.bin"))  # a name that says nothing
    with pytest.raises(RunError, match=r"a\.onnx would be safetensors, and its name says onnx"):
        export(run, tmp_path / "a.onnx", "safetensors")
    assert not (tmp_path / "a.onnx").exists()


def test_exports_refuse_what_cannot_be(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no format 'tflite': choose one of safetensors"):
        export(run, tmp_path / "a", "tflite")
    with pytest.raises(RunError, match=r"is a folder: name a file, such as .*model\.pt2"):
        export(run, tmp_path, "torch-export")
    with pytest.raises(RunError, match="cannot be written"):
        export(run, run / "config.toml" / "a.pt", "torchscript")
    with pytest.raises(RunError, match="no run folder"):
        export(tmp_path / "nowhere", None, "safetensors")
    assert not (tmp_path / "nowhere").exists()


def test_an_export_that_differs_is_not_kept(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_other_weights(predictor: use.Predictor, path: Path) -> None:
        save_file({name: value + 1 for name, value in predictor.net.state_dict().items()}, path)

    broken = use.Format(".safetensors", save_other_weights, use.FORMATS["safetensors"].load)
    monkeypatch.setitem(use.FORMATS, "safetensors", broken)
    out = tmp_path / "kept" / "a.safetensors"
    out.parent.mkdir()
    out.write_text("the one before")
    with pytest.raises(RunError, match="its probabilities differ"):
        export(run, out, "safetensors", overwrite=True)
    assert out.read_text() == "the one before" and list(out.parent.iterdir()) == [out]


# --- the model card


def test_the_card_says_what_matters(run: Path) -> None:
    path = write_card(run)
    card = path.read_text()
    assert path == run / "MODEL_CARD.md" and card.startswith(
        "# Model card: resnet10 trained by fedhpro on digits-lite\n"
    )
    count = sum(p.numel() for p in models.build(**MODEL).parameters())
    for line in (
        f"| parameters | {count:,} |",
        "| classes | 10: c0, c1, c2, c3, c4, c5, c6, c7, c8, c9 |",
        "| clients | 20 |",
        "| AVG accuracy, central: the unweighted mean of the domains on the server's test sets | per cent |",
        "| final: after the last round | 80.12 |",
        "| best: best round (14); chosen by this same accuracy, hence optimistic | 81.50 |",
        "| last5: mean of the last five evaluations | 79.75 |",
        "| syn | 61.25 |",
        "| AVG | 80.25 |",
        "| `local_epochs` | 2 |",
        "| `M` | 0 |",
        "| sent by the clients, all rounds | 12,345,678 bytes (12.3 MB) |",
        "| seed | 7 |",
        "| torch | 2.13.0 |",
        f"fedhpro predict {run} IMAGE",
        f"fedhpro export {run} --format onnx --out model.onnx",
        "fedhpro run method=fedhpro seed=7 data=digits-lite local_epochs=2 M=0",
    ):
        assert f"{line}\n" in card, line
    assert "Trained by federated learning on digits-lite only" in card
    assert "the worst is syn, at 61.25 per cent" in card
    assert "Not validated for clinical, financial or any safety-relevant use." in card


def test_the_card_has_the_settings_that_had_an_effect(run: Path) -> None:
    with (run / "config.toml").open("a") as config:
        config.write('lr_schedule = "exponential"\nlr_decay = 0.9\nprecision = "bf16"\nlocal_steps = "none"\n')
        config.write('optimizer = "sgd"\nmomentum = 0.8\n')
    card = write_card(run).read_text()
    assert "| `local_epochs` | 2 |" in card and "| `local_steps` |" not in card and "| `momentum` | 0.8 |" in card
    assert all(f"| `{row} |" in card for row in ("lr_schedule` | exponential", "lr_decay` | 0.9", "precision` | bf16"))
    config = (run / "config.toml").read_text()
    changed = config.replace('steps = "none"', "steps = 1").replace("exponential", "constant")
    (run / "config.toml").write_text(changed.replace("sgd", "adam"))
    card = write_card(run).read_text()
    assert "| `local_steps` | 1 |" in card and "| `local_epochs` |" not in card and "| `lr_decay` |" not in card
    assert "| `momentum` |" not in card


def test_the_card_with_federated_evaluation(run: Path) -> None:
    own = {"mean": 70.0, "weighted": 71.5, "worst": 42.0, "clients": {"0": 70.0}}
    (run / "result.json").write_text(json.dumps(RESULT | {"accuracy": {"AVG": 70.0}, "federated": own}))
    card = write_card(run).read_text()
    assert "| AVG accuracy, federated: the mean of the clients' held-out accuracies | per cent |" in card
    assert "| worst client | 42.00 |" in card
    assert "Accuracies per domain were not measured." in card and "per domain: central" not in card


@pytest.mark.parametrize("missing", [*RESULT, "final.best"])
def test_the_card_tolerates_what_is_missing(run: Path, missing: str) -> None:
    result = json.loads(json.dumps(RESULT))
    if missing == "final.best":
        del result["final"]["best"]
    else:
        del result[missing]
    (run / "result.json").write_text(json.dumps(result))
    card = write_card(run).read_text()
    assert "None" not in card and "Not validated" in card


@pytest.mark.parametrize("name", ["model.json", "result.json", "config.toml"])
def test_the_card_tolerates_a_missing_file(run: Path, name: str) -> None:
    (run / name).unlink()
    card = write_card(run).read_text()
    assert "None" not in card
    assert ("no global model: its models stay with the clients" in card) == (name == "model.json")


def test_the_card_of_an_interrupted_run(run: Path) -> None:
    (run / "result.json").write_text(json.dumps(RESULT | {"status": "interrupted", "rounds": 4}))
    assert "The run is interrupted: this is the model of round 4." in write_card(run).read_text()


def test_the_card_of_pooled_data(run: Path) -> None:
    from fedhpro.methods import METHODS

    pooled = next(name for name, method in METHODS.items() if method.pools_data)
    (run / "result.json").write_text(json.dumps(RESULT | {"method": pooled}))
    card = write_card(run).read_text()
    assert "All samples were brought to one place." in card and "by federated learning on" not in card


def test_the_card_escapes_names(run: Path, net: models.Net) -> None:
    write_run(run, net, classes=["a|b", "c\nd", *map(str, range(8))])
    assert "| classes | 10: a\\|b, c d, 0," in write_card(run).read_text()


def test_the_card_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run folder"):
        write_card(tmp_path / "nowhere")
    with pytest.raises(RunError, match="is not a run folder"):
        write_card(tmp_path)
    (tmp_path / "config.toml").write_text("= broken")
    with pytest.raises(RunError, match=r"config\.toml cannot be read"):
        write_card(tmp_path)


def test_the_snippet_of_the_card_runs(run: Path, tmp_path: Path) -> None:
    image = save_image(tmp_path / "a.png", pixels()[0])
    snippet = write_card(run).read_text().split("```python\n")[1].split("```")[0].replace("IMAGE", str(image))
    found = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, check=True)
    assert found.stdout.startswith(f"{image} c")
