"""Which tensors leave a site in a round, and which come in: from a rehearsal of the very program that the sites run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ..accounting import tensor_table
from ..config import Config
from ..federation import Federation

Record = dict[str, Any]
LEAVES, COMES = "up", "down"


def tensors(config: Config) -> list[Record]:
    """One client's round on two random samples, taken here: names, shapes and types are those of every client."""
    federation = Federation(config)
    rows = tensor_table(federation.sent(), federation.upload)
    return sorted(rows, key=lambda row: row["direction"] != LEAVES)


def table(rows: Sequence[Record], direction: str) -> Table:
    chosen = [row for row in rows if row["direction"] == direction]
    title = "leaves a site, per round that it takes part in" if direction == LEAVES else "comes to a site, per round"
    found = Table(title=title, title_justify="left", box=None)
    for name in ("tensor", "shape", "type", "bytes"):
        found.add_column(name, justify="right" if name == "bytes" else "left")
    for row in chosen:
        shape = " x ".join(map(str, row["shape"])) or "one number"
        found.add_row(row["tensor"], shape, row["dtype"], f"{row['bytes']:,}")
    found.add_section()
    found.add_row(f"{len(chosen)} tensors", "", "", f"{sum(row['bytes'] for row in chosen):,}", style="bold")
    return found
