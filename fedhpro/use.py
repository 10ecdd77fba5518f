"""A trained model is for use: load it from its run folder, predict images or texts, export it for other programs."""

from __future__ import annotations

import contextlib
import copy
import csv
import functools
import hashlib
import importlib.util
import itertools
import json
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from PIL import Image, ImageOps
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn

from . import models
from .card import write_card
from .data.text import Tokenizer, words_of
from .errors import DataError, RunError
from .files import delimiter_of, safe_formats
from .nearest import NearestMeans

__all__ = [
    "FORMATS",
    "Prediction",
    "Predictor",
    "RunError",
    "export",
    "load_model",
    "predict",
    "read_images",
    "read_texts",
    "write_card",
]

FORMAT = 1  # of model.json
DIMENSIONS = {"image": 3, "text": 1}  # of a sample, by the kind in model.json
RUN_FILES = {"model.safetensors", "model.json", "server.safetensors", "config.toml", "result.json"}
RUN_FILES |= {"metrics.jsonl", "timings.jsonl", "costs.json", "curves.png", "MODEL_CARD.md", "tokenizer.json"}
RUN_FILES |= {"holdings.png", "holdings.json", "confusion.json", "report.html"}
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")  # in folders
PATH_COLUMNS = {"path", "file", "filename", "image"}
TEXT_COLUMN = "text"
NOT_PIXELS = {"label", ""}  # pandas leaves the name of its index empty
MODES = {1: "L", 3: "RGB"}  # Pillow's, by the number of channels
SMALLEST_SIDE = 8  # of pictures in CSV rows: without it, any single number would be a picture of one pixel
TOLERANCE = 1e-4  # between the probabilities of a model and of its export

AnyPath = str | os.PathLike[str]
Paths = AnyPath | Iterable[AnyPath]
Shape = tuple[int, int, int]  # channels, height, width
Sample = TypeVar("Sample")
RowReader = Callable[[int, list[str]], tuple[str, Sample]]  # from number and cells to name and sample


@dataclass(frozen=True)
class Prediction:
    name: str  # the file, or file:row for a row of pixels or a text
    label: str
    probability: float
    probabilities: dict[str, float]  # of the most probable classes, best first


class Predictor(nn.Module):
    """From samples to probabilities [n, C]; softmax and the normalisation of images are inside.

    Images are float [n, *shape] from 0 to 255, not 0 to 1; uint8 is accepted and converted.
    Texts are int64 token ids [n, length], as `encode` gives them.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, net: models.Net, about: dict[str, Any], tokenizer: Tokenizer | None = None) -> None:
        super().__init__()
        self.net = net
        self.about = about  # model.json
        self.tokenizer = tokenizer  # None: the model takes images
        self.takes = "images" if tokenizer is None else "tokens"
        self.classes: tuple[str, ...] = tuple(about["classes"])
        self.shape: tuple[Any, ...] = tuple(about["shape"])  # of one sample
        if tokenizer is None:
            mean, std = (torch.tensor(about[name])[:, None, None] for name in ("mean", "std"))
            self.register_buffer("scale", 1 / (255 * std))
            self.register_buffer("shift", mean / std)
        self.eval().requires_grad_(False)

    def encode(self, texts: str | Sequence[str]) -> Tensor:
        """Token ids [n, length] of texts, for a model that takes them."""
        if self.tokenizer is None:
            raise RunError("this model takes images, not texts: it has no tokenizer")
        return self.tokenizer.encode([texts] if isinstance(texts, str) else texts, *self.shape)

    def forward(self, samples: Tensor) -> Tensor:
        if not torch.jit.is_tracing() and tuple(samples.shape[1:]) != self.shape:
            wanted = ", ".join(map(str, self.shape))
            raise ValueError(f"{self.takes} must be [n, {wanted}], not {list(samples.shape)}")
        logits: Tensor = self.net(self._normalised(samples))
        return logits.softmax(1)

    def features(self, samples: Tensor) -> Tensor:
        """The vectors z [n, d] that the classifier sees."""
        return self.net.features(self._normalised(samples))

    def _normalised(self, samples: Tensor) -> Tensor:
        if self.tokenizer is not None:
            return samples
        return torch.addcmul(-self.shift, samples.float(), self.scale)


# --- the model of a run ------------------------------------------------------------------------------------------


def load_model(run: AnyPath) -> Predictor:
    """The final global model of a run folder, in eval mode."""
    folder = Path(run)
    _require_model(folder)
    about, content = read_json(folder / "model.json"), _read_bytes(folder / "model.safetensors")
    if about.get("format") != FORMAT:
        raise RunError(f"{folder}/model.json has format {about.get('format')}, not {FORMAT}: update fedhpro")
    if hashlib.sha256(content).hexdigest() != about.get("sha256"):
        raise RunError(f"{folder}/model.safetensors is damaged, its checksum does not fit: copy or train it again")
    kind, shape = about.get("kind", "image"), about.get("shape")
    if not isinstance(kind, str) or kind not in DIMENSIONS:
        raise RunError(f"the model in {folder} takes samples of the kind {kind!r}: update fedhpro")
    if not isinstance(shape, list) or len(shape) != DIMENSIONS[kind]:
        raise RunError(f"the model in {folder} does not take {kind}s, its shape is {shape}: train it again")
    tokenizer = _read_tokenizer(folder, about) if kind == "text" else None
    try:
        net = models.build(**about["model"])
        if about.get("nearest"):
            net.instead = NearestMeans(about["nearest"], net.num_classes, net.dim)
        net.load_state_dict(load(content))
        predictor = Predictor(net, about, tokenizer)
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{folder}/model.json does not describe model.safetensors: {reason}") from None
    if len(set(predictor.classes)) != net.num_classes:
        raise RunError(f"{folder}/model.json must name {net.num_classes} different classes")
    return predictor


def _read_tokenizer(folder: Path, about: dict[str, Any]) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise RunError(f"{folder} has no tokenizer.json, which turns texts into token ids: copy it or train again")
    content = _read_bytes(path)
    if hashlib.sha256(content).hexdigest() != about.get("tokenizer_sha256"):  # another one would give wrong words
        raise RunError(f"{path} is not the tokenizer of this model, its checksum does not fit: copy it or train again")
    try:
        return Tokenizer.from_json(content)
    except DataError as error:
        raise RunError(f"{path} cannot be used: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run."""
    try:
        content = json.loads(_read_bytes(path))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise RunError(f"{path} is not valid JSON, copy it again or train again: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} is not a JSON object: copy it again or train again")
    return content


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None


def _require_model(folder: Path) -> None:
    if not folder.exists():
        raise RunError(f"there is no run folder {folder}: give one that `fedhpro run` wrote")
    if (folder / "model.safetensors").is_file() and (folder / "model.json").is_file():
        return
    if (folder / "result.json").is_file() and read_json(folder / "result.json").get("status") == "finished":
        raise RunError(f"{folder} has no global model, its models stay with the clients: use another run")
    if any((folder / name).is_file() for name in ("result.json", "config.toml", "metrics.jsonl")):
        raise RunError(f"the run in {folder} is unfinished and has no model yet: finish it first")
    raise RunError(f"{folder} is not a run folder: give one that `fedhpro run` wrote")


# --- images ------------------------------------------------------------------------------------------------------


def read_images(paths: Paths, shape: Shape) -> Iterator[tuple[str, Tensor]]:
    """Name and uint8 tensor of one image after the other, brought to `shape`.

    A path is an image file, a folder (its image files, recursively and sorted) or a CSV file. A CSV file has a
    column path, file, filename or image, relative to its own folder; or each row is a picture: 0 to 255, grey or
    colour (all red values, then green, then blue), of the model's shape or any square; a label column is ignored.
    """
    for path in _each(paths, "images, folders or CSV files"):
        if path.is_dir():
            yield from _read_folder(path, shape)
        elif path.suffix.lower() == ".csv" and path.is_file():
            yield from _read_csv(path, functools.partial(_row_reader, shape=shape), delimiter_of)
        elif path.suffix.lower() == ".txt":
            raise RunError(f"{path} is a text, and this model takes images: give images, folders or CSV files")
        else:
            yield str(path), _read_image(path, shape)


def _each(paths: Paths, wanted: str) -> Iterator[Path]:
    path = None
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        yield Path(path)
    if path is None:
        raise RunError(f"there is nothing to read: give {wanted}")


def _read_folder(folder: Path, shape: Shape) -> Iterator[tuple[str, Tensor]]:
    empty = True
    for file in _image_files(folder):
        empty = False
        yield str(file), _read_image(file, shape)
    if empty:
        raise RunError(f"there are no images in {folder}: it needs files ending in {', '.join(SUFFIXES)}")


def _image_files(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise RunError(f"the folder {folder} cannot be read: {error.strerror}") from None
    for entry in entries:
        if entry.name.startswith("."):  # such as the ._ files that macOS leaves beside images
            continue
        if entry.is_dir() and not entry.is_symlink():  # a link could lead round in circles
            yield from _image_files(entry)
        elif entry.suffix.lower() in SUFFIXES and entry.is_file():
            yield entry


def _read_image(path: Path, shape: Shape) -> Tensor:
    if not path.is_file():
        raise RunError(f"there is no image {path}: check the path")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=safe_formats()) as image:
                return _to_tensor(ImageOps.exif_transpose(image), shape)
    except RunError as error:
        raise RunError(f"the image {path} cannot be used: {error}") from None
    except Exception as error:  # what decoders raise on hostile files is not limited to what Pillow documents
        raise RunError(f"the image {path} cannot be read, repair or remove it: {error}") from None


def _to_tensor(image: Image.Image, shape: Shape) -> Tensor:
    channels, height, width = shape
    if channels not in MODES:
        raise RunError(f"the model takes {channels} channels: only grey and colour images are supported")
    image = _eight_bits(image).convert(MODES[channels])
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)  # Pillow's filters are antialiased
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, channels).permute(2, 0, 1).contiguous()


def _eight_bits(image: Image.Image) -> Image.Image:
    """Where Pillow's own conversion would clip bright pixels or uncover what is transparent."""
    if image.mode.startswith("I;16"):
        return image.convert("F").point(lambda value: value * (1 / 257) + 0.5).convert("L")
    if image.mode in ("I", "F"):
        raise RunError("it has 32 bits per pixel and no known range: save it with 8 or 16")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


# --- texts -------------------------------------------------------------------------------------------------------


def read_texts(paths: Paths) -> Iterator[tuple[str, str]]:
    """Name and text of one text after the other; the name is file:line or file:row.

    A path is a .txt file with a text on each line (blank ones are skipped), or a .csv file with a column `text`
    (others are ignored). Both are UTF-8.
    """
    for path in _each(paths, ".txt or .csv files"):
        suffix = path.suffix.lower()
        if path.is_dir() or suffix not in (".txt", ".csv"):
            raise RunError(f"{path} cannot be used, this model takes texts: give .txt or .csv files")
        if not path.is_file():
            raise RunError(f"there is no file {path}: check the path")
        for name, text in _read_csv(path, _text_reader) if suffix == ".csv" else _read_lines(path):
            if not words_of(text):
                raise RunError(f"there is no word in {name}: complete or remove it")
            yield name, text


def _read_lines(path: Path) -> Iterator[tuple[str, str]]:
    number, empty = 0, True
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    empty = False
                    yield f"{path}:{number}", line
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read after line {number}, save it as UTF-8: {error}") from None
    if empty:
        raise RunError(f"{path} is empty: it needs a text on each line")


# --- CSV files ---------------------------------------------------------------------------------------------------


def _read_csv(
    path: Path,
    reader: Callable[[Path, list[str]], RowReader[Sample]],
    delimiter: Callable[[TextIO], str] = lambda file: ",",  # texts have semicolons of their own
) -> Iterator[tuple[str, Sample]]:
    """What `reader`, which is given the first row, makes of each row."""
    number = 0
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            found = csv.reader(file, delimiter=delimiter(file))
            rows = ((number, row) for number, row in enumerate(found, start=1) if row)
            first = next(rows, None)
            if first is None:
                raise RunError(f"{path} is empty: it needs rows")
            number, names = first
            read = reader(path, names)
            empty = True
            for number, row in rows if _is_header(names) else itertools.chain([first], rows):
                empty = False
                if len(row) != len(names):
                    raise RunError(f"row {number} of {path} has {len(row)} values, not {len(names)}: repair it")
                yield read(number, row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunError(f"{path} cannot be read after row {number}, repair it or save it as UTF-8: {error}") from None
    if empty:
        raise RunError(f"{path} has a header but no rows: add some")


def _text_reader(path: Path, first: list[str]) -> RowReader[str]:
    names = _plain(first)
    if TEXT_COLUMN not in names:
        raise RunError(f"{path} has no column named {TEXT_COLUMN}, and this model takes texts: add a header")
    column = names.index(TEXT_COLUMN)
    return lambda number, row: (f"{path}:{number}", row[column])


def _row_reader(path: Path, first: list[str], shape: Shape) -> RowReader[Tensor]:
    """How to read the rows of a CSV file of images, from its first one."""
    names = _plain(first) if _is_header(first) else []
    for column, name in enumerate(names):
        if name in PATH_COLUMNS:
            return lambda number, row: _listed_image(path, number, row[column], shape)
    columns = [column for column in range(len(first)) if not names or names[column] not in NOT_PIXELS]
    count, size = len(columns), _picture_size(len(columns), shape)
    if size is None and not names:  # MNIST as CSV has no header and its label first
        columns = columns[1:]
        size = _picture_size(len(columns), shape)
    if size is None:
        raise RunError(
            f"{path} has no usable columns: name one of them path, file, filename or image, "
            f"or give each row {_wanted(shape)} pixels, not {count}"
        )
    found = size
    return lambda number, row: (f"{path}:{number}", _pixels(path, number, [row[c] for c in columns], found, shape))


def _is_header(row: list[str]) -> bool:
    """A known name, no number at all, or pandas' 0, 1, 2...; a broken number among pixels makes no header."""
    names = _plain(row)
    known = any(name in {*PATH_COLUMNS, TEXT_COLUMN, "label"} for name in names)
    numbered = [name for name in names if name not in NOT_PIXELS]
    counted = numbered == [str(column) for column in range(len(numbered))]
    return known or counted or all(_number(name) is None for name in names)


def _plain(names: list[str]) -> list[str]:
    return [name.strip().lower() for name in names]


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _listed_image(path: Path, number: int, listed: str, shape: Shape) -> tuple[str, Tensor]:
    try:
        return listed, _read_image(path.parent / listed.strip(), shape)
    except RunError as error:
        raise RunError(f"row {number} of {path}: {error}") from None


def _picture_size(count: int, shape: Shape) -> Shape | None:
    channels, height, width = shape
    for depth in {channels, 1}:
        if count == depth * height * width:
            return depth, height, width
    for depth in MODES:
        side = math.isqrt(count // depth)
        if count == depth * side * side and side >= SMALLEST_SIDE:
            return depth, side, side
    return None


def _wanted(shape: Shape) -> str:
    channels, height, width = shape
    own = [f"{height * width}"] + [f"{channels * height * width}"] * (channels > 1)
    return f"{' or '.join(own)} (or another square, grey or colour)"


def _pixels(path: Path, number: int, cells: list[str], size: Shape, shape: Shape) -> Tensor:
    values = [_number(cell) for cell in cells]
    for cell, value in zip(cells, values, strict=True):
        if value is None or not 0 <= value <= 255 or value != int(value):
            raise RunError(f"row {number} of {path} has {cell[:20]!r}: pixels must be whole numbers from 0 to 255")
    depth, height, width = size
    planes = torch.tensor(values).to(torch.uint8).view(depth, height * width)
    bands = [Image.frombytes("L", (width, height), bytes(plane.tolist())) for plane in planes]
    return _to_tensor(Image.merge(MODES[depth], bands), shape)


# --- predictions -------------------------------------------------------------------------------------------------


def predict(run: AnyPath, paths: Paths, top: int = 3, batch: int = 64) -> Iterator[Prediction]:
    """A prediction for each image of `read_images`, or each text of `read_texts` where the model takes texts, in
    their order; never more than a batch of them is in memory.
    """
    if top < 1 or batch < 1:
        raise RunError(f"top={top} and batch={batch} must be at least 1")
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    for path in paths:
        if Path(path).is_dir() and (Path(path) / "config.toml").is_file():
            raise RunError(f"{path} is a run folder, and no images or texts: name one run, then what to classify")
    predictor = load_model(run)  # a run that cannot be used is refused at the call, not at the first prediction
    samples = (
        read_images(paths, predictor.shape)
        if predictor.tokenizer is None
        else ((name, predictor.encode(text)[0]) for name, text in read_texts(paths))
    )
    return _predictions(predictor, samples, top, batch)


def _predictions(
    predictor: Predictor, samples: Iterator[tuple[str, Tensor]], top: int, batch: int
) -> Iterator[Prediction]:
    while read := list(itertools.islice(samples, batch)):
        probabilities = predictor(torch.stack([sample for _, sample in read]))
        best = probabilities.topk(min(top, len(predictor.classes)))
        for (name, _), values, indices in zip(read, best.values.tolist(), best.indices.tolist(), strict=True):
            found = {predictor.classes[index]: value for index, value in zip(indices, values, strict=True)}
            label = next(iter(found))
            yield Prediction(name, label, found[label], found)


# --- exports -----------------------------------------------------------------------------------------------------

Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """A kind of file: how a Predictor is written to it, and read back as a function of samples."""

    suffix: str
    save: Callable[[Predictor, Path], None]
    load: Callable[[Predictor, Path], Call]
    needs: tuple[str, ...] = ()  # packages of the extra `onnx`


def export(run: AnyPath, out: AnyPath | None, format: str | None = None, overwrite: bool = False) -> Path:
    """Write a run's model to the file `out` (None: exported.* in the run folder), which is only there once it
    has been read back and has given the same probabilities. format None: what the file is named, or safetensors.

    safetensors holds the weights of the network. The other formats hold the whole Predictor: float images from 0
    to 255 or int64 token ids in, probabilities out, for any number of them. All carry model.json, hence the names
    of the classes, and models of texts tokenizer.json as well.
    """
    named = next((name for name in FORMATS if out and Path(out).suffix.lower() == FORMATS[name].suffix), None)
    format = format or named or "safetensors"
    if format not in FORMATS:
        raise RunError(f"there is no format {format!r}: choose one of {', '.join(FORMATS)}")
    if named not in (None, format):
        raise RunError(f"{out} would be {format}, and its name says {named}: choose another name or format")
    target = Path(run) / f"exported{FORMATS[format].suffix}" if out is None else Path(out)
    if target.is_dir():
        raise RunError(f"{target} is a folder: name a file, such as {target / 'model'}{FORMATS[format].suffix}")
    if target.name in RUN_FILES and target.resolve().parent == Path(run).resolve():
        raise RunError(f"{target} belongs to the run itself: choose another name")
    if target.exists() and not overwrite:
        raise RunError(f"{target} exists already: choose another name or allow it to be overwritten")
    if missing := [name for name in FORMATS[format].needs if importlib.util.find_spec(name) is None]:
        raise RunError(f"{format} needs {' and '.join(missing)}: pip install fedhpro[onnx]")
    predictor = load_model(run)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as folder, _quiet():
            file = Path(folder) / f"model{FORMATS[format].suffix}"  # torch asks for its own suffixes
            FORMATS[format].save(predictor, file)
            _verify(FORMATS[format].load(predictor, file), predictor, target)
            file.chmod(0o644)  # safetensors writes 0600, which is for secrets
            os.replace(file, target)
    except OSError as error:
        raise RunError(f"{target} cannot be written: {error.strerror or error}") from None
    return target


def _verify(exported: Call, predictor: Predictor, target: Path) -> None:
    for n in (1, 3):  # neither is the two samples that it was made with
        samples = _samples(predictor, n)
        if not torch.allclose(exported(samples), predictor(samples), rtol=0, atol=TOLERANCE):
            raise RunError(f"{target} was not written, its probabilities differ: try another format")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's words on its own deprecations, and on packages that this export does not need."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        logger.setLevel(level)


def _samples(predictor: Predictor, n: int) -> Tensor:
    """Random ones."""
    size, rng = (n, *predictor.shape), torch.Generator().manual_seed(n)
    if predictor.tokenizer is None:
        return 255 * torch.rand(size, generator=rng)
    return torch.randint(len(predictor.tokenizer), size, generator=rng)


def _example(predictor: Predictor) -> Tensor:
    return _samples(predictor, 2)  # torch.export would take a batch of one for a constant


def _about(predictor: Predictor) -> dict[str, str]:
    tokenizer = {} if predictor.tokenizer is None else {"tokenizer.json": predictor.tokenizer.to_json()}
    return {"model.json": json.dumps(predictor.about)} | tokenizer


def _save_safetensors(predictor: Predictor, path: Path) -> None:
    save_file(predictor.net.state_dict(), path, metadata=_about(predictor))


def _load_safetensors(predictor: Predictor, path: Path) -> Call:
    loaded = copy.deepcopy(predictor)
    loaded.net.load_state_dict(load_file(path))
    return loaded


def _save_torchscript(predictor: Predictor, path: Path) -> None:
    traced = torch.jit.trace(predictor, _example(predictor), check_trace=False)
    torch.jit.save(traced, str(path), _extra_files=_about(predictor))


def _load_torchscript(_: Predictor, path: Path) -> Call:
    loaded: Call = torch.jit.load(str(path))
    return loaded


def _any_batch() -> tuple[dict[int, Any]]:
    return ({0: torch.export.Dim("batch")},)


def _save_torch_export(predictor: Predictor, path: Path) -> None:
    program = torch.export.export(predictor, (_example(predictor),), dynamic_shapes=_any_batch())
    torch.export.save(program, path, extra_files=_about(predictor))


def _load_torch_export(_: Predictor, path: Path) -> Call:
    return torch.export.load(path).module()


def _save_onnx(predictor: Predictor, path: Path) -> None:
    program = torch.onnx.export(
        predictor,
        (_example(predictor),),
        input_names=[predictor.takes],
        output_names=["probabilities"],
        dynamo=True,
        dynamic_shapes=_any_batch(),
        verbose=False,
    )
    assert program is not None  # only the old exporter returns nothing
    program.model.metadata_props.update(_about(predictor))
    program.save(path, external_data=False)  # one file, which can be moved as a whole


def _load_onnx(predictor: Predictor, path: Path) -> Call:
    if importlib.util.find_spec("onnxruntime"):
        from onnxruntime import InferenceSession

        session = InferenceSession(str(path), providers=["CPUExecutionProvider"])
    else:  # slower, and part of onnx itself
        from onnx.reference import ReferenceEvaluator

        session = ReferenceEvaluator(str(path))
    return lambda samples: torch.from_numpy(session.run(None, {predictor.takes: samples.numpy()})[0])


FORMATS = {
    "safetensors": Format(".safetensors", _save_safetensors, _load_safetensors),
    "torchscript": Format(".pt", _save_torchscript, _load_torchscript),
    "torch-export": Format(".pt2", _save_torch_export, _load_torch_export),
    "onnx": Format(".onnx", _save_onnx, _load_onnx, needs=("onnx", "onnxscript")),
}
