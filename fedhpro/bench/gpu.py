"""GPU: milliseconds of a client step and seconds of a round, eager, captured and compiled, beside the floor.

The floor is one model trained on batches as large as those of all clients together: the same arithmetic in the shape
that suits the GPU best. Samples are random; only their number and size matter here.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from ..config import configure
from ..data.sources import Domain, Source, Split
from ..federation import Federation
from ..models import build

DIGITS = [600] * 3 + [72] * 7 + [732] * 6 + [100] * 4  # samples of the paper's twenty clients
LONG_TAIL = [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]  # CIFAR-10 at rho = 100
Rows = dict[str, Any]


def source(sizes: Sequence[int], classes: int = 10) -> Source:
    """A domain for each client, so that clients have exactly these sizes."""
    rng = torch.Generator().manual_seed(0)

    def split(n: int) -> Split:
        return Split(torch.randint(0, 256, (n, 3, 32, 32), generator=rng).byte(), torch.arange(n) % classes)

    domains = [Domain(f"d{k}", split(n), split(2), split(2), False, "noise") for k, n in enumerate(sizes)]
    allocation = {domain.name: (1, len(domain.train)) for domain in domains}
    return Source("noise", tuple(domains), tuple(map(str, range(classes))), allocation, flip=True)


def long_tail() -> Source:
    rng = torch.Generator().manual_seed(0)
    y = torch.cat([torch.full((n,), c) for c, n in enumerate(LONG_TAIL)])
    train = Split(torch.randint(0, 256, (len(y), 3, 32, 32), generator=rng).byte(), y)
    small = Split(train.x[:2], train.y[:2])
    return Source("noise-lt", (Domain("all", train, small, small, False, "noise"),), tuple("0123456789"), {}, flip=True)


def rounds(data: Source, repeat: int = 2, **keys: Any) -> Rows:
    """Seconds of a round without evaluation: the first, which captures, and the faster of two more."""
    config = configure(**({"preset": "paper", "engine": "cuda", "rounds": 10**6, "evaluate_every": 10**6} | keys))
    with Federation(config, data) as federation:
        seconds = []
        for _ in range(1 + repeat):
            torch.cuda.synchronize()
            started = time.perf_counter()
            record = federation.next_round()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            assert not record["refused"], record["refused"]
        size, epochs = config.batch_size, config.local_epochs
        steps = epochs * sum(max(1, -(-n // size) - (n > size and n % size == 1)) for n in federation.sizes)
        samples = epochs * sum(federation.sizes)
    federation = None  # type: ignore[assignment]
    gc.collect()
    torch.cuda.empty_cache()
    steady = min(seconds[1:])
    return {
        "first_round_s": round(seconds[0], 3),
        "round_s": round(steady, 4),
        "steps": steps,
        "ms_per_step": round(1e3 * steady / steps, 4),
        "ms_per_64_samples": round(64e3 * steady / samples, 4),
    }


def floor(precision: str, batch: int = 1280, width: int = 64, fused: bool = False) -> float:
    """Milliseconds per 64 samples of one model trained on large batches, captured as well."""
    from ..engines.fused import batch_norm
    from ..models.base import ConvNorm

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    net = build("resnet10", 10, width=width).cuda().train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.precision = torch.bfloat16 if precision == "bf16" else None
    for module in net.modules():
        if isinstance(module, ConvNorm) and fused:
            module.fused = batch_norm
    optimizer = torch.optim.SGD(net.parameters(), 0.01, 0.9, weight_decay=1e-5, fused=True)
    x, y = torch.randn(batch, 3, 32, 32, device="cuda"), torch.arange(batch, device="cuda") % 10

    def work() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return round(_ms(graph.replay, 20) * 64 / batch, 4)


def _ms(work: Callable[[], None], times: int) -> float:
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 1e3 * best / times


def gpu(quick: bool = False, say: Callable[[str], None] = print) -> Rows:
    found: Rows = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def note(name: str, measure: Callable[..., Any], *values: Any, **keys: Any) -> None:
        try:
            found[name] = measure(*values, **keys)
        except Exception as error:  # the other measurements are worth having
            found[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        say(f"{name}: {found[name]}")

    even, digits, tail = source([640] * 20), source(DIGITS), long_tail()
    fedavg = {"method": "fedavg", "scenario": "domains"}
    for name in ("bf16", "tf32"):
        precision = {"precision": name}
        note(f"floor, {name}", floor, name)
        note(f"floor, {name}, fused BatchNorm", floor, name, fused=True)
        for slots in (10,) if quick else (1, 5, 10):
            note(f"20 equal clients, {name}, {slots} slots", rounds, even, workers=slots, **precision, **fedavg)
        note(f"Digits clients, {name}", rounds, digits, **precision, **fedavg)
        note(f"Digits clients, {name}, FedHPro", rounds, digits, scenario="domains", **precision)
        note(f"CIFAR-10-LT, paper, {name}", rounds, tail, scenario="nid1", alpha=0.5, width=32, **precision)
        note(f"CIFAR-10-LT, released, {name}", rounds, tail, preset="released", **precision)
    if quick:
        return found
    short = {"precision": "tf32", "local_epochs": 2, "scenario": "domains"}
    note("20 equal clients, tf32, eager, E=2", rounds, even, 1, method="fedavg", workers=0, **short)
    for method in ("fedavg", "fedprox", "moon", "fedrcl", "fedproto", "fedtgp", "fedgmkd", "fedsa", "fedhpro"):
        note(f"20 equal clients, tf32, {method}, E=2", rounds, even, method=method, **short)
    for K in (1, 2, 5, 10, 40):
        note(f"{K} equal clients, tf32, E=2", rounds, source([640] * K), method="fedavg", **short)
    note("20 equal clients, fp32, E=2", rounds, even, 1, method="fedavg", **short | {"precision": "fp32"})
    note("20 equal clients, bf16, compiled", rounds, even, precision="bf16", compile=True, **fedavg)
    return found


def show(found: Rows, console: Console) -> None:
    table = Table(title="GPU: captured steps", title_justify="left")
    for column in ("what", "ms a step", "ms per 64 samples", "of the floor", "s a round", "first round"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, row in measured(found).items():
        ideal = floor_of(name, found)
        share = f"{100 * ideal / row['ms_per_64_samples']:.0f} %" if ideal and "LT" not in name else ""
        cells = (row["ms_per_step"], row["ms_per_64_samples"], share, row["round_s"], row["first_round_s"])
        table.add_row(name, *(cell if isinstance(cell, str) else f"{cell:.3f}" for cell in cells))
    console.print(table)
    for name, value in found.items():
        if name.startswith("floor") or (isinstance(value, str) and value.startswith("failed")):
            console.print(f"{name}: {value}", markup=False, highlight=False)


def measured(found: Rows) -> dict[str, Rows]:
    return {name: row for name, row in found.items() if isinstance(row, dict) and "ms_per_step" in row}


def floor_of(name: str, found: Rows) -> float | None:
    """That of plain torch in the precision that a row's name has."""
    return next((found.get(f"floor, {p}") for p in ("bf16", "tf32", "fp32") if p in name), None)


def draw(found: Rows, path: Path) -> None:
    from matplotlib.figure import Figure

    rows = dict(reversed(list(measured(found).items())))
    figure = Figure(figsize=(9, 0.28 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(rows), [row["ms_per_64_samples"] for row in rows.values()], color="#0072B2")
    for position, name in enumerate(rows):
        if (ideal := floor_of(name, found)) and "LT" not in name:
            axes.plot([ideal] * 2, [position - 0.4, position + 0.4], color="black", linewidth=1.5)
    axes.set_xlabel("milliseconds per 64 samples; black: the floor, one model with batches of 1280")
    axes.margins(y=0.01)
    figure.savefig(path, dpi=110)
