"""A contact sheet: a row of training images for each domain, its classes in turn."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ..data.sources import Source
from ..files import write_atomically

HEIGHT = 64  # of an image on the sheet; smaller ones are enlarged without smoothing
GAP = 4


def contact_sheet(source: Source, path: Path, columns: int = 20) -> None:
    """A PNG, whatever size and proportions the images have; a class without samples leaves its place empty."""
    channels, height, width = source.shape
    cell = max(1, round(HEIGHT * width / height))
    font = ImageFont.load_default(20)
    margin = max(120, round(max(font.getlength(domain.name) for domain in source.domains)) + 20)
    size = (margin + columns * (cell + GAP) + GAP, len(source.domains) * (HEIGHT + GAP) + GAP)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for row, domain in enumerate(source.domains):
        top, (x, y) = GAP + row * (HEIGHT + GAP), (domain.train.x, domain.train.y)
        draw.text((margin - 14, top + HEIGHT / 2), domain.name, "black", font, anchor="rm")
        for column in range(columns):
            turn, c = divmod(column, source.num_classes)
            members = (y == c).nonzero()[:, 0]
            if turn >= len(members):
                continue
            pixels = x[members[turn]].permute(1, 2, 0).numpy()
            image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0]).convert("RGB")
            way = Image.Resampling.NEAREST if height <= HEIGHT else Image.Resampling.LANCZOS
            sheet.paste(image.resize((cell, HEIGHT), way), (margin + column * (cell + GAP), top))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    write_atomically(path, buffer.getvalue())
