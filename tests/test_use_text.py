"""A trained text model in use: what a run saves, loading, texts from outside, predictions, exports, the card."""

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
from safetensors import safe_open
from safetensors.torch import save

import fedhpro
from fedhpro import models, use
from fedhpro.data.sources import Domain, Source, Split
from fedhpro.data.text import Tokenizer
from fedhpro.use import RunError, export, load_model, predict, read_images, read_texts, write_card

LENGTH = 12
TOKENIZER = Tokenizer(("tensor", "axes", "spline", "estimator", "größe"))
MODEL = {"name": "textcnn", "num_classes": 3, "width": None, "dim": None, "vocab": len(TOKENIZER)}
TEXTS = ["tensor axes", "Spline, estimator!", "größe of a tensor"]
RESULT = {"status": "finished", "rounds": 2, "method": "fedavg", "data": "docs-lite", "accuracy": {"docs": 50.0}}


@pytest.fixture(scope="module")
def net() -> models.Net:
    return models.build(**MODEL, seed=1).eval()


@pytest.fixture
def run(net: models.Net, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder, net)
    return folder


def write_run(folder: Path, net: models.Net, tokenizer: str = TOKENIZER.to_json(), **about: Any) -> None:
    content = save(net.state_dict())
    (folder / "model.safetensors").write_bytes(content)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    written = {"format": 1, "kind": "text", "model": MODEL, "classes": ["a", "b", "c"], "shape": [LENGTH]}
    written |= {"sha256": hashlib.sha256(content).hexdigest()}
    written |= {"tokenizer_sha256": hashlib.sha256(tokenizer.encode()).hexdigest()} | about
    (folder / "model.json").write_text(json.dumps(written))
    (folder / "result.json").write_text(json.dumps(RESULT))
    (folder / "config.toml").write_text('method = "fedavg"\ndata = "docs-lite"\nscenario = "ag-nid"\n')


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(paths: Any) -> str:
    with pytest.raises(RunError) as caught:
        list(read_texts(paths))
    return str(caught.value)


# --- what a run saves


def text_source(tokenizer: Tokenizer | None) -> Source:
    def split(n: int, seed: int) -> Split:
        x = torch.randint(len(TOKENIZER), (n, LENGTH), generator=torch.Generator().manual_seed(seed))
        return Split(x, torch.arange(n) % 4)

    domain = Domain("made-up", split(80, 1), split(8, 2), split(16, 3), real=False, about="noise")
    allocation, vocab = {"made-up": (2, 40)}, len(TOKENIZER)
    return Source("tiny", (domain,), tuple("abcd"), allocation, crop=0, vocab=vocab, tokenizer=tokenizer)


def test_a_run_on_texts_can_be_used(tmp_path: Path) -> None:
    keys = {"data": "docs-lite", "method": "fedavg", "rounds": 1, "local_epochs": 1, "workers": 0, "scenario": "iid"}
    done = fedhpro.run(out=str(tmp_path / "done"), source=text_source(TOKENIZER), clients=2, **keys)
    about = json.loads((done.folder / "model.json").read_text())
    assert (about["kind"], about["shape"], about["model"]["vocab"]) == ("text", [LENGTH], len(TOKENIZER))
    assert not {"mean", "std"} & about.keys() and not {"stem", "channels", "image_size"} & about["model"].keys()
    assert load_model(done.folder).tokenizer == TOKENIZER
    assert not [path for path in done.folder.iterdir() if path.name.endswith(".tmp")]
    assert len(list(predict(done.folder, write(tmp_path / "a.txt", "\n".join(TEXTS))))) == 3
    card = (done.folder / "MODEL_CARD.md").read_text()
    assert "images" not in card and "augmentation" not in card

    done = fedhpro.run(out=str(tmp_path / "bare"), source=text_source(None), clients=2, **keys)
    with pytest.raises(RunError, match=r"has no tokenizer\.json"):
        load_model(done.folder)


# --- loading


def test_probabilities_are_those_of_the_net(run: Path, net: models.Net) -> None:
    predictor = load_model(run)
    tokens = predictor.encode(TEXTS)
    assert tokens.dtype == torch.int64 and tokens.shape == (3, LENGTH)
    assert tokens[2].tolist() == [6, 1, 1, 2, *[0] * (LENGTH - 4)]
    assert torch.equal(predictor.encode(TEXTS[0]), tokens[:1])  # one text need not be a list
    assert torch.equal(predictor(tokens), net(tokens).softmax(1))
    assert predictor.classes == ("a", "b", "c") and predictor.shape == (LENGTH,)
    assert predictor.encode("axes " * 50).tolist() == [[3] * LENGTH]


def test_predictor_refuses_another_length(run: Path) -> None:
    with pytest.raises(ValueError, match=r"tokens must be \[n, 12\], not \[1, 13\]"):
        load_model(run)(torch.zeros(1, 13, dtype=torch.int64))


def test_a_missing_tokenizer(run: Path) -> None:
    (run / "tokenizer.json").unlink()
    for act in (lambda: predict(run, []), lambda: export(run, None, "safetensors")):
        with pytest.raises(RunError, match=r"has no tokenizer\.json"):
            act()


def test_another_tokenizer(run: Path) -> None:
    other = Tokenizer(tuple(reversed(TOKENIZER.words)))  # as many words, each with another id
    (run / "tokenizer.json").write_text(other.to_json(), encoding="utf-8")
    with pytest.raises(RunError, match=r"tokenizer\.json is not the tokenizer of this model"):
        load_model(run)


def test_a_tokenizer_of_another_version(run: Path, net: models.Net) -> None:
    write_run(run, net, tokenizer='{"tokenizer": "words", "version": 2}')
    with pytest.raises(RunError, match=r"tokenizer\.json cannot be used: this is not a tokenizer"):
        load_model(run)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"kind": "image"}, "does not take images, its shape is \\[12\\]"),
        ({"shape": [3, 32, 32]}, "does not take texts, its shape is \\[3, 32, 32\\]"),
        ({"shape": None}, "does not take texts"),
        ({"kind": "sound"}, "of the kind 'sound': update fedhpro"),
        ({"kind": None}, "of the kind None: update fedhpro"),
        ({"kind": ["text"]}, "of the kind \\['text'\\]: update fedhpro"),
        ({"model": MODEL | {"vocab": None}}, "textcnn needs vocab"),
        ({"model": MODEL | {"vocab": 99}}, r"does not describe model\.safetensors"),
    ],
)
def test_a_model_json_that_does_not_fit(run: Path, net: models.Net, about: dict[str, Any], message: str) -> None:
    write_run(run, net, **about)
    with pytest.raises(RunError, match=message):
        load_model(run)


# --- texts


def test_lines_are_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\ufefftensor axes\r\n\n  \nSpline,\u2028estimator!\ngröße")
    found = list(read_texts(path))
    assert [name for name, _ in found] == [f"{path}:{number}" for number in (1, 4, 5)]
    assert [text.strip() for _, text in found] == ["tensor axes", "Spline,\u2028estimator!", "größe"]


def test_rows_are_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.CSV", '\ufeffid, Text ,2024\n1,"tensor, axes",x\n\n2,"two\nlines",y\n')
    assert list(read_texts([path])) == [(f"{path}:2", "tensor, axes"), (f"{path}:4", "two\nlines")]


def test_texts_that_cannot_be_used(tmp_path: Path) -> None:
    assert "nothing to read: give .txt or .csv files" in refusal([])
    assert f"there is no file {tmp_path / 'a.txt'}" in refusal(tmp_path / "a.txt")
    for content in ("", "\n \n"):
        assert "a.txt is empty: it needs a text on each line" in refusal(write(tmp_path / "a.txt", content))
    assert "a.csv is empty" in refusal(write(tmp_path / "a.csv", ""))
    assert "a.csv has a header but no rows" in refusal(write(tmp_path / "a.csv", "text\n"))
    assert "row 2 of" in refusal(write(tmp_path / "a.csv", "text,label\nx\n"))
    assert "a.txt cannot be read after line 0, save it as UTF-8" in refusal(write(tmp_path / "a.txt", b"gr\xf6\xdfe"))
    assert "repair it or save it as UTF-8" in refusal(write(tmp_path / "a.csv", b"text\ngr\xf6\xdfe\n"))
    assert f"there is no word in {tmp_path / 'a.txt'}:2" in refusal(write(tmp_path / "a.txt", "x\n?!\n"))
    assert f"there is no word in {tmp_path / 'a.csv'}:2" in refusal(write(tmp_path / "a.csv", "text,label\n,1\n"))


def test_images_are_no_texts(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "a.png"):
        assert f"{path} cannot be used, this model takes texts: give .txt or .csv files" in refusal(path)
    pixels = write(tmp_path / "a.csv", "0,1,2,3\n")
    assert "a.csv has no column named text, and this model takes texts" in refusal(pixels)


def test_texts_are_no_images(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "tensor")
    with pytest.raises(RunError, match=r"a\.txt is a text, and this model takes images"):
        list(read_images(path, (3, 32, 32)))
    with pytest.raises(RunError, match="has no usable columns"):
        list(read_images(write(tmp_path / "a.csv", "text\ntensor\n"), (3, 32, 32)))


# --- predictions and exports


def test_predictions_do_not_depend_on_the_batch(run: Path, tmp_path: Path) -> None:
    lines = write(tmp_path / "a.txt", "\n".join(TEXTS))
    rows = write(tmp_path / "b.csv", "label,text\n" + "".join(f'0,"{text}"\n' for text in TEXTS))
    predictor = load_model(run)
    expected = predictor(predictor.encode(TEXTS * 2))
    for batch in (1, 4, 64):
        found = list(predict(run, [lines, rows], batch=batch, top=5))
        assert [Path(p.name).name for p in found] == [f"a.txt:{i}" for i in (1, 2, 3)] + [
            f"b.csv:{i}" for i in (2, 3, 4)
        ]
        for prediction, row in zip(found, expected, strict=True):
            assert prediction.label == "abc"[int(row.argmax())]
            assert [prediction.probabilities[c] for c in "abc"] == pytest.approx(row.tolist(), abs=1e-5)


INSTALLED = [name for name, kind in use.FORMATS.items() if all(map(importlib.util.find_spec, kind.needs))]


@pytest.mark.parametrize("format", use.FORMATS)
def test_exports_equal_the_predictor(run: Path, tmp_path: Path, format: str, recwarn: Any) -> None:
    if format not in INSTALLED:
        pytest.skip("needs pip install fedhpro[onnx]")
    out = export(run, tmp_path / "new" / "exported.bin", format)
    predictor, kind = load_model(run), use.FORMATS[format]
    assert not recwarn.list
    shutil.copy(out, tmp_path / f"copy{kind.suffix}")
    loaded = kind.load(predictor, tmp_path / f"copy{kind.suffix}")
    for n in (1, 2, 5):
        tokens = predictor.encode((TEXTS * 2)[:n])
        torch.testing.assert_close(loaded(tokens), predictor(tokens), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.load:DeprecationWarning")
def test_exports_carry_the_tokenizer(run: Path, tmp_path: Path) -> None:
    with safe_open(export(run, tmp_path / "a.safetensors", "safetensors"), framework="pt") as file:
        carried = [file.metadata()]
    for load, path in (
        (lambda path, extra: torch.jit.load(path, _extra_files=extra), export(run, tmp_path / "a.pt", "torchscript")),
        (
            lambda path, extra: torch.export.load(path, extra_files=extra),
            export(run, tmp_path / "a.pt2", "torch-export"),
        ),
    ):
        carried.append({"model.json": "", "tokenizer.json": ""})
        load(str(path), carried[-1])
    for files in carried:
        assert Tokenizer.from_json(files["tokenizer.json"]) == TOKENIZER
        assert json.loads(files["model.json"])["kind"] == "text"


@pytest.mark.skipif("onnx" not in INSTALLED, reason="needs pip install fedhpro[onnx]")
def test_onnx_takes_tokens(run: Path, tmp_path: Path) -> None:
    import onnx

    model = onnx.load(export(run, tmp_path / "a.onnx", "onnx"), load_external_data=False)
    [tokens] = model.graph.input
    assert tokens.name == "tokens" and tokens.type.tensor_type.elem_type == onnx.TensorProto.INT64
    dims = tokens.type.tensor_type.shape.dim
    assert dims[0].dim_param and dims[1].dim_value == LENGTH
    carried = {p.key: p.value for p in model.metadata_props}
    assert Tokenizer.from_json(carried["tokenizer.json"]) == TOKENIZER


def test_exports_leave_the_tokenizer_alone(run: Path) -> None:
    with pytest.raises(RunError, match="belongs to the run itself"):
        export(run, run / "tokenizer.json", "safetensors", overwrite=True)


# --- the model card


def test_the_card_speaks_of_texts(run: Path) -> None:
    card = write_card(run).read_text()
    count = sum(p.numel() for p in models.build(**MODEL).parameters())
    for line in (
        f"| parameters | {count:,} |",
        "| network | textcnn |",
        "| input | texts as 12 token ids: longer ones are cut, shorter ones padded with 0 |",
        "| vocabulary | 7 token ids, see tokenizer.json |",
        "| split over the clients | label skew: some clients hold two of the classes, the others all |",
        "- For research on federated learning, and for texts like those it was trained on.",
        f"fedhpro predict {run} TEXTS.txt",
    ):
        assert f"{line}\n" in card, line
    assert "The vocabulary does hold words of the clients' texts" in card
    assert "image" not in card.lower() and "None" not in card


def test_the_card_without_a_global_model_speaks_of_texts_too(run: Path) -> None:
    (run / "model.json").unlink()
    with (run / "config.toml").open("a") as file:
        file.write('model = "textcnn"\n')
    card = write_card(run).read_text()
    assert "for texts like those" in card and "image" not in card.lower()


def test_the_snippet_of_the_card_runs(run: Path, tmp_path: Path) -> None:
    texts = write(tmp_path / "a.txt", TEXTS[0])
    snippet = write_card(run).read_text().split("```python\n")[1].split("```")[0].replace("TEXTS.txt", str(texts))
    found = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, check=True)
    assert found.stdout.startswith(f"{texts}:1 ")
