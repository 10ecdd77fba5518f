"""Batches: an epoch is one pass, and a batch is its samples, moved and flipped as told, normalised."""

import hashlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhpro.data.autoaugment import autoaugment
from fedhpro.data.batches import Transform, epoch

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
PIXELS = Transform((0.0,) * 3, (1 / 255,) * 3)  # its plain() gives the bytes back


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def images(n=6, height=5, width=7, seed=1):
    return torch.randint(0, 256, (n, 3, height, width), generator=rng(seed), dtype=torch.uint8)


def augmented(x, index, seed=0, **options):
    """The augmented batch as bytes."""
    transform = Transform(PIXELS.mean, PIXELS.std, **options)
    return transform.batch(x, index, rng(seed)).round().to(torch.uint8)


def windows(x, crop, flips):
    """Every crop (and flip) of one image, with its (top, left, flipped)."""
    padded, (height, width) = F.pad(x, [crop] * 4), x.shape[1:]
    for top in range(2 * crop + 1):
        for left in range(2 * crop + 1):
            window = padded[:, top : top + height, left : left + width]
            for flipped in (False, True) if flips else (False,):
                yield (top, left, flipped), window.flip(2) if flipped else window


def moves(x, result, crop, flips=False):
    """How an image was moved, found by trying everything."""
    return [move for move, window in windows(x, crop, flips) if torch.equal(window, result)]


# epoch


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 80), st.integers(2, 20), st.integers(0, 2**32))
def test_epoch_is_one_pass_in_batches_of_at_least_two(n, batch_size, seed):
    batches = list(epoch(n, batch_size, rng(seed)))
    assert sorted(torch.cat(batches).tolist()) == list(range(n))
    assert all(2 <= len(batch) <= batch_size + 1 for batch in batches)
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_epoch_of_a_single_sample_doubles_it():
    assert [batch.tolist() for batch in epoch(1, 16, rng())] == [[0, 0]]


def test_epoch_of_nothing_has_no_batches():
    assert list(epoch(0, 16, rng())) == []


def test_epoch_depends_on_its_generator():
    def order(seed):
        return torch.cat(list(epoch(50, 8, rng(seed)))).tolist()

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != list(range(50))


# without augmentation


def test_plain_normalises():
    x = images()
    expected = (x.double() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    result = Transform(MEAN, STD).plain(x)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"augment": "off", "crop": 3, "flip": True}, {"crop": 0, "flip": False}])
def test_batch_without_augmentation_is_plain(options):
    transform, x, index = Transform(MEAN, STD, **options), images(), torch.tensor([4, 0, 4])
    assert torch.equal(transform.batch(x, index, rng()), transform.plain(x[index]))


@pytest.mark.parametrize("augment", ["sample", "batch", "auto", "off"])
def test_token_ids_pass_through(augment):
    transform, tokens = Transform(MEAN, STD, crop=2, flip=True, augment=augment), torch.arange(20).reshape(4, 5)
    result = transform.batch(tokens, torch.tensor([3, 1]), rng())
    assert result.dtype == torch.int64
    assert torch.equal(result, tokens[[3, 1]])
    assert torch.equal(transform.plain(tokens), tokens)


# with augmentation


def test_crop_gives_windows_of_the_padded_image():
    x, index = images(), torch.tensor([5, 0, 3, 3] * 100)
    found = [moves(x[i], result, crop=2) for i, result in zip(index, augmented(x, index, crop=2), strict=True)]
    assert all(len(move) == 1 for move in found)
    assert {move[0][:2] for move in found} == {(top, left) for top in range(5) for left in range(5)}  # all 25 come up


def test_crop_and_flip_together():
    x, index = images(), torch.arange(6).repeat(5)
    for i, result in zip(index, augmented(x, index, crop=1, flip=True), strict=True):
        assert len(moves(x[i], result, crop=1, flips=True)) == 1


def test_flips_happen_half_of_the_time():
    x = images(1)
    results = augmented(x, torch.zeros(2000, dtype=torch.int64), flip=True)
    flipped = (results == x.flip(3)).flatten(1).all(1)
    assert torch.equal(~flipped, (results == x).flatten(1).all(1))
    assert 850 < int(flipped.sum()) < 1150  # 6.7 standard deviations


def test_augmenting_by_batch_moves_all_samples_alike():
    x, index = images(), torch.arange(6)
    seen = set()
    for seed in range(12):
        batch = augmented(x, index, seed, crop=2, flip=True, augment="batch")
        (move,) = {moves(image, result, 2, flips=True)[0] for image, result in zip(x, batch, strict=True)}
        seen.add(move)
    assert len(seen) > 6
    assert {flipped for _, _, flipped in seen} == {False, True}


def test_augmenting_by_sample_moves_them_apart():
    x = images(1)
    batch = augmented(x, torch.zeros(20, dtype=torch.int64), crop=2)
    assert len({moves(x[0], result, 2)[0] for result in batch}) > 6


@pytest.mark.parametrize("augment", ["sample", "batch", "auto", "off"])
@pytest.mark.parametrize("crop,flip", [(0, True), (2, False), (2, True)])
def test_batches_are_contiguous_and_depend_on_the_generator_alone(augment, crop, flip):
    transform, x, index = Transform(MEAN, STD, crop, flip, augment), images(), torch.tensor([1, 5, 2])
    before = x.clone()
    batch = transform.batch(x, index, rng(3))
    assert batch.shape == (3, 3, 5, 7)
    assert batch.is_contiguous()
    assert torch.equal(batch, transform.batch(x, index, rng(3)))
    assert torch.equal(x, before)
    if augment != "off":
        assert any(not torch.equal(batch, transform.batch(x, index, rng(seed))) for seed in range(4, 12))


@pytest.mark.parametrize(
    "augment, crop, flip, content, following",
    [
        ("sample", 2, False, "04d7e25784178469", 0.803541898727417),
        ("sample", 0, True, "caea448d4aebfa4a", 0.924839437007904),
        ("sample", 2, True, "a1774cf1664483a1", 0.4424576163291931),
        ("batch", 2, False, "149d53e46de3b2ab", 0.5839434266090393),
        ("batch", 0, True, "6dc61b315fb2c8db", 0.985661506652832),
        ("batch", 2, True, "43821809602b0fdf", 0.5830848813056946),
    ],
)
def test_augmentation_is_what_it_has_always_been(augment, crop, flip, content, following):
    """Golden, from the first version: other batches, or a generator left elsewhere, would change metrics of runs."""
    transform, source = Transform(PIXELS.mean, PIXELS.std, crop, flip, augment), rng(11)
    x = torch.arange(6 * 3 * 5 * 7).mul(37).remainder(251).to(torch.uint8).view(6, 3, 5, 7)
    batches = [transform.batch(x, torch.tensor(index), source) for index in ([0, 1, 2, 3, 4, 5], [5, 5, 0])]
    pixels = torch.cat(batches).round().to(torch.uint8)
    assert hashlib.sha256(pixels.numpy().tobytes()).hexdigest()[:16] == content
    assert torch.rand(1, generator=source).item() == following


@pytest.mark.parametrize("augment", ["sample", "batch", "auto", "off"])
def test_a_file_mapped_into_memory_is_read_and_never_written(augment, tmp_path):
    x, index = images(8, 12, 12), torch.tensor([7, 0, 3])
    np.save(tmp_path / "x.npy", x.numpy())
    content = (tmp_path / "x.npy").read_bytes()
    mapped = np.load(tmp_path / "x.npy", mmap_mode="c")  # a private mapping: torch warns of one that is read-only
    transform, stored = Transform(MEAN, STD, 2, True, augment), torch.from_numpy(mapped)
    assert torch.equal(transform.batch(stored, index, rng(5)), transform.batch(x, index, rng(5)))
    assert torch.equal(stored, x)
    del stored, mapped
    assert (tmp_path / "x.npy").read_bytes() == content


def test_auto_is_crop_and_flip_and_then_autoaugment():
    x, index = images(40, 16, 16), torch.arange(40)
    moved, source = Transform(PIXELS.mean, PIXELS.std, 2, True), rng(9)
    expected = autoaugment(moved.batch(x, index, source).round().to(torch.uint8), "cifar", source)
    assert torch.equal(augmented(x, index, 9, crop=2, flip=True, augment="auto", policy="cifar"), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("augment", ["sample", "batch", "auto"])
@pytest.mark.parametrize("policy", ["cifar", "imagenet"])
def test_a_gpu_gives_the_same_pixels(augment, policy):
    x, index = images(300, 64, 64), torch.randperm(300, generator=rng(1))
    transform = Transform(PIXELS.mean, PIXELS.std, 4, True, augment, policy)
    here, there = transform.batch(x, index, rng(2)), transform.batch(x.cuda(), index.cuda(), rng(2))
    assert torch.equal(here.round(), there.cpu().round())


@pytest.mark.parametrize("augment", ["sample", "batch", "auto", "off"])
@pytest.mark.parametrize("policy", ["cifar", "imagenet"])
def test_batches_are_made_on_the_device_of_the_samples(augment, policy):
    """The meta device has shapes and no values: whatever mixed devices, or waited for a value, would fail on it."""
    x, index = images(300, 16, 16).to("meta"), torch.arange(300).to("meta")
    batch = Transform(MEAN, STD, 2, True, augment, policy).batch(x, index, rng())
    assert batch.device.type == "meta" and batch.shape == (300, 3, 16, 16) and batch.dtype == torch.float32
