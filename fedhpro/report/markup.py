"""HTML and SVG that escape by themselves: whatever is not markup already becomes text."""

from __future__ import annotations

from html import escape
from typing import Any


class Markup(str):
    """Text that is HTML and stays as it is."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. `class_` is class, data_run is data-run; an attribute that is None is left out, True has no value."""
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    inside = join(*children)
    return Markup(f"<{name}{written}/>" if not inside and name in EMPTY else f"<{name}{written}>{inside}</{name}>")


def join(*children: Any) -> Markup:
    return Markup("".join(child if isinstance(child, Markup) else escape(str(child)) for child in children))


EMPTY = {"circle", "img", "line", "meta", "path", "rect", "br"}


def _attribute(key: str, value: Any) -> str:
    if isinstance(value, float):
        value = f"{value:.2f}".rstrip("0").rstrip(".")
    key = KEPT.get(key, key.rstrip("_").replace("_", "-"))
    return f" {key}" if value is True else f' {key}="{escape(str(value))}"'


KEPT = {"viewBox": "viewBox"}


def table(header: list[Any], rows: list[list[Any]], marks: list[dict[str, Any]] | None = None) -> Markup:
    """A table that scrolls sideways where it is too wide. The first column names the row; `marks` are for its rows."""
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]), **(marks[i] if marks else {}))
        for i, row in enumerate(rows)
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide", tabindex=0)
