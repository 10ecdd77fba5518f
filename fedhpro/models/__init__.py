"""Models split into features and a linear classifier, built by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch

from .base import STEMS, Dropout, Net, Spec
from .cnn import CNN
from .googlenet import GoogLeNet
from .mobilenet import MobileNetV2
from .resnet import resnet10, resnet18, resnet34, resnet50, resnet101
from .textcnn import TextCNN

__all__ = ["GROUPS", "GROUP_DIM", "MODELS", "STEMS", "Dropout", "Net", "Spec", "build"]

MODELS: dict[str, Callable[[Spec], Net]] = {
    "resnet10": resnet10,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet101": resnet101,
    "cnn": CNN,
    "mobilenetv2": MobileNetV2,
    "googlenet": GoogLeNet,
    "textcnn": TextCNN,
}
# Mixed federations of the paper: client k has network k mod X. Their features are averaged to one width.
GROUPS: dict[str, tuple[str, ...]] = {
    "htfe2": ("cnn", "resnet18"),
    "htfe3": ("resnet10", "resnet18", "resnet34"),
    "htfe5": ("googlenet", "resnet10", "resnet18", "resnet34", "resnet50"),
    "htfe8": ("cnn", "googlenet", "mobilenetv2", "resnet10", "resnet18", "resnet34", "resnet50", "resnet101"),
}
GROUP_DIM = 512
FIXED_WIDTH = {"cnn", "mobilenetv2", "googlenet"}


def build(
    name: str,
    num_classes: int,
    *,
    width: int | None = None,
    dim: int | None = None,
    pool_to: int | None = None,
    stem: str = "3x3",
    channels: int = 3,
    image_size: int = 32,
    vocab: int | None = None,
    seed: int = 0,
) -> Net:
    """The named model, initialised from `seed` alone; the global RNG is left as it was.

    width: base filters of a ResNet (64), embedding size of the textcnn (32); the other models have a fixed one.
    pool_to: average the backbone's feature vector to this width (a mixed federation's common one).
    dim: width of the features; where it differs from what comes out so far, a linear projection follows.
    stem: "3x3" (stride 1, for 32x32 images), "3x3/2" (stride 2: four times cheaper) or "7x7" (ImageNet).
    channels, image_size (cnn), vocab (textcnn): the shape of the data, ignored by models that do not ask for it.
    """
    if name not in MODELS:
        closest = difflib.get_close_matches(name, MODELS, n=1, cutoff=0)[0]
        raise ValueError(f"unknown model {name!r}: did you mean {closest!r}?")
    if width is not None and name in FIXED_WIDTH:
        raise ValueError(f"{name} has a fixed width: leave width out")
    spec = Spec(num_classes, width, dim, pool_to, stem, channels, image_size, vocab)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs as well
        return MODELS[name](spec)
