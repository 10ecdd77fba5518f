"""Folds that withstand some hostile clients, acting on models and reports alike (docs/robustness.md).

They keep the uploads of a round in main memory, and every client counts the same: what it says of its number of samples
is as little trusted as the rest. A class of a report concerns only the clients that hold it, by the counts beside it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import wire
from .config import Config
from .errors import ConfigError
from .memories import GB
from .methods.base import Tensors

COLUMNS = 1 << 16  # of all models that are worked on at once: beside the uploads, little memory is needed


class RobustFold:
    """`robust=` clip, median, trimmed, krum or multikrum, in place of the mean of Eq 1."""

    def __init__(self, config: Config, most: int, sent: Tensors) -> None:
        self.config, self.sent = config, sent
        self.start = _flat(sent, sent)
        self.kept = torch.empty(most, len(self.start))
        self.reports = wire.Stack(most)
        self.clients: list[int] = []
        self.note: dict[str, Any] = {}

    @property
    def count(self) -> int:
        return len(self.clients)

    def add(self, client: int, model: Tensors, report: Tensors) -> None:
        self.kept[self.count] = _flat(model, self.sent)
        self.reports.add({name: value.nan_to_num() for name, value in report.items()})  # decoding may have overflown
        self.clients.append(client)

    def result(self) -> tuple[Tensors, Tensors]:
        rule, models, reports = self.config.robust, self.kept[: self.count], self.reports.result()
        if rule == "clip":
            model, reports, factors = clipped(models, self.start, reports, self.config.robust_clip)
            pairs = sorted(zip(self.clients, factors, strict=True))
            cut = [{"client": k, "model": round(m, 4), "reports": round(r, 4)} for k, (m, r) in pairs if min(m, r) < 1]
            self.note = {"clipped": cut}
        elif rule in ("median", "trimmed"):
            trim = self.count if rule == "median" else hostile_among(self.count, self.config.robust_share)
            model, reports = trimmed(models, reports, trim)
        else:
            hostile = hostile_among(self.count, self.config.robust_share)
            keep = 1 if rule == "krum" else max(1, self.count - hostile)
            rows = nearest_to_others(distances(models, self.start, reports, hostile), hostile, keep)
            model, reports = _mean(models[rows]), {name: value[rows] for name, value in reports.items()}
            self.note = {"left_out": sorted(set(self.clients) - {self.clients[row] for row in rows})}
        return self._named(model), reports

    def _named(self, model: Tensor) -> Tensors:
        parts = model.split([value.numel() for value in self.sent.values()])
        return {
            name: part.view(value.shape).to(value.dtype)
            for (name, value), part in zip(self.sent.items(), parts, strict=True)
        }


def check(config: Config, exchange: str, per_round: int, upload_bytes: int) -> None:
    """Refuse what cannot withstand anything, and uploads that are more than memory_budget together."""
    rule = config.robust
    if rule == "off":
        return
    if exchange == "nothing":
        raise ConfigError(f"robust={rule}: with method={config.method} nothing is aggregated")
    if (reason := shortage(config, per_round, f"{per_round} clients take part in a round")) is not None:
        raise ConfigError(reason)
    kept = per_round * upload_bytes / GB
    if kept > config.memory_budget:
        raise ConfigError(
            f"robust={rule} keeps the {per_round} uploads of a round in main memory, {kept:.1f} GB, and memory_budget "
            f"is {config.memory_budget:g} GB: raise it, or lower clients or participation"
        )


def shortage(config: Config, clients: int, who: str) -> str | None:
    """Why so few withstand nothing, or None. It is asked before a run, and again of the uploads that a round got."""
    rule, share = config.robust, config.robust_share
    least = needed(rule, clients, share)
    if clients >= least:
        return None
    assumed = f" of whom robust_share={share:g} says {hostile_among(clients, share)} may be hostile,"
    return f"robust={rule}: {who},{assumed if least > 3 else ''} and it needs {least}"


def needed(rule: str, clients: int, share: float) -> int:
    """How many a rule needs when that share of so many clients is hostile; below three, one hostile is half of all."""
    hostile = hostile_among(clients, share)
    by_rule = {"off": 0, "trimmed": max(3, 2 * hostile + 1), "krum": 2 * hostile + 3, "multikrum": 2 * hostile + 3}
    return by_rule.get(rule, 3)


def hostile_among(clients: int, share: float) -> int:
    """How many of so many clients are assumed to be hostile; 0.3 of 10 are 3, whatever the floats say."""
    return math.ceil(share * clients - 1e-9)


# The rules, on models [K, P] and reports [K, ...]


def clipped(
    models: Tensor, start: Tensor, reports: Tensors, limit: float | None
) -> tuple[Tensor, Tensors, list[tuple[float, float]]]:
    """What is longer than the limit is shortened to it: a model's step from the start, and each class of a report.

    The limit of the steps is given, or else their median length in this round; that of a class is always the median of
    its holders, and so is the most that a client can say of its samples. Also returned: for each client, the factor of
    its model, and the mean factor of its reports.
    """
    lengths = torch.stack([torch.linalg.vector_norm(row - start, dtype=torch.float64) for row in models])
    factors = _factors(lengths, None, limit)
    # each of these lies between two models: a variance stays above 0
    total = sum((start + (row.double() - start) * by for row, by in zip(models, factors, strict=True)), 0 * start)
    cut, means = Tensors(), [torch.ones(len(models))]
    for name, value in reports.items():
        own = _holders(name, reports)
        if value.is_floating_point():
            rows = value.double().reshape(*value.shape[: 1 if own is None else 2], -1)
            by = _factors(rows.norm(dim=-1), own, None)
            cut[name] = (rows * by[..., None]).reshape(value.shape).to(value.dtype)
            means.append(by if own is None else (by * own).sum(1) / own.sum(1).clamp_min(1))
        else:
            cut[name] = torch.minimum(value, trimmed_mean(value, own, len(value)).to(value.dtype))
    of_reports = torch.stack(means[1:] or means).mean(0)
    return total / len(models), cut, list(zip(factors.tolist(), of_reports.tolist(), strict=True))


def trimmed(models: Tensor, reports: Tensors, trim: int) -> tuple[Tensor, Tensors]:
    """Coordinate by coordinate, the mean without the `trim` smallest and largest; of reports, one that stands for all.

    Where that would leave nothing, the one or two in the middle stay: a `trim` of K is the median.
    """
    model = torch.cat([trimmed_mean(part, None, trim) for part in models.split(COLUMNS, 1)])
    one = {name: trimmed_mean(v, _holders(name, reports), trim)[None].to(v.dtype) for name, v in reports.items()}
    return model, one


def trimmed_mean(values: Tensor, held: Tensor | None, trim: int) -> Tensor:
    """Over the first dimension, among those that hold it [K, C] -> float64; 0 where nobody does."""
    values = values if values.is_floating_point() else values.double()
    held = torch.ones(len(values), dtype=torch.bool) if held is None else held
    held = held.reshape(*held.shape, *[1] * (values.dim() - held.dim()))
    n = held.sum(0)
    cut = ((n - 1).clamp_min(0) // 2).clamp_max(trim)
    rows = values.masked_fill(~held, torch.inf).movedim(0, -1).contiguous()  # those without it come last
    ordered = torch.from_numpy(np.sort(rows.numpy())).double()  # many times as fast as torch's
    rank = torch.arange(len(values))
    kept = ordered.where((rank >= cut[..., None]) & (rank < (n - cut)[..., None]), 0.0)
    return kept.sum(-1) / (n - 2 * cut).clamp_min(1)


def distances(models: Tensor, start: Tensor, reports: Tensors, hostile: int) -> Tensor:
    """Squared distances of uploads [K, K]: the model's and each report's, every one of them divided by the usual one.

    So each part has the same say, however many numbers it has and however large they are. Of a report, the mean over
    the classes that both hold counts; two clients with none in common are at the usual distance.
    """
    gram = torch.zeros(len(models), len(models), dtype=torch.float64)
    for rows, origin in zip(models.split(COLUMNS, 1), start.split(COLUMNS), strict=True):
        steps = (rows - origin).double()
        gram += steps @ steps.T
    lengths = gram.diagonal()
    parts = [(lengths[:, None] + lengths - 2 * gram).clamp_min(0)]
    for name, value in reports.items():
        if value.is_floating_point():
            own = _holders(name, reports)
            rows = value.double().reshape(len(value), 1 if own is None else value.shape[1], -1).transpose(0, 1)
            square = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()  # [C, K, K]
            both = torch.ones_like(square[:, :1]) if own is None else (own[:, None] & own).permute(2, 0, 1)
            parts.append((square * both).sum(0) / both.sum(0))  # nan: no class in common
    return torch.stack([_by_the_usual(part, hostile) for part in parts]).sum(0)


def nearest_to_others(square: Tensor, hostile: int, keep: int) -> list[int]:
    """Krum: those whose K - hostile - 2 nearest are nearest to them, in the order of the uploads."""
    K = len(square)
    to_others = square.clone().fill_diagonal_(torch.inf).sort(1).values[:, : max(1, K - hostile - 2)]
    return sorted(to_others.sum(1).argsort(stable=True)[:keep].tolist())


def _holders(name: str, reports: Tensors) -> Tensor | None:
    """Which client holds which class [K, C], by the counts of that report, or None where it has no row for each class.

    The means have counts of their own where they are not of the same samples as the rest.
    """
    counts = reports.get(name if name.endswith("counts") else f"{name.removesuffix('s')}_counts", reports.get("counts"))
    return None if counts is None or reports[name].shape[1:2] != counts.shape[1:] else counts > 0


def _factors(lengths: Tensor, held: Tensor | None, limit: float | None) -> Tensor:
    limits = trimmed_mean(lengths, held, len(lengths)) if limit is None else torch.tensor(limit, dtype=torch.float64)
    return torch.where(lengths > limits, limits / lengths, 1.0)


def _by_the_usual(square: Tensor, hostile: int) -> Tensor:
    """The usual distance is the median of the smallest ones, of as many of them as there are pairs of honest clients.

    With 40 % hostile, two pairs of three have a hostile client in them, and the median of all would be one of those.
    """
    K, honest = len(square), len(square) - hostile
    pairs = square[*torch.triu_indices(K, K, 1)]
    smallest = pairs[~pairs.isnan()].sort().values[: honest * (honest - 1) // 2]
    usual = float(smallest.median()) if len(smallest) else 0.0
    return square.nan_to_num(nan=usual) / (usual or 1.0)


def _mean(models: Tensor) -> Tensor:
    total = sum((row.double() for row in models), torch.zeros(models.shape[1], dtype=torch.float64))
    return total / len(models)


def _flat(model: Tensors, names: Tensors) -> Tensor:
    return torch.cat([torch.zeros(0), *(model[name].reshape(-1).cpu() for name in names)])
