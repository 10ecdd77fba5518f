"""What a round costs with each method: the FedHPro paper's Table 4, counted and measured here, beside its numbers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import accounting, data
from .comparison import ALL, entries
from .config import configure
from .errors import DataError
from .federation import Federation
from .reproduce import load
from .wire import num_bytes

# Table 4, of a round of 20 clients: values uploaded / 10^7, communicated MB, FLOPs / 10^10, seconds of training
TABLE_4 = load("table4")
PAPER: dict[str, dict[str, float | None]] = {
    row.keys["method"]: dict(zip(TABLE_4.settings[0].columns, row.paper, strict=True))
    for row in TABLE_4.rows
    if row.paper
}

Row = dict[str, Any]


def usual_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's federation where its data are at hand, the main job's where they are not."""
    if "data" in keys:
        return {}
    try:
        data.load("digits")
    except DataError:
        return {"data": "digits-lite"}
    return {"data": "digits"} | ({} if "preset" in keys else {"preset": "paper"})


def costs(keys: Mapping[str, Any], methods: Sequence[str] = ALL, measure: int = 0) -> list[Row]:
    """A row per method (`fedhpro:M=0` is one too); with `measure`, the seconds of the fastest of so many rounds."""
    keys = {**keys, "rounds": measure + 2, "evaluate_every": measure + 2}  # tests are no part of it
    configs = {entry.label: configure(**(keys | entry.keys)) for entry in entries(methods, keys, control=False)}
    source = data.load(next(iter(configs.values())).data)
    federations = {method: Federation(config, source) for method, config in configs.items()}
    seconds = measured(federations, measure) if measure else {}
    rows = [row(method, federation) for method, federation in federations.items()]
    return [found | {"seconds": seconds.get(found["method"])} for found in rows]


def row(method: str, federation: Federation) -> Row:
    """Of all clients in one round; the values are those of the model and of the method, without counts and losses."""
    clients, upload = federation.per_round, federation.upload
    values = sum(
        value.numel()
        for name, value in upload.items()
        if name.startswith(accounting.VALUES) and value.is_floating_point()
    )
    flops = accounting.client_flops(federation)
    share = clients / len(federation.clients)
    return {
        "method": method,
        "values_up": clients * values,
        "bytes_up": clients * num_bytes(federation.travelling()),
        "bytes_down": clients * num_bytes(federation.sent()),
        "flops_step": flops["step"],
        "flops_clients": round(share * sum(flops["training"] + flops["passes"])),
        "flops_server": federation.server_flops,  # known where a round was measured
        "paper": PAPER.get(method),
    }


def measured(federations: Mapping[str, Federation], rounds: int) -> dict[str, float]:
    """Seconds of the fastest round. The methods take turns, so that what else the machine does hits all alike."""
    found = dict.fromkeys(federations, math.inf)
    with contextlib.ExitStack() as stack:
        for federation in federations.values():
            stack.enter_context(federation)
        for number in range(rounds + 1):  # the first warms up
            for method, federation in list(federations.items())[:: 1 if number % 2 else -1]:
                federation.next_round()
                if number:
                    found[method] = min(found[method], sum(federation.watch.seconds.values()))
    return found


def table(rows: Sequence[Row], title: str) -> Any:
    """Ours, and in grey the paper's; FLOPs and seconds of the two are compared as ratios to the first row's."""
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    shown.add_column("\nmethod", style="bold")
    for name in (
        "values\n/ 10^7",
        "-",
        "MB\nup",
        "MB\ndown",
        "-",
        "client\nTFLOPs",
        "\nratio",
        "-",
        "\ns",
        "\nratio",
        "-",
    ):
        shown.add_column("\npaper" if name == "-" else name, justify="right", style="dim" if name == "-" else "")
    first = rows[0]
    for found in rows:
        shown.add_row(
            found["method"],
            f"{found['values_up'] / 1e7:.3f}",
            _of_paper(found, "values_up_e7"),
            f"{found['bytes_up'] / 1e6:.2f}",
            f"{found['bytes_down'] / 1e6:.2f}",
            _of_paper(found, "mb_up"),
            f"{found['flops_clients'] / 1e12:.4g}",
            f"{found['flops_clients'] / first['flops_clients']:.2f}",
            _of_paper(found, "flops_e10", first),
            "-" if found["seconds"] is None else f"{found['seconds']:.2f}",
            "-" if found["seconds"] is None else f"{found['seconds'] / first['seconds']:.2f}",
            _of_paper(found, "seconds", first),
        )
    return shown


def _of_paper(found: Row, name: str, first: Row | None = None) -> str:
    """The paper's number, or its ratio to that of the first row."""
    if found["paper"] is None or (first is not None and first["paper"] is None):
        return "-"
    return f"{found['paper'][name] / (1 if first is None else first['paper'][name]):.2f}"
