"""Who holds what: the samples of every client in every class, as a picture and as a small table for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..data.clients import ClientData
from ..files import write_atomically
from .curves import COLOURS

if TYPE_CHECKING:
    from rich.table import Table

BUBBLES = 50  # with more clients or classes than this, cells are shaded instead
CELL = 0.36  # inches, where there is room
WIDTH, HEIGHT = (3.2, 10.0), (1.0, 8.0)  # least and most inches of the middle panel
LETTERS = 20  # of a class name
GREY, PALE = "#6e6e6e", "#e6e6e6"
BLOCKS = "▁▂▃▄▅▆▇█"


def holdings(clients: Sequence[ClientData], num_classes: int) -> np.ndarray:
    """Samples [clients, classes], those that a client holds out for evaluation among them."""
    labels = (torch.cat((client.train.y, client.held_out.y)) for client in clients)
    return torch.stack([own.bincount(minlength=num_classes) for own in labels]).numpy()


def held(clients: Sequence[ClientData]) -> list[dict[str, Any]]:
    """The same for a file: the domain of each client, and its samples of the classes that it has any of."""
    found = []
    for client in clients:
        labels, counts = torch.cat((client.train.y, client.held_out.y)).unique(return_counts=True)
        samples = {str(c): n for c, n in zip(labels.tolist(), counts.tolist(), strict=True)}
        found.append({"domain": client.domain, "samples": samples})
    return found


def draw_holdings(clients: Sequence[ClientData], classes: Sequence[str], out: Path) -> None:
    """Clients, grouped and coloured by domain, against classes, with the totals of both at the margins. The area of a
    bubble is the number of samples; where there are too many for bubbles, a darker cell holds more.
    """
    from .picture import Picture  # matplotlib: heavy, and not needed by who only trains

    order = _by_domain(clients)
    domains = [clients[k].domain for k in order]
    names = list(dict.fromkeys(domains))
    colours = [COLOURS[names.index(domain) % len(COLOURS)] for domain in domains]
    counts = holdings(clients, len(classes))[order]

    wide = float(np.clip(CELL * len(clients), *WIDTH))
    high = float(np.clip(CELL * len(classes), *HEIGHT))
    figure = Picture(figsize=(wide + 2.4, high + 2.0), layout="constrained")
    figure.suptitle(_title(counts), fontsize=11)
    grid = figure.add_gridspec(2, 2, width_ratios=(wide, 0.7), height_ratios=(0.5, high))
    middle = figure.add_subplot(grid[1, 0])
    top = figure.add_subplot(grid[0, 0], sharex=middle)
    right = figure.add_subplot(grid[1, 1], sharey=middle)
    if max(counts.shape) <= BUBBLES:
        _bubbles(figure, middle, counts, colours, 72 * min(CELL, wide / len(clients), high / len(classes)))
    else:
        _shades(figure, middle, counts, colours)
    for name, first in {name: domains.index(name) for name in names}.items():
        of_domain = counts.sum(1)[first : first + domains.count(name)]
        _bars(top, first, of_domain, colours[first])
    _bars(right, 0, counts.sum(0), GREY, lying=True)

    every = _every(wide / len(clients), 0.08 * len(str(len(clients))) + 0.06)
    middle.set_xticks(range(0, len(clients), every), [str(k) for k in order[::every]])
    every = _every(high / len(classes), 0.13)
    middle.set_yticks(range(0, len(classes), every), [_short(name) for name in classes[::every]], parse_math=False)
    middle.set_xlim(-0.5, len(clients) - 0.5)
    middle.set_ylim(len(classes) - 0.5, -0.5)
    middle.set_xlabel("client", fontsize=9)
    middle.set_ylabel("class", fontsize=9)
    middle.tick_params(labelsize=8, length=0)
    middle.spines[:].set_color("#b0b0b0")
    top.locator_params(axis="y", nbins=2)
    right.locator_params(axis="x", nbins=2)
    for axes in (top, right):
        axes.tick_params(axis="x", labelsize=7, length=2 * (axes is right), labelbottom=axes is right)
        axes.tick_params(axis="y", labelsize=7, length=2 * (axes is top), labelleft=axes is top)
        axes.spines[["top", "right"]].set_visible(False)
    if len(names) > 1:
        _name_domains(middle, top, domains, colours, wide / len(clients))
    write_atomically(out, figure.png(dpi=110))


def holdings_table(clients: Sequence[ClientData], classes: Sequence[str], *, marks: int = 32, rows: int = 20) -> Table:
    """The same for the terminal: one mark for each class, or for a few neighbouring ones where there are more classes
    than `marks`; at most `rows` clients, in the order of the picture.
    """
    from rich.table import Table
    from rich.text import Text

    order = _by_domain(clients)
    counts = holdings(clients, len(classes))
    together = -(-len(classes) // marks)
    binned = np.add.reduceat(counts, np.arange(0, len(classes), together), axis=1)
    per = "class" if together == 1 else _plural(together, "class")
    table = Table(title=_title(counts), caption=f"a mark per {per}, █ the client's largest")
    for title in ("client", "samples", "classes"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("domain", no_wrap=True)
    table.add_column("", no_wrap=True)
    for k in order[:rows]:
        held = (counts[k] > 0).sum()
        table.add_row(str(k), f"{counts[k].sum():,}", str(held), Text(_short(clients[k].domain)), _marks(binned[k]))
    if len(order) > rows:
        table.add_row("…", "", "", f"{len(order) - rows} more")
    return table


def _bubbles(figure: Any, axes: Any, counts: np.ndarray, colours: Sequence[str], cell: float) -> None:
    """`cell` is the room of a bubble in points."""
    largest = int(counts.max())

    def area(samples: Any) -> Any:
        return np.maximum((0.95 * cell) ** 2 * samples / largest, 1.5)  # a single sample can still be seen

    k, c = np.nonzero(counts)
    axes.set_axisbelow(True)
    axes.grid(color=PALE, linewidth=0.6)
    axes.scatter(k, c, s=area(counts[k, c]), c=np.array(colours)[k], linewidths=0)
    sizes = sorted({largest, -(-largest // 4), -(-largest // 16)})
    keys = [axes.scatter([], [], s=area(n), c=GREY, linewidths=0, label=f"{n:,}") for n in sizes]
    figure.legend(
        handles=keys, title="samples", loc="outside lower center", ncols=len(keys), fontsize=8, title_fontsize=8,
        frameon=False, handlelength=cell / 8, handleheight=cell / 8, borderpad=0.6,
    )  # fmt: skip


def _shades(figure: Any, axes: Any, counts: np.ndarray, colours: Sequence[str]) -> None:
    """White to the domain's colour, by the square root, so that small numbers are seen."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgb
    from matplotlib.ticker import MaxNLocator

    norm = PowerNorm(0.5, 0, counts.max())
    shade = np.asarray(norm(counts), np.float32)[..., None]
    image = 1 - shade * (1 - np.array([to_rgb(colour) for colour in colours], np.float32)[:, None])
    image = np.rint(255 * image).astype(np.uint8)  # a byte for a colour: there may be 10,000 clients with 397 classes
    axes.imshow(image.transpose(1, 0, 2), aspect="auto", interpolation="nearest")
    one = colours[0] if len(set(colours)) == 1 else GREY
    scale = ScalarMappable(norm, LinearSegmentedColormap.from_list("shades", ["white", one]))
    bar = figure.colorbar(
        scale, ax=figure.axes, location="bottom", shrink=0.5, aspect=40, pad=0.02, ticks=MaxNLocator(4, integer=True)
    )
    bar.set_label("samples", fontsize=8)
    bar.ax.tick_params(labelsize=7)


def _name_domains(middle: Any, top: Any, domains: Sequence[str], colours: Sequence[str], cell: float) -> None:
    """A line between neighbours and the names above, slanted where they are wider than their clients."""
    rooms = {name: cell * count for name, count in Counter(domains).items()}
    slanted = any(room < 0.09 * len(_short(name)) for name, room in rooms.items())
    for name, colour in dict(zip(domains, colours, strict=True)).items():
        first, count = domains.index(name), domains.count(name)
        if first:
            for axes in (middle, top):
                axes.axvline(first - 0.5, color="#b0b0b0", linewidth=0.8)
        if slanted and rooms[name] < 0.15:
            continue
        top.annotate(
            _short(name), (first + (count - 1) / 2, 1.08), xycoords=("data", "axes fraction"), color=colour,
            fontsize=9, rotation=35 * slanted, rotation_mode="anchor", ha="left" if slanted else "center",
            parse_math=False,
        )  # fmt: skip


def _by_domain(clients: Sequence[ClientData]) -> list[int]:
    return sorted(range(len(clients)), key=lambda k: clients[k].domain)


def _title(counts: np.ndarray) -> str:
    clients, classes = counts.shape
    return f"{_plural(clients, 'client')}, {_plural(int(counts.sum()), 'sample')}, {_plural(classes, 'class')}"


def _plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "es" if noun.endswith("s") else "s")


def _every(room: float, needed: float) -> int:
    """Label each, each second, fifth, tenth ... so that the labels have room."""
    steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    return next((step for step in steps if step * room >= needed), steps[-1])


def _bars(axes: Any, first: int, lengths: np.ndarray, colour: str, lying: bool = False) -> None:
    if len(lengths) <= 2 * BUBBLES:
        (axes.barh if lying else axes.bar)(first + np.arange(len(lengths)), lengths, 0.75, color=colour)
    else:  # one outline: gaps would be less than a pixel, and thousands of bars take seconds
        edges = first - 0.5 + np.arange(len(lengths) + 1)
        axes.stairs(lengths, edges, orientation="horizontal" if lying else "vertical", fill=True, color=colour)


def _short(name: str) -> str:
    return name if len(name) <= LETTERS else name[: LETTERS - 1] + "…"


def _marks(counts: np.ndarray) -> str:
    heights = np.ceil(counts / max(counts.max(), 1) * len(BLOCKS)).astype(int)
    return "".join(BLOCKS[height - 1] if height else "·" for height in heights)
