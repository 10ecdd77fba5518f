"""How long a run will take and how much memory, before anything is loaded: FLOPs, corrected by runs that are done."""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from . import accounting, models
from .config import Config
from .data import digits_lite, text
from .data.catalog import CATALOG
from .models import GROUPS

# FLOPs a second and seconds a step around them, for one run: a core of a 2025 server; an H200 in TF32 (docs/gpu.md)
SPEED = {"cpu": (4e10, 0.004), "flower": (4e10, 0.004), "cuda": (5e13, 0.0007)}
START = 2.0  # seconds before the first round and after the last
Sizes = tuple[float, int, tuple[int, ...], int]  # samples to train and to test on, shape, classes
EMBEDDED: dict[str, Sizes] = {
    "digits-lite": (3600, 3200, (3, 32, 32), 10),
    "docs-lite": (4000, 1600, (text.LENGTH,), 4),
}
VOCAB = 10_000  # about
RUNTIME_MB = 500  # of Python, torch and this package


def guess(config: Config) -> tuple[float, float]:
    """Seconds and MB of a process, from the sizes in the config and in the catalog alone."""
    train, test, shape, classes = _sizes(config)
    forward, parameters = _network(config.model, config.width, config.dim, config.stem, shape, classes)
    if config.local_steps is None:
        samples = train * config.participation * config.local_epochs
    else:
        samples = _clients(config) * config.participation * config.local_steps * min(config.batch_size, train)
    evaluations = -(-config.rounds // config.evaluate_every)
    models_tested = 1 if config.exchange in ("auto", "model") and config.model not in GROUPS else _clients(config)
    flops = forward * (3 * config.rounds * samples + evaluations * test * models_tested)
    speed, a_step = SPEED[config.engine]
    seconds = START + flops / speed + config.rounds * samples / config.batch_size * a_step
    activations = config.batch_size * forward / 150  # bytes; measured for ResNet-10
    return seconds, RUNTIME_MB + (20 * 4 * parameters + activations) / 2**20


def correction(done: Sequence[Config]) -> tuple[float, float | None]:
    """Seconds taken over seconds guessed, and the most MB that a process had, of the runs that are done."""
    ratios, memory = [], []
    for config in done:
        with contextlib.suppress(OSError, ValueError, KeyError):
            result = json.loads((Path(config.out) / "result.json").read_text(encoding="utf-8"))
            ratios.append((result["seconds"] + START) / guess(config)[0])
            memory.append(max(result["costs"]["peak_mb"].values()))
    return (statistics.median(ratios) if ratios else 1.0), max(memory, default=None)


def _clients(config: Config) -> int:
    if config.scenario == "nid2":
        return config.nid2_clients + 1
    if config.scenario != "domains":
        return config.clients
    return sum(count for count, _ in _allocation(config))


def _allocation(config: Config) -> list[tuple[int, float]]:
    """Clients and samples of each, by domain."""
    if config.data in CATALOG:
        dataset = CATALOG[config.data]
        of_a_domain = dataset.counts[0] / len(dataset.parts)
        found = [(p.clients, p.samples if p.samples >= 1 else p.samples * of_a_domain) for p in dataset.parts]
    else:
        found = [(count, float(samples)) for count, samples in digits_lite.ALLOCATION.values()]
    own, each = config.clients_per_domain, config.samples_per_client
    return [(own or count, each or samples) for count, samples in found]


def _sizes(config: Config) -> Sizes:
    train, test, shape, classes = EMBEDDED.get(config.data, EMBEDDED["digits-lite"])
    if config.data in CATALOG:
        dataset = CATALOG[config.data]
        train, test, classes = *dataset.counts, dataset.num_classes
        shape = (3, *dataset.size) if dataset.kind == "image" else (text.LONGEST,)
    if config.scenario == "domains":
        train = sum(count * samples for count, samples in _allocation(config))
    elif config.rho is not None:
        train *= sum(config.rho ** (-c / max(1, classes - 1)) for c in range(classes)) / classes
    return train, test, shape, classes


@functools.cache
def _network(
    name: str, width: int | None, dim: int | None, stem: str, shape: tuple[int, ...], classes: int
) -> tuple[float, int]:
    """FLOPs of a sample's way forward and parameters; of a mixed federation their means."""
    import torch

    flops, sizes = [], []
    for each in GROUPS.get(name, (name,)):
        own = width if each.startswith("resnet") else None
        net = (
            models.build(each, classes, width=own, dim=dim, stem=stem, image_size=shape[-1], vocab=VOCAB)
            .to("meta")
            .eval()
        )
        x = torch.empty(2, *shape, device="meta", dtype=torch.int64 if len(shape) == 1 else torch.float32)
        with torch.no_grad():
            flops.append(accounting.counted(net, x)[1] / 2)
        sizes.append(sum(value.numel() for value in net.parameters()))
    return statistics.fmean(flops), round(statistics.fmean(sizes))
