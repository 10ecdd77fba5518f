"""A matplotlib figure that a notebook shows as it is, without pyplot, and that writes any letters it has a font for.

Names of classes and sites are the user's. matplotlib's own font has Latin, Greek, Cyrillic, Arabic and Hebrew letters;
for others it takes the fonts of the system that are named below. Letters that none has are boxes, and said once.
"""

from __future__ import annotations

import functools
import io
import logging
import re
import warnings

from matplotlib.figure import Figure
from matplotlib.text import Text

log = logging.getLogger("fedhpro")
SCRIPTS = re.compile(r"CJK|Gothic|Ming|Song|Hei|PingFang|Hiragino|Malgun|Nanum|Devanagari|Thai|Unifont|Unicode MS")
SAID: set[str] = set()  # letters that were boxes in a picture before


class Picture(Figure):
    def png(self, dpi: int = 130) -> bytes:
        buffer = io.BytesIO()
        if more := other_fonts():
            for text in self.findobj(Text):
                text.set_fontfamily(list(dict.fromkeys([*text.get_fontfamily(), *more])))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.savefig(buffer, format="png", dpi=dpi)
        for warning in caught:
            if found := re.match(r"Glyph (\d+) ", str(warning.message)):
                _say(chr(int(found[1])))
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return buffer.getvalue()

    _repr_png_ = png


def _say(letter: str) -> None:
    if not SAID:
        log.warning("no font of this machine has the letter %s: it is a box in pictures, as others may be", letter)
    SAID.add(letter)


@functools.cache
def other_fonts() -> list[str]:
    from matplotlib.font_manager import fontManager

    return sorted({font.name for font in fontManager.ttflist if SCRIPTS.search(font.name)})[:8]
