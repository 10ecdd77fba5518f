"""Small SVG charts. Colours are classes (the page has them for light and dark); numbers for hovering travel along.

A series is told from the others by its colour and by its dashes, a class of a scatter plot by its colour and its shape:
both stay apart for who sees few colours, and on paper.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from .markup import Markup, join, tag

COLOURS = 8  # in style.css
DASHES = ("none", "7 3", "2 2.5", "9 3 2 3")
WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 34
TOO_LARGE = 1e30  # for an axis
MARKED = 40  # points of a line that still get a dot each

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    label: str
    look: int  # which colour and dashes
    points: list[Point]  # where one has no number the line breaks
    band: list[tuple[float, float, float]] = field(default_factory=list)  # x, lowest, highest
    group: int | None = None  # what the filter of the page shows and hides
    strong: bool = False


def dashes(look: int) -> str:
    return DASHES[(look + look // COLOURS) % len(DASHES)]


def swatch(look: int, strong: bool = False) -> Markup:
    """A piece of the line, for legends."""
    line = _stroke("M1 6H27", look, strong)
    return tag("svg", line, class_="swatch", viewBox="0 0 28 12", width=28, height=12, aria_hidden="true")


def legend(series: Sequence[Series]) -> Markup:
    return tag(
        "ul", *(tag("li", swatch(s.look, s.strong), s.label, data_group=s.group) for s in series), class_="legend"
    )


def line_chart(
    title: str, series: Sequence[Series], *, unit: str = "", x: str = "round", log: bool = False, key: bool = True
) -> Markup:
    """Lines over rounds; logarithmic only where the values allow and need it. Nothing where there is no value."""
    found = [(s, points, _pieces(s.band)) for s in series if (points := _pieces(s.points))]
    pieces = [piece for _, points, band in found for piece in (*points, *band)]
    xs, values = [x for piece in pieces for x, *_ in piece], [y for piece in pieces for _, *ys in piece for y in ys]
    if not values:
        return Markup("")
    log = log and min(values) > 0 and max(values) > 10 * min(values)
    ticks = _log_ticks(min(values), max(values)) if log else _ticks(min(values), max(values))
    low, high = (math.log10(end) if log else end for end in (min(*values, ticks[0]), max(*values, ticks[-1])))
    first, last = min(xs), max(xs)

    def across(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((value - first) / (last - first) if last > first else 0.5)

    def up(value: float) -> float:
        height = math.log10(value) if log else value
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ((height - low) / (high - low) if high > low else 0.5)

    drawn: list[Markup] = []
    for value in ticks:
        drawn.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=up(value), y2=up(value)))
        drawn.append(tag("text", f"{value:g} {unit}".rstrip(), x=LEFT - 7, y=up(value) + 4, text_anchor="end"))
    for value in _whole_ticks(first, last) or [tick for tick in _ticks(first, last) if first <= tick <= last]:
        drawn.append(tag("text", f"{value:g}", x=across(value), y=HEIGHT - BOTTOM + 17, text_anchor="middle"))
    drawn.append(tag("text", x, x=WIDTH - RIGHT, y=HEIGHT - 2, text_anchor="end", class_="faint"))
    numbers = []
    for s, points, band in found:
        parts = []
        for piece in band:
            edge = [(a, b) for a, b, _ in piece] + [(a, c) for a, _, c in reversed(piece)]
            outline = "M" + "L".join(f"{across(a):.1f} {up(b):.1f}" for a, b in edge) + "Z"
            parts.append(tag("path", d=outline, class_=f"band f{s.look % COLOURS}"))
        ways = ["M" + "L".join(f"{across(a):.1f} {up(b):.1f}" for a, b in piece) for piece in points if len(piece) > 1]
        parts += [_stroke("".join(ways), s.look, s.strong)] if ways else []
        whole = list(chain(*points))
        dots = whole if len(whole) <= MARKED else [piece[0] for piece in points if len(piece) == 1]
        r = 3.2 if s.strong else 2.4
        parts += [tag("circle", cx=across(a), cy=up(b), r=r, class_=f"f{s.look % COLOURS}") for a, b in dots]
        drawn.append(tag("g", *parts, data_group=s.group))
        numbers.append({"label": s.label, "look": s.look, "group": s.group, "points": whole})
    drawn.append(tag("line", class_="cursor", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM))
    hover = {
        "x": x,
        "unit": unit,
        "first": first,
        "last": last,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "series": numbers,
    }
    picture = _picture(title, drawn, WIDTH, HEIGHT, data_hover=json.dumps(hover))
    shown = [s for s, _, _ in found]
    return figure(title, picture, legend(shown) if key and (len(shown) > 1 or shown[0].label != title) else "")


def figure(title: Any, *inside: Any, **attributes: Any) -> Markup:
    return tag("figure", tag("figcaption", title), *inside, **attributes)


def bubbles(
    title: str, columns: Sequence[str], rows: Sequence[str], cells: Sequence[tuple[int, int, int, int, str]]
) -> Markup:
    """Bubbles (column, row, samples, look, words) whose area is the number of samples."""
    cell, left, bottom = (28 if len(columns) <= 34 else 18), _margin(rows, 13), 22
    wide, high = left + cell * len(columns) + 6, cell * len(rows) + bottom
    largest = max((n for _, _, n, _, _ in cells), default=1)
    drawn = [
        tag("line", class_="grid", x1=left, x2=wide - 6, y1=(r + 0.5) * cell, y2=(r + 0.5) * cell)
        for r in range(len(rows))
    ]
    drawn += [
        tag("text", short(name), x=left - 8, y=(r + 0.5) * cell + 4, text_anchor="end") for r, name in enumerate(rows)
    ]
    drawn += [
        tag("text", name, x=left + (c + 0.5) * cell, y=high - 7, text_anchor="middle") for c, name in enumerate(columns)
    ]
    for c, r, n, look, words in cells:
        radius = max(1.2, 0.47 * cell * math.sqrt(n / largest))
        drawn.append(
            tag(
                "circle",
                cx=left + (c + 0.5) * cell,
                cy=(r + 0.5) * cell,
                r=radius,
                class_=f"f{look % COLOURS}",
                data_tip=words,
            )
        )
    return figure(title, tag("div", _picture(title, drawn, wide, high, fixed=True), class_="wide", tabindex=0))


def matrix(
    title: Any, names: Sequence[str], counts: Sequence[Sequence[int]], *, look: int = 0, **attributes: Any
) -> Markup:
    """True classes down, predicted ones across; the shade is the share of the true class."""
    size, left, top = (30 if len(names) <= 12 else 20), _margin(names, 12), 20
    longest = max(len(short(name, 10)) for name in names) if names else 0
    wide, high = left + size * len(names) + 2, top + size * len(names) + 16 + 5 * longest
    drawn = [tag("text", "true ↓  predicted →", x=2, y=12, class_="faint")]
    for r, row in enumerate(counts):
        y = top + r * size
        drawn.append(tag("text", short(names[r], 12), x=left - 7, y=y + size / 2 + 4, text_anchor="end"))
        for c, n in enumerate(row):
            x, share = left + c * size, n / max(1, sum(row))
            box: dict[str, Any] = {"x": x, "y": y, "width": size - 1, "height": size - 1, "rx": 2}
            tip = f"{names[r]} taken for {names[c]}: {n:,} of {sum(row):,} ({share:.0%})"
            drawn.append(tag("rect", **box, class_="cell", data_tip=tip))
            if n:
                drawn.append(tag("rect", **box, class_=f"f{look % COLOURS} through", fill_opacity=0.08 + 0.92 * share))
            if n and size >= 30:
                words = f"{n}" if n < 10_000 else f"{n / 1000:.0f}k"
                ink = "through on-dark" if share > 0.55 else "through"
                middle = {"x": x + size / 2, "y": y + size / 2 + 4, "text_anchor": "middle"}
                drawn.append(tag("text", words, **middle, class_=ink))
    for c, name in enumerate(names):
        foot = left + (c + 0.6) * size, top + size * len(names) + 10
        turned = f"rotate(-45 {foot[0]:.0f} {foot[1]})"
        drawn.append(tag("text", short(name, 10), x=foot[0], y=foot[1], text_anchor="end", transform=turned))
    picture = _picture("confusion matrix", drawn, wide, high, fixed=True)
    return figure(title, tag("div", picture, class_="wide", tabindex=0), **attributes)


def scatter(
    title: Any,
    marks: Sequence[tuple[float, float, int, str, str]],
    labels: Sequence[tuple[float, float, str]] = (),
    **attributes: Any,
) -> Markup:
    """Marks (x, y, look, kind, words), kind one of sample, prototype, hyper; x and y from 0 to 1."""
    side, edge = 480, 14
    drawn = []

    def place(value: float) -> float:
        return edge + value * (side - 2 * edge)

    for x, y, look, kind, words in marks:
        drawn.append(_mark(place(x), place(1 - y), look, kind, words))
    for x, y, words in labels:
        inside = len(words) <= 2
        below, ink = (4, "on-dark through") if inside else (26, "halo through")
        drawn.append(tag("text", words, x=place(x), y=place(1 - y) + below, text_anchor="middle", class_=ink))
    return figure(title, _picture("t-SNE", drawn, side, side), **attributes)


def stacked_bars(title: str, rows: Sequence[tuple[str, int | None, dict[str, float]]], unit: str) -> Markup:
    """A bar of parts for each row (label, group, parts); bars share one scale."""
    names = list(dict.fromkeys(name for _, _, parts in rows for name in parts))
    largest = max((sum(parts.values()) for _, _, parts in rows), default=0) or 1
    drawn = []
    for label, group, parts in rows:
        pieces = [
            tag("i", class_=f"b{names.index(name) % COLOURS}", style=f"width:{100 * value / largest:.2f}%",
                data_tip=f"{name}: {value:,.1f} {unit} ({value / (sum(parts.values()) or 1):.0%})")
            for name, value in parts.items() if value > 0
        ]  # fmt: skip
        total = f"{sum(parts.values()):,.1f} {unit}"
        drawn.append(
            tag(
                "div",
                tag("span", label),
                tag("div", *pieces, class_="bar"),
                tag("b", total),
                class_="bar-row",
                data_group=group,
            )
        )
    key = tag(
        "ul",
        *(tag("li", tag("i", class_=f"dot b{i % COLOURS}"), name) for i, name in enumerate(names)),
        class_="legend",
    )
    return figure(title, *drawn, key, class_="bars")


def _margin(names: Sequence[str], letters: int) -> int:
    """The room that the names of rows need."""
    return 16 + 7 * max((len(short(name, letters)) for name in names), default=0)


def short(name: str, letters: int = 13) -> str:
    return name if len(name) <= letters else name[: letters - 1] + "…"


def _picture(
    title: str, drawn: Sequence[Markup], wide: float, high: float, fixed: bool = False, **attributes: Any
) -> Markup:
    """`fixed`: with its own size, to be scrolled; otherwise as wide as there is room."""
    size = {"width": wide, "height": high} if fixed else {}
    return tag("svg", join(*drawn), viewBox=f"0 0 {wide} {high}", role="img", aria_label=title, **size, **attributes)


def _stroke(way: str, look: int, strong: bool) -> Markup:
    return tag("path", d=way, class_=f"line s{look % COLOURS}{' strong' * strong}", stroke_dasharray=dashes(look))


def _mark(x: float, y: float, look: int, kind: str, words: str) -> Markup:
    colour, r = f"f{look % COLOURS}", {"sample": 3.0, "hyper": 5.5, "prototype": 12.0}[kind]
    if corners := {"prototype": 4, "hyper": 3}.get(kind):
        return tag("path", d=_polygon(x, y, r, corners), class_=f"{colour} outlined", data_tip=words)
    shape = look // COLOURS % 3
    if shape == 0:
        return tag("circle", cx=x, cy=y, r=r, class_=f"{colour} sample", data_tip=words)
    if shape == 1:
        return tag("rect", x=x - r, y=y - r, width=2 * r, height=2 * r, class_=f"{colour} sample", data_tip=words)
    return tag(
        "path",
        d=f"M{x - r:.1f} {y:.1f}h{2 * r}M{x:.1f} {y - r:.1f}v{2 * r}",
        class_=f"s{look % COLOURS}",
        data_tip=words,
    )


def _polygon(x: float, y: float, r: float, corners: int) -> str:
    angles = (-math.pi / 2 + 2 * math.pi * i / corners for i in range(corners))
    return "M" + "L".join(f"{x + r * math.cos(a):.1f} {y + r * math.sin(a):.1f}" for a in angles) + "Z"


def _pieces(points: Sequence[tuple[float, ...]]) -> list[list[tuple[float, ...]]]:
    """What can be drawn without a break: neither what is not a number nor what is too large."""
    drawable = groupby(points, lambda point: all(abs(value) < TOO_LARGE for value in point))
    return [list(piece) for there, piece in drawable if there]


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers around the values."""
    if high == low:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    raw = (high - low) / wanted
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    return [step * i for i in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1,) if last - first > 2 else (1, 2, 5)
    every = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    start = max(i for i, value in enumerate(every) if value <= low * 1.0001)
    end = next(i for i, value in enumerate(every) if value >= high * 0.9999)
    found = every[start : end + 1]
    return found[:: -(-len(found) // 7)] if len(found) > 7 else found


def _whole_ticks(first: float, last: float) -> list[float]:
    return sorted(
        {t for t in _ticks(first, last, 6) if first <= t <= last and t == int(t)}
        | ({first} if first == last else set())
    )
