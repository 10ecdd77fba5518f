"""A matplotlib figure that a notebook shows as it is, without pyplot."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class Picture(Figure):
    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=130)
        return buffer.getvalue()
