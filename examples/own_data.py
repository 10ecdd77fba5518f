"""Your own pictures, from a folder to a prediction: python examples/own_data.py [NEW_FOLDER]

Two hospitals hold pictures of three findings and cannot share them. Here they are drawn; with pictures of your own,
`from_folder` is all that is needed. Everything is written under NEW_FOLDER (or a temporary one).
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw

import fedhpro
from fedhpro.data.own import from_folder
from fedhpro.use import Prediction, predict

FINDINGS = ("disc", "ring", "bar")
# pictures of each finding, and how bright the scanner's background is
HOSPITALS = {"north": ((20, 20, 20), 30), "south": ((30, 10, 20), 90)}


def draw(finding: str, grey: int, rng: random.Random) -> Image.Image:
    picture = Image.frombytes("L", (48, 48), rng.randbytes(48 * 48)).point(lambda value: grey + value // 8)
    x, y, size = rng.randint(10, 20), rng.randint(10, 20), rng.randint(14, 20)
    pen = ImageDraw.Draw(picture)
    if finding == "bar":
        pen.rectangle((x, y + size // 3, x + size, y + size // 2), fill=230)
    else:
        pen.ellipse((x, y, x + size, y + size), fill=230 if finding == "disc" else None, outline=230, width=4)
    return picture


def draw_all(folder: Path) -> None:
    """folder/HOSPITAL/FINDING/number.png"""
    rng = random.Random(0)
    for hospital, (counts, grey) in HOSPITALS.items():
        for finding, count in zip(FINDINGS, counts, strict=True):
            place = folder / hospital / finding
            place.mkdir(parents=True)
            for number in range(count):
                draw(finding, grey, rng).save(place / f"{number}.png")


def main(folder: Path) -> Prediction:
    draw_all(folder / "pictures")
    source = from_folder(folder / "pictures", size=32)
    for domain in source.domains:
        print(f"{domain.name}: {len(domain.train)} to train, {len(domain.test)} to test")

    short = {"rounds": 2, "local_epochs": 3, "batch_size": 8, "workers": 0}  # too short for the default, fedhpro-plus
    result = fedhpro.run(source=source, method="fedhpro", **short, out=str(folder / "run"))
    print("accuracy in per cent:", {name: round(value, 1) for name, value in result.accuracy.items()})

    (found,) = predict(result.folder, folder / "pictures" / "north" / "ring" / "0.png")
    print(f"{found.name}: {found.label} ({found.probability:.0%})")
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1 and Path(sys.argv[1]).exists():
        sys.exit(f"{sys.argv[1]} exists: name a new folder")
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
