"""Which tensors leave a site in a round, and which come in: from a rehearsal of the very program that the sites run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from ..accounting import tensor_table
from ..config import Config
from ..data.sources import Split
from ..federation import Federation, withholds_samples
from ..methods.base import Tensors

Record = dict[str, Any]
LEAVES, COMES = "up", "down"


def besides(config: Config) -> str:
    """What a reply has that is no tensor, in a sentence."""
    held = "how many samples it trains on and how many it holds out"
    return (
        "Besides tensors, a reply has: the version of fedhpro, the client's number, a digest of config and shapes, "
        f"{f'a constant in place of {held}' if withholds_samples(config) else held}, whether and since which round it "
        "remembers something, and, where it failed, what kind of error it was."
    )


def tensors(config: Config) -> list[Record]:
    """One client's round on two random samples, taken here: names, shapes and types are those of every client."""
    federation = Federation(config)
    found = confusions(federation)
    comes = federation.shown() if found else federation.sent()
    rows = tensor_table(comes, federation.travelling() | found)
    return sorted(rows, key=lambda row: row["direction"] != LEAVES)


def confusions(federation: Federation) -> Tensors:
    """What an evaluation on a site's own samples sends: what was taken for what, by each head, and the loss."""
    if all(test.owner is None for test in federation.tests()):
        return {}
    source, trainer = federation.source, federation.trainer
    blank = torch.zeros(2, *source.shape, dtype=torch.uint8 if source.vocab is None else torch.int64)
    trainer.tests["blank"] = Split(blank, torch.zeros(2, dtype=torch.int64))
    found = trainer.evaluate("blank", None, federation.shown(), {})
    return {f"evaluation/{head}": table for head, table in found.items()}


def table(rows: Sequence[Record], direction: str) -> Table:
    chosen = [row for row in rows if row["direction"] == direction]
    title = "leaves a site, per round that it takes part in" if direction == LEAVES else "comes to a site, per round"
    found = Table(title=title, title_justify="left", box=None, pad_edge=False)  # the names in 80 columns
    for name in ("tensor", "shape", "type", "bytes"):
        found.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    for row in chosen:
        shape = " x ".join(map(str, row["shape"])) or "one number"
        found.add_row(row["tensor"], shape, row["dtype"], f"{row['bytes']:,}")
    found.add_section()
    found.add_row(f"{len(chosen)} tensors", "", "", f"{sum(row['bytes'] for row in chosen):,}", style="bold")
    return found
