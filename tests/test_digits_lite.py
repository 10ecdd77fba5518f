"""The embedded dataset: its sizes, its promises of disjointness, its determinism and its cache."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedhpro.data import digits_lite
from fedhpro.data.sources import Domain, Source, Split
from fedhpro.files import save_tensors
from fedhpro.report.sheet import contact_sheet

SIZES = {"mnist": (1000, 400, 800), "uci": (600, 397, 800), "mnist-m": (1000, 400, 800), "syn": (1000, 400, 800)}
FOREIGN = {name: version(name) for name, pinned in digits_lite.FROZEN_WITH.items() if version(name) != pinned}
Places = dict[bytes, list[tuple[int, int, int]]]


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return digits_lite.build()


@pytest.fixture(scope="module")
def source(tensors: dict[str, Tensor]) -> Source:
    return digits_lite.as_source(tensors)


@pytest.fixture(scope="module")
def places() -> Places:
    """Where each run of 32 pixels occurs in the photographs: photograph, row, column."""
    found: Places = {}
    for number, photo in enumerate(digits_lite._photos()):
        for row, line in enumerate(photo):
            content = line.tobytes()
            for column in range(photo.shape[1] - 31):
                found.setdefault(content[3 * column : 3 * column + 96], []).append((number, row, column))
    return found


def top_row(image: Tensor) -> bytes:
    """MNIST digits are padded by two pixels, so the first row of a blended image is pure background."""
    return image[:, 0].T.contiguous().numpy().tobytes()


def test_names_sizes_shapes_and_types(source: Source) -> None:
    assert source.name == "digits-lite"
    assert source.classes == tuple("0123456789")
    assert source.shape == (3, 32, 32)
    assert (source.crop, source.flip) == (2, False)
    assert [domain.name for domain in source.domains] == list(SIZES) == list(source.allocation)
    assert [domain.real for domain in source.domains] == [True, True, False, False]
    for domain in source.domains:
        splits = domain.train, domain.validation, domain.test
        assert tuple(map(len, splits)) == SIZES[domain.name]
        for split in splits:
            assert split.x.shape == (len(split), 3, 32, 32)
            assert (split.x.dtype, split.y.dtype) == (torch.uint8, torch.int64)
            assert split.x.is_contiguous()
        clients, samples = source.allocation[domain.name]
        assert clients * samples <= len(domain.train)


def test_classes_are_balanced_and_shuffled(tensors: dict[str, Tensor]) -> None:
    for name, y in tensors.items():
        if not name.endswith("/y"):
            continue
        counts = torch.bincount(y, minlength=10)
        spread = 10 if name == "uci/validation/y" else 0  # it takes what the scans have left
        assert counts.max() - counts.min() <= spread, name
        assert len(set(y[:100].tolist())) == 10, name


def test_no_image_occurs_twice_in_a_domain(source: Source) -> None:
    for domain in source.domains:
        images = [
            image.numpy().tobytes() for split in (domain.train, domain.validation, domain.test) for image in split.x
        ]
        assert len(set(images)) == len(images), domain.name


def test_mnist_images_come_from_their_half_only(source: Source) -> None:
    digits, labels = digits_lite._mnist()
    one, other = digits_lite.mnist_halves(labels)
    assert sorted([*one, *other]) == list(range(5000))
    allowed = {(digits[row].tobytes(), int(labels[row])) for row in one}
    domain = source.domains[0]
    for split in (domain.train, domain.validation, domain.test):
        assert {(x[0].numpy().tobytes(), int(y)) for x, y in zip(split.x, split.y, strict=True)} <= allowed


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_blended_digits_come_from_the_other_half(tensors: dict[str, Tensor], places: Places, split: str) -> None:
    digits, labels = digits_lite._mnist()
    mine, photos = np.zeros(5000, bool), digits_lite._photos()
    mine[digits_lite.mnist_halves(labels)[1]] = True
    checked = 0
    for x, y in zip(tensors[f"mnist-m/{split}/x"], tensors[f"mnist-m/{split}/y"], strict=True):
        spots = places[top_row(x)]
        if len(spots) > 1:
            continue
        ((photo, row, column),) = spots
        crop = photos[photo, row : row + 32, column : column + 32].transpose(2, 0, 1).astype(np.int16)
        rows = np.flatnonzero(labels == int(y))
        same = (np.abs(crop[0] - digits[rows]) == x[0].numpy()).all((1, 2))
        assert same.sum() == 1
        assert mine[rows[same]].all()
        checked += 1
        if checked == 40:
            return
    pytest.fail("too few backgrounds could be located")


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_backgrounds_keep_to_their_side_of_the_photographs(
    tensors: dict[str, Tensor], places: Places, split: str
) -> None:
    first, end = digits_lite.TEST_COLUMNS
    for image in tensors[f"mnist-m/{split}/x"]:
        columns = [column for _, _, column in places[top_row(image)]]
        if split == "test":
            assert any(first <= column and column + 32 <= end for column in columns)
        else:
            assert any(column + 32 <= first or column >= end for column in columns)


def test_there_are_enough_textured_crops() -> None:
    photos, rng = digits_lite._photos(), digits_lite._generator("test")
    for held_out in (False, True):
        crops = digits_lite.random_crops(photos, 300, held_out, rng)
        assert crops.shape == (300, 3, 32, 32)
        assert crops.mean(1).std((1, 2)).min() >= digits_lite.MIN_TEXTURE - 1e-6


def test_fonts_of_test_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not set(digits_lite.FONTS) & set(digits_lite.TEST_FONTS)
    used: list[tuple[int, set[str]]] = []
    render = digits_lite._render

    def spy(digits: digits_lite.Ints, fonts: tuple[str, ...], rng: np.random.Generator) -> digits_lite.Bytes:
        used.append((len(digits), set(fonts)))
        return render(digits[:1], fonts, rng).repeat(len(digits), 0)

    monkeypatch.setattr(digits_lite, "_render", spy)
    digits_lite.build()
    train, test = set(digits_lite.FONTS), set(digits_lite.TEST_FONTS)
    assert used == [(1000, train), (400, train), (800, test)]


def test_every_font_draws_ten_different_digits() -> None:
    for name in (*digits_lite.FONTS, *digits_lite.TEST_FONTS):
        face = digits_lite._face(name)
        glyphs = {bytes(face.getmask(str(digit))) for digit in range(10)}
        assert len(glyphs) == 10 and all(any(glyph) for glyph in glyphs), name
        assert bytes(face.getmask("0")) != bytes(face.getmask("\uffff")), name


def test_digits_stand_out_from_their_background() -> None:
    colours = digits_lite._colours(2000, digits_lite._generator("test"))[..., 0, 0]
    light = colours @ np.array([0.3, 0.6, 0.1])
    assert np.abs(light[:, :1] - light[:, 1:]).min() >= digits_lite.MIN_CONTRAST - 1e-6


def test_a_second_build_is_the_same(tensors: dict[str, Tensor]) -> None:
    assert digits_lite.checksum(digits_lite.build()) == digits_lite.checksum(tensors)


@pytest.mark.skipif(bool(FOREIGN), reason=f"frozen with {digits_lite.FROZEN_WITH}, but here: {FOREIGN}")
def test_content_is_frozen(tensors: dict[str, Tensor], source: Source) -> None:
    assert digits_lite.is_frozen(tensors)
    assert digits_lite.is_frozen(source)
    changed = dict(tensors) | {"syn/test/y": tensors["syn/test/y"].flip(0)}
    assert not digits_lite.is_frozen(changed)


def test_contact_sheet(source: Source, tmp_path: Path) -> None:
    contact_sheet(source, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 20 * 64 and sheet.height > 4 * 64
        corner = source.domains[0].train.x[(source.domains[0].train.y == 0).nonzero()[0, 0]][:, 0, 0]
        assert sheet.getpixel((120, 4)) == tuple(corner.tolist())


def test_contact_sheet_of_wide_grey_images_with_missing_samples(tmp_path: Path) -> None:
    few = Split(torch.full((3, 1, 10, 20), 90, dtype=torch.uint8), torch.tensor([0, 0, 2]))
    domain = Domain("wide", few, few, few, real=True, about="")
    contact_sheet(Source("wide", (domain,), ("a", "b", "c"), {}), tmp_path / "sheet.png", columns=6)
    with Image.open(tmp_path / "sheet.png") as sheet:
        centres = [sheet.getpixel((120 + 132 * column + 60, 30)) for column in range(6)]
    assert centres == [(90,) * 3, (255,) * 3, (90,) * 3, (90,) * 3, (255,) * 3, (255,) * 3]


# --- the cache ---


@pytest.fixture
def builds(tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An empty cache, and a quick stand-in for build whose calls are counted."""
    calls: list[int] = []

    def build() -> dict[str, Tensor]:
        calls.append(1)
        return tensors

    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digits_lite, "build", build)
    return calls


def content(source: Source) -> str:
    return digits_lite.checksum(digits_lite.as_tensors(source))


def test_cache_round_trip(builds: list[int], source: Source, tmp_path: Path) -> None:
    first, second = digits_lite.load(), digits_lite.load()
    assert len(builds) == 1
    assert content(first) == content(second) == content(source)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["digits-lite-v1.safetensors"]
    assert second.domains[0].train.x.is_contiguous()


@pytest.mark.parametrize("damage", ["empty", "header", "truncated", "flipped", "foreign", "recipe"])
def test_bad_cache_is_rebuilt(builds: list[int], source: Source, tmp_path: Path, damage: str) -> None:
    digits_lite.load()
    path = tmp_path / "cache" / "digits-lite-v1.safetensors"
    good = path.read_bytes()
    middle = len(good) // 2
    if damage == "recipe":
        save_tensors(path, {"mnist/train/x": torch.zeros(1)}, recipe="an older recipe")
    else:
        path.write_bytes(
            {
                "empty": b"",
                "header": good[:100],
                "truncated": good[:-1],
                "foreign": b"PNG" * 999,
                "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            }[damage]
        )
    assert content(digits_lite.load()) == content(source)
    assert content(digits_lite.load()) == content(source)
    assert len(builds) == 2  # the first load above put a good file back, the second one used it


def test_unwritable_cache_only_costs_time(
    builds: list[int], source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path / "file" / "cache"))
    assert content(digits_lite.load()) == content(source)
    assert content(digits_lite.load()) == content(source)
    assert len(builds) == 2


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHPRO_CACHE", "/somewhere")
    assert digits_lite.cache_folder() == Path("/somewhere")
    monkeypatch.delenv("FEDHPRO_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert digits_lite.cache_folder() == Path("/home/someone/.cache/fedhpro")
