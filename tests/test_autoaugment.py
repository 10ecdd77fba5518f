"""AutoAugment: every operation against Pillow's, the policies as published, and batches as images one by one."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from fedhpro.data.autoaugment import OPERATIONS, POLICIES, autoaugment

LEVELS = range(-9, 10)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(height=24, width=31):
    """Noise, a soft ramp, a dark one and a plain one."""
    noise = torch.randint(0, 256, (3, height, width), generator=rng())
    ramp = torch.arange(height)[:, None] * 3 + torch.arange(width) * 4
    ramps = [torch.stack([ramp + 20, 255 - ramp, ramp // 2]).clamp(0, 255), torch.stack([ramp // 3 + 10] * 3)]
    return torch.stack([noise, *ramps, torch.full((3, height, width), 77)]).to(torch.uint8)


def as_pillow(x):
    return Image.fromarray(x.permute(1, 2, 0).numpy())


def as_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def enhanced(enhancer):
    return lambda image, level: enhancer(image).enhance(1 + level / 10)


def affine(matrix):
    return lambda image, level: image.transform(image.size, Image.Transform.AFFINE, matrix(level, *image.size))


PILLOW = {
    "autocontrast": lambda image, level: ImageOps.autocontrast(image),
    "brightness": enhanced(ImageEnhance.Brightness),
    "color": enhanced(ImageEnhance.Color),
    "contrast": enhanced(ImageEnhance.Contrast),
    "equalize": lambda image, level: ImageOps.equalize(image),
    "invert": lambda image, level: ImageOps.invert(image),
    "posterize": lambda image, level: ImageOps.posterize(image, 8 - math.floor(abs(level) * 4 / 9 + 0.5)),
    "rotate": lambda image, level: image.rotate(30 * level / 9),
    "sharpness": enhanced(ImageEnhance.Sharpness),
    "shear_x": affine(lambda level, width, height: (1, 0.3 * level / 9, 0, 0, 1, 0)),
    "shear_y": affine(lambda level, width, height: (1, 0, 0, 0.3 * level / 9, 1, 0)),
    "solarize": lambda image, level: ImageOps.solarize(image, 255 - 255 * abs(level) / 9),
    "translate_x": affine(lambda level, width, height: (1, 0, int(150 / 331 * width * level / 9), 0, 1, 0)),
    "translate_y": affine(lambda level, width, height: (1, 0, 0, 0, 1, int(150 / 331 * height * level / 9))),
}
ROUNDED = ("autocontrast", "brightness", "color", "contrast", "sharpness")  # in floats there, where 1 may be lost


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_pillow(name):
    x = pictures()
    for level in LEVELS:
        found = OPERATIONS[name](x, [level] * len(x))
        expected = torch.stack([as_tensor(PILLOW[name](as_pillow(image), level)) for image in x])
        off = (found.int() - expected.int()).abs()
        assert found.dtype == torch.uint8 and found.shape == x.shape
        assert off.max() <= (name in ROUNDED), f"level {level}"
        assert (off > 0).float().mean() < 0.05


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_take_each_image_by_itself(name):
    x = pictures()[[0, 1, 2, 3, 1]]
    levels = [-9, 3, 5, 0, 8]
    alone = [OPERATIONS[name](x[i : i + 1], [level]) for i, level in enumerate(levels)]
    before = x.clone()
    assert torch.equal(OPERATIONS[name](x, levels), torch.cat(alone))
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("shape", [(1, 9, 9), (4, 6, 6), (3, 1, 1), (3, 2, 5)])
def test_operations_take_other_shapes(name, shape):
    x = torch.randint(0, 256, (3, *shape), generator=rng(2), dtype=torch.uint8)
    assert OPERATIONS[name](x, [9, -4, 0]).shape == x.shape


# how often each operation is in the published tables
COUNTS = {
    "cifar": "equalize 9, autocontrast 7, color 5, sharpness 5, translate_y 5, brightness 4, solarize 4, invert 3, "
    "contrast 2, shear_y 2, translate_x 2, posterize 1, rotate 1",
    "imagenet": "equalize 17, solarize 7, color 6, rotate 6, posterize 5, invert 3, autocontrast 2, contrast 2, "
    "sharpness 1, shear_x 1",
}


@pytest.mark.parametrize("name", POLICIES)
def test_the_policies_are_as_published(name):
    steps = [step for pair in POLICIES[name] for step in pair]
    assert len(steps) == 50
    assert all(
        operation in OPERATIONS and 0 <= chance <= 1 and level in range(10) for operation, chance, level in steps
    )
    counts = sorted(Counter(step[0] for step in steps).items(), key=lambda item: (-item[1], item[0]))
    assert ", ".join(f"{operation} {count}" for operation, count in counts) == COUNTS[name]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_image_gets_a_pair_of_the_policy(policy):
    """With one image at a time, what comes out is one of the pairs with none, one or both of its steps."""
    x = pictures()[1:2]
    possible = set()
    for pair in POLICIES[policy]:
        for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            for used in ((0, 0), (0, 1), (1, 0), (1, 1)):
                image = x
                for (name, _, level), sign, use in zip(pair, signs, used, strict=True):
                    image = OPERATIONS[name](image, [sign * level]) if use else image
                possible.add(image.numpy().tobytes())
    found = {image.numpy().tobytes() for image in autoaugment(x.expand(400, -1, -1, -1), policy, rng(1))}
    assert found <= possible
    assert len(found) > 25


def test_it_depends_on_the_generator_alone_and_leaves_its_input():
    x = pictures().repeat(20, 1, 1, 1)
    before = x.clone()
    assert torch.equal(autoaugment(x, "cifar", rng(3)), autoaugment(x, "cifar", rng(3)))
    assert not torch.equal(autoaugment(x, "cifar", rng(3)), autoaugment(x, "cifar", rng(4)))
    assert torch.equal(x, before)
    assert len(autoaugment(x[:0], "imagenet", rng())) == 0


def test_steps_happen_as_often_as_the_policy_says():
    """Inverting, equalising... of a plain grey image shows only where brightness changes: counted over many draws."""
    x = torch.full((4000, 3, 4, 4), 100, dtype=torch.uint8)
    changed = (autoaugment(x, "cifar", rng(5)) != x).flatten(1).any(1).float().mean()
    expected = 0.0
    for pair in POLICIES["cifar"]:
        stays = 1.0
        for name, chance, level in pair:
            alters = [bool((OPERATIONS[name](x[:1], [sign * level]) != x[:1]).any()) for sign in (1, -1)]
            stays *= 1 - chance * sum(alters) / 2
        expected += (1 - stays) / 25
    assert abs(float(changed) - expected) < 0.03
