"""Every dataset of the paper, in one table: what it is, how it is cut and trained on, and where a copy can be had.

Nothing here reads or fetches anything. `store` keeps the arrays, `importers` reads files, `hub` fetches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import DataError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
RENDERED = "syn*"  # SYN where no copy is given: rendered, and marked as such wherever it is named


@dataclass(frozen=True)
class Hub:
    """A copy on the Hugging Face Hub."""

    id: str
    inputs: str = "image"  # the column of the images or texts
    label: str = "label"
    train: str = "train"
    test: str = "test"
    config: str | None = None
    # a commit: the same bytes for everybody. "main" where no commit could be verified: the newest there is
    revision: str = "main"
    # where these are given, the splits of the copy are not used: all are put together and cut again, with
    pooled: tuple[str, ...] = ()
    key: str | None = None  # the column that tells one sample from another: one that is there twice is taken once
    group: str | None = None  # and the column of what must not be cut apart


@dataclass(frozen=True)
class Part:
    """A domain of a dataset."""

    name: str
    about: str
    clients: int = 10  # in scenario "domains"
    samples: int | float = 0.1  # of each of them: a number, or a share of the training part
    hub: Hub | None = None
    original: str = ""  # the files to import where they are wanted


@dataclass(frozen=True)
class Dataset:
    name: str
    title: str
    classes: tuple[str, ...]  # empty: their names come with the copy
    num_classes: int
    parts: tuple[Part, ...]
    counts: tuple[int, int]  # samples to train and to test on in the whole dataset
    kind: Literal["image", "text"] = "image"
    size: tuple[int, int] = (32, 32)  # height and width that images are kept at
    varied: bool = False  # whether the originals come in many sizes
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    crop: int = 4
    flip: bool = True
    complete: bool = False  # in scenario "domains", every client gets at least one sample of each class
    cut: Literal["stratified", "mod10"] = "stratified"  # how a copy without a test part is cut
    test_share: float = 0.2  # of it
    validation_share: float = 0.1  # of the training part, where settings are chosen on a validation part
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of classes
    defaults: Mapping[str, Any] = field(default_factory=dict)  # keys of a run that differ from those of digits-lite

    def label_of(self, name: str) -> int | None:
        """The class that a folder, a column or a copy means by this name: the name, another one, or one around it
        ("coffee-mug" is mug).
        """
        wanted = plain(self.aliases.get(name, name))
        known = [plain(each) for each in self.classes]
        if wanted in known:
            return known.index(wanted)
        inside = [label for label, each in enumerate(known) if len(each) > 2 and each in wanted]
        return inside[0] if len(inside) == 1 else None

    @property
    def fetched(self) -> bool:
        """Whether all of it can be had from the hub (or rendered)."""
        return all(part.hub or part.name == "syn" for part in self.parts)


def plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def canonical(name: str) -> str:
    """The name in this table that is meant: Office_Caltech is office-caltech, CIFAR-10 is cifar10."""
    return next((known for known in CATALOG if plain(known) == plain(name)), name)


def find(name: str) -> Dataset:
    if (known := canonical(name)) in CATALOG:
        return CATALOG[known]
    raise DataError(f"there is no dataset {name!r} to fetch or import: choose one of {', '.join(CATALOG)}")


def _one(name: str, about: str, hub: Hub | None, original: str) -> tuple[Part, ...]:
    return (Part(name, about, hub=hub, original=original),)


DIGITS = tuple("0123456789")
LABEL_SKEW = {"scenario": "nid1", "clients": 10, "alpha": 0.5, "batch_size": 64, "lr": 0.01}
TEXTS = {"model": "textcnn", "optimizer": "adam", "lr": 0.01, "batch_size": 64, "scenario": "ag-nid", "clients": 10}
TEXTS["weight_decay"] = 0.0  # with Adam any decay unlearns, at full speed, the words that a client lacks (docs/text.md)

# Ids, configs, columns and splits were read in public code that loads these copies, and the revisions where one is
# given; nothing could be fetched where this table was written. Not verified: the revisions that say "main".
_TABLE = (
    Dataset(
        "cifar10",
        "CIFAR-10",
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        10,
        _one(
            "cifar10",
            "photographs of ten kinds of things, 32x32",
            Hub("uoft-cs/cifar10", "img", revision="0b2714987fa478483af9968de7c934580d0bb9a2"),
            "cifar-10-python.tar.gz or cifar-10-binary.tar.gz, or what is in it",
        ),
        (50_000, 10_000),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        defaults=LABEL_SKEW,
    ),
    Dataset(
        "cifar100",
        "CIFAR-100",
        (),
        100,
        _one(
            "cifar100",
            "photographs of a hundred kinds of things (the fine labels), 32x32",
            Hub("uoft-cs/cifar100", "img", "fine_label", revision="aadb3af77e9048adbea6b47c21a81e47dd092ae5"),
            "cifar-100-python.tar.gz or cifar-100-binary.tar.gz, or what is in it",
        ),
        (50_000, 10_000),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        defaults=LABEL_SKEW,
    ),
    Dataset(
        "tinyimagenet",
        "TinyImageNet",
        (),
        200,
        _one(
            "tinyimagenet",
            "photographs of two hundred kinds of things, 64x64; the official validation part is the test part",
            Hub("zh-plus/tiny-imagenet", test="valid"),
            "tiny-imagenet-200.zip, or what is in it",
        ),
        (100_000, 10_000),
        size=(64, 64),
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        crop=8,
        defaults=LABEL_SKEW | {"model": "mobilenetv2", "width": None, "dim": 512, "augment": "auto"},
    ),
    Dataset(
        "ham10000",
        "HAM10000",
        ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc"),
        7,
        _one(
            "ham10000",
            "dermatoscopic photographs of skin lesions, resized to 128x96; no lesion is in train and in test",
            # of this copy's own test images, most are in its training part too: hence pooled, and cut by lesion
            Hub(
                "marmal88/skin_cancer",
                label="dx",
                pooled=("train", "validation", "test"),
                key="image_id",
                group="lesion_id",
            ),
            "a folder with HAM10000_metadata.csv and the images",
        ),
        (8_912, 1_103),
        size=(96, 128),  # the shape of the originals, 600x450
        mean=(0.7629, 0.5460, 0.5707),  # of our training part
        std=(0.1406, 0.1513, 0.1678),
        crop=8,
        test_share=1_103 / 10_015,
        aliases={
            "actinic_keratoses": "akiec",
            "basal_cell_carcinoma": "bcc",
            "benign_keratosis-like_lesions": "bkl",
            "dermatofibroma": "df",
            "melanoma": "mel",
            "melanocytic_Nevi": "nv",
            "vascular_lesions": "vasc",
        },
        defaults=LABEL_SKEW | {"stem": "7x7"},
    ),
    Dataset(
        "digits",
        "Digits",
        DIGITS,
        10,
        (
            Part(
                "mnist",
                "MNIST: handwritten digits, resized to 32x32",
                3,
                600,
                Hub("ylecun/mnist", revision="77f3279092a1c1579b2250db8eafed0ad422088c"),
                "train-images-idx3-ubyte.gz and its three sisters",
            ),
            Part(
                "usps",
                "USPS: digits from envelopes, resized to 32x32",
                7,
                72,
                Hub("flwrlabs/usps"),
                "usps.bz2 and usps.t.bz2",
            ),
            Part(
                "svhn",
                "SVHN: house numbers in street photographs, 32x32",
                6,
                732,  # 1 % of all 73,257, also where a copy has fewer
                Hub(
                    "ufldl-stanford/svhn",
                    config="cropped_digits",
                    revision="f9e1717d73324ebbc1ece84267ccd80d0aca0690",
                ),
                "train_32x32.mat and test_32x32.mat",
            ),
            Part(
                "syn",
                "Synthetic Digits, resized to 32x32",
                4,
                0.01,
                original="a folder of class folders, in train/ and test/ or val/; rendered, and called SYN*, without",
            ),
        ),
        (150_548, 40_039),
        flip=False,
        validation_share=0.15,
        defaults={"batch_size": 64, "lr": 0.01},
    ),
    Dataset(
        "office-caltech",
        "Office-Caltech",
        ("backpack", "bike", "calculator", "headphones", "keyboard", "laptop", "monitor", "mouse", "mug", "projector"),
        10,
        tuple(
            Part(name, f"{about}, resized to 32x32", clients, 0.2, original=f"the folder {name} of class folders")
            for name, about, clients in (
                ("caltech", "pictures of Caltech-256", 3),
                ("webcam", "photographs of a web camera", 1),
                ("amazon", "product pictures of a shop", 2),
                ("dslr", "photographs of a good camera", 4),
            )
        ),
        (2_031, 502),
        varied=True,
        complete=True,
        cut="mod10",
        validation_share=0.15,
        defaults={"batch_size": 64, "lr": 0.01},
    ),
    Dataset(
        "ag-news",
        "AG News",
        ("World", "Sports", "Business", "Sci/Tech"),
        4,
        _one(
            "ag-news",
            "AG News: titles and descriptions of news articles",
            Hub("fancyzhx/ag_news", "text", revision="eb185aade064a813bc0b7f42de02595523103ca4"),
            "train.csv and test.csv",
        ),
        (120_000, 7_600),
        kind="text",
        crop=0,
        flip=False,
        validation_share=0.05,
        defaults=TEXTS,
    ),
    Dataset(
        "sun397",
        "SUN397",
        (),
        397,
        _one(
            "sun397",
            "photographs of 397 kinds of places, resized to 128x128",
            # the first of the ten published cuts: 50 images of each class to train and 50 to test on
            Hub("tanganke/sun397", revision="9c4afd6174afa3974f209a0ef099dbbe244dfd27"),
            "SUN397.tar.gz, or a folder of class folders",
        ),
        (19_850, 19_850),
        size=(128, 128),
        varied=True,
        crop=8,
        defaults=LABEL_SKEW | {"clients": 100, "participation": 0.2, "stem": "7x7", "min_samples": 1},
    ),
)
CATALOG: dict[str, Dataset] = {dataset.name: dataset for dataset in _TABLE}
