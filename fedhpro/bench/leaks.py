"""What one client's upload gives away: its classes, how many samples of each, and whether a given sample was in.

The attacker is the server, or whoever reads what it reads: it knows the method, the model that it sent and what came
back, and has clients of its own (half of the federation's cut, whose samples nobody else trains on) to learn from how
uploads look. Counts are taken out of the uploads first; as long as they travel in clear there is nothing to attack.
With noise, model change and report are two groups, each clipped to the median norm and given Gaussian noise of
z * sqrt(2) * clip, and the attacker knows that too. The attacks are simple: what they find is a lower bound.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from sklearn.ensemble import RandomForestRegressor
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, one_hot

from .. import wire
from ..config import configure
from ..data import load
from ..engines.cpu import one_thread
from ..equations import count_classes
from ..federation import Federation
from ..methods.base import Tensors
from ..training import copy_into, model_tensors, section

CLIENTS = 20  # of the federation, and as many of the attacker
NOISE = {"none": None, "z = 0.01": 0.01, "z = 0.1": 0.1, "z = 1": 1.0}
GROUPS = 2  # model and report
BUCKETS = {"1": (1, 1), "2-4": (2, 4), "5-16": (5, 16), "17+": (17, 10**9)}  # samples of the class at the client
THEIRS, OURS, EVERYBODY = range(CLIENTS), range(CLIENTS, 2 * CLIENTS), range(2 * CLIENTS)
Findings = dict[tuple[str, str], dict[str, Any]]  # (view, noise) -> what was found
STRANGERS = 12  # samples of a class that were not in, beside the members


class Observed(Federation):
    """The first half of the cut is the federation; the attacker has the rest."""

    def sample(self, number: int) -> list[int]:
        return list(range(CLIENTS))


@dataclass(frozen=True)
class View:
    """What is looked at: `rows` of an upload [C, ...], and `points`, what a single sample would have there."""

    name: str
    method: str
    rows: Callable[[Tensors, Tensors, Tensors], Tensor]  # of model, report, and the model that was sent
    points: Callable[[Asked], Tensor] | None  # None: the sample's loss tells

    def scores(self, rows: Tensor, y: Tensor, uploaded: Asked, sent: Asked) -> Tensors:
        """Of each asked sample: how near its own gradient or feature is to what the client sent, or its loss."""
        if self.points is None:
            return {"loss": -uploaded.losses, "loss before and after": sent.losses - uploaded.losses}
        found = {}
        for which, asked in (("uploaded", uploaded), ("sent", sent)):
            points = self.points(asked).nan_to_num(0, 0, 0)
            found[f"angle, {which} model"] = cosine_similarity(points, rows[y], dim=1)
            found[f"distance, {which} model"] = -(points - rows[y]).norm(dim=1)
        return found


@dataclass(frozen=True)
class Asked:
    """The samples that are asked about, as a model sees them."""

    z: Tensor
    residuals: Tensor  # softmax - onehot
    losses: Tensor
    weight: Tensor  # of the classifier


def classifier_change(model: Tensors, report: Tensors, sent: Tensors) -> Tensor:
    weight, bias = (model[f"classifier.{part}"] - sent[f"classifier.{part}"] for part in ("weight", "bias"))
    return torch.cat([weight, bias[:, None]], 1)


VIEWS = (
    View("class gradients", "fedhpro", lambda _, report, __: report["gradients"], lambda a: a.residuals @ a.weight),
    View("probabilities", "fedhpro", lambda _, report, __: report["residuals"], lambda a: a.residuals),
    View("model", "fedhpro", classifier_change, None),
    View("prototypes", "fedproto", lambda _, report, __: report["means"], lambda a: a.z),
)


@one_thread()
def leaks(quick: bool = False) -> dict[str, Any]:
    seeds, rounds = ((0,), 2) if quick else ((0, 1), 3)
    return averaged({seed: one_seed(seed, rounds) for seed in seeds}, rounds)


def averaged(found: dict[int, Findings], rounds: int) -> dict[str, Any]:
    """The mean over seeds, of each view and noise."""
    rows = []
    for view, noise in itertools.product([view.name for view in VIEWS], NOISE):
        same = [seed[view, noise] for seed in found.values()]
        rows.append({"view": view, "noise": noise} | _mean(same))
    about = f"digits-lite, nid1, alpha 0.3, {CLIENTS} clients of about 90 samples, upload of round {rounds}"
    return {"about": about, "seeds": list(found), "rows": rows}


def one_seed(seed: int, rounds: int) -> Findings:
    return one_method(seed, rounds, "fedhpro", uplink="probabilities") | one_method(seed, rounds, "fedproto")


def one_method(seed: int, rounds: int, method: str, **own: Any) -> Findings:
    keys: dict[str, Any] = {"scenario": "nid1", "alpha": 0.3, "clients": 2 * CLIENTS, "workers": 0, **own}
    config = configure(method=method, seed=seed, rounds=rounds, evaluate_every=rounds, **keys)
    found: Findings = {}
    with Observed(config, load("digits-lite")) as federation:
        for _ in range(rounds - 1):
            federation.next_round()
        attack = Attack(federation, seed)
        for noise, z in NOISE.items():
            found |= attack.at(noise, z)
    return found


class Attack:
    def __init__(self, federation: Federation, seed: int) -> None:
        trainer, sent = federation.trainer, federation.sent()
        self.views = [view for view in VIEWS if view.method == federation.method.name]
        self.net, self.sent, self.rng = federation.net, section(sent, "model"), np.random.default_rng(seed)
        data = [client.train.to(torch.device("cpu")) for client in federation.clients]
        self.x, self.y = [trainer.transform.plain(split.x) for split in data], [split.y for split in data]
        self.counts = torch.stack([count_classes(y, self.net.num_classes) for y in self.y])
        uploads = [trainer.update(federation.round + 1, k, sent, {})[0] for k in EVERYBODY]
        self.models = [section(upload, "model") for upload in uploads]
        reports = [section(upload, "report") for upload in uploads]
        pairs = zip(reports, self.models, strict=True)
        self.reports = [federation.method.decode(report, model) for report, model in pairs]
        self.questions = [self._questions(k) for k in EVERYBODY]
        self.before = [self.ask(k, self.sent) for k in EVERYBODY]

    @torch.no_grad()
    def at(self, noise: str, z: float | None) -> Findings:
        models, reports = (self.models, self.reports) if z is None else self.with_noise(z)
        after = [self.ask(k, models[k]) for k in EVERYBODY]
        mean = {name: torch.stack([model[name] for model in models[:CLIENTS]]).mean(0) for name in self.sent}
        together = [self.ask(k, mean) for k in THEIRS]
        found: Findings = {}
        for view in self.views:
            rows = torch.stack([view.rows(models[k], reports[k], self.sent) for k in EVERYBODY])
            found[view.name, noise] = self.classes(rows) | self.membership(view, rows, after, together)
        return found

    def with_noise(self, z: float) -> tuple[list[Tensors], list[Tensors]]:
        """Uploads as they would leave clients that clip and add noise themselves."""
        rng, names = torch.Generator().manual_seed(int(self.rng.integers(2**31))), list(self.sent)
        changes = [torch.cat([(model[n] - self.sent[n]).flatten() for n in names]) for model in self.models]
        models = []
        for change in clipped_with_noise(changes, z, rng):
            parts = change.split([self.sent[n].numel() for n in names])
            model = {n: self.sent[n] + part.view_as(self.sent[n]) for n, part in zip(names, parts, strict=True)}
            models.append(wire.non_negative(model))
        kinds = [name for name in self.reports[0] if name != "counts"]
        noisy = [clipped_with_noise([report[name] for report in self.reports], z, rng) for name in kinds]
        return models, [dict(zip(kinds, values, strict=True)) for values in zip(*noisy, strict=True)]

    def classes(self, rows: Tensor) -> dict[str, float]:
        """The share of each class at a client, by a forest that learnt from the attacker's own clients."""
        usual = rows[CLIENTS:].mean(0)  # of each class
        along = (rows * usual).sum(2) / usual.norm(dim=1).clamp_min(1e-12)
        length = rows.norm(dim=2)
        others = length.sum(1, keepdim=True).clamp_min(1e-12)
        signs = torch.stack([length, length / others, along, cosine_similarity(rows, usual[None], dim=2)], -1)
        shares = (self.counts / self.counts.sum(1, keepdim=True)).numpy()
        forest = RandomForestRegressor(200, min_samples_leaf=3, random_state=0)
        forest.fit(signs[CLIENTS:].flatten(0, 1).numpy(), shares[CLIENTS:].ravel())
        guess, truth = forest.predict(signs[:CLIENTS].flatten(0, 1).numpy()), shares[:CLIENTS].ravel()
        return {
            "which_classes_auc": float(roc_auc_score(truth > 0, guess)),
            "shares_correlation": float(np.corrcoef(guess, truth)[0, 1]),
            "shares_error": float(np.abs(guess - truth).mean()),
            "shares_error_of_a_constant": float(np.abs(shares[CLIENTS:].mean() - truth).mean()),
        }

    def membership(self, view: View, rows: Tensor, after: list[Asked], together: list[Asked]) -> dict[str, Any]:
        """The score that tells best for the attacker's own clients, tried on the others. Within a class of a client, so
        that which classes it has is not what is told. And the same from the mean of all clients, which is what
        secure aggregation leaves to see.
        """
        y = [self.questions[k][1] for k in EVERYBODY]
        scored = [view.scores(rows[k], y[k], after[k], self.before[k]) for k in EVERYBODY]
        rehearsed = {name: self.told({k: scored[k][name] for k in OURS})["all"] for name in scored[0]}
        best = max(rehearsed, key=lambda name: abs(rehearsed[name] - 0.5))
        sign = 1 if rehearsed[best] >= 0.5 else -1
        told = self.told({k: sign * scored[k][best] for k in THEIRS})
        held = (self.counts[:CLIENTS] > 0)[:, :, None]
        mean = (rows[:CLIENTS] * held).sum(0) / held.sum(0).clamp_min(1)
        of_all = {k: sign * view.scores(mean, y[k], together[k], self.before[k])[best] for k in THEIRS}
        in_sum = self.told(of_all)["all"]
        return {"membership_auc": told.pop("all"), "membership_by_count": told, "membership_in_sum_auc": in_sum}

    @torch.no_grad()
    def ask(self, k: int, model: Tensors) -> Asked:
        x, y, _ = self.questions[k]
        copy_into(model_tensors(self.net), model)
        z = self.net.eval().features(x)
        logits = self.net.classify(z)
        residuals = torch.softmax(logits, 1) - one_hot(y, self.net.num_classes)
        losses = cross_entropy(logits, y, reduction="none").nan_to_num(0, 0, 0)
        return Asked(z, residuals, losses, model["classifier.weight"])

    def _questions(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, y, was it in: the client's own samples, and for each of its classes some of the attacker's."""
        pool = [j for j in OURS if j != k]
        x, y = torch.cat([self.x[j] for j in pool]), torch.cat([self.y[j] for j in pool])
        chosen = [self.rng.permutation((y == c).nonzero()[:, 0].numpy())[:STRANGERS] for c in self.y[k].unique()]
        rows = torch.from_numpy(np.concatenate(chosen))
        was_in = torch.cat([torch.ones(len(self.y[k])), torch.zeros(len(rows))]).bool()
        return torch.cat([self.x[k], x[rows]]), torch.cat([self.y[k], y[rows]]), was_in

    def told(self, scores: dict[int, Tensor]) -> dict[str, float]:
        """AUC within each class of each client, by how many samples the client has of it; the mean over members."""
        found: dict[str, list[tuple[float, int]]] = {"all": [], **{bucket: [] for bucket in BUCKETS}}
        for k, values in scores.items():
            _, y, was_in = self.questions[k]
            for c in y.unique():
                own, other = values[(y == c) & was_in], values[(y == c) & ~was_in]
                one = auc(own, other), len(own)
                found["all"].append(one)
                found[next(b for b, (low, high) in BUCKETS.items() if low <= len(own) <= high)].append(one)
        return {name: sum(a * n for a, n in pairs) / sum(n for _, n in pairs) for name, pairs in found.items() if pairs}


def auc(own: Tensor, other: Tensor) -> float:
    """How often a member scores above a stranger; a draw is half."""
    return float(((own[:, None] > other).double() + (own[:, None] == other).double() / 2).mean())


def clipped_with_noise(values: Sequence[Tensor], z: float, rng: torch.Generator) -> list[Tensor]:
    """Each clipped to the median norm, with Gaussian noise of z * sqrt(groups) * clip."""
    clip = statistics.median(float(value.norm()) for value in values)
    shrunk = [value * min(1.0, clip / max(float(value.norm()), 1e-30)) for value in values]
    return [value + z * GROUPS**0.5 * clip * torch.randn(value.shape, generator=rng) for value in shrunk]


def _mean(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _mean([value[name] for value in values if name in value]) for name in names}
    return round(statistics.mean(values), 3)


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("what is seen", lambda row: row["view"]),
    ("noise", lambda row: row["noise"]),
    ("which classes: AUC", lambda row: f"{row['which_classes_auc']:.2f}"),
    ("shares: r", lambda row: f"{row['shares_correlation']:.2f}"),
    ("shares: error", lambda row: f"{row['shares_error']:.3f} ({row['shares_error_of_a_constant']:.3f})"),
    ("member: AUC", lambda row: f"{row['membership_auc']:.2f}"),
    *((f"class of {b}", lambda row, b=b: f"{row['membership_by_count'][b]:.2f}") for b in BUCKETS),
    ("in the sum of all", lambda row: f"{row['membership_in_sum_auc']:.2f}"),
)


def show(found: dict[str, Any], console: Console) -> None:
    console.print(f"{found['about']}; mean over seeds {found['seeds']}. AUC 0.5: a coin", highlight=False)
    console.print(f"{'':28}which classes   shares   member   class of 1   in the sum of all", highlight=False)
    for row in found["rows"]:
        values = (row["which_classes_auc"], row["shares_correlation"], row["membership_auc"])
        cells = f"{values[0]:13.2f}{values[1]:9.2f}{values[2]:9.2f}"
        cells += f"{row['membership_by_count']['1']:13.2f}{row['membership_in_sum_auc']:20.2f}"
        console.print(f"{row['view']:16} {row['noise']:9} {cells}", highlight=False)


def markdown(found: dict[str, Any]) -> str:
    lines = [[name for name, _ in COLUMNS], ["---"] * len(COLUMNS)]
    lines += [[cell(row) for _, cell in COLUMNS] for row in found["rows"]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{found['about']}; mean over seeds {found['seeds']}.\n\n{table}\n"
