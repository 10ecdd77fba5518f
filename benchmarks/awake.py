"""What could make gradient matching matter: FedHPro with other targets, other steps and other losses, one switch each.

    python benchmarks/matrix.py results/awake.json OUT --parallel 2

knows the method `awake`. With the defaults it is FedHPro as printed; docs/matching.md has what came out. For gradients
with respect to the classifier's weights a client sends C x d numbers of each class, in place of d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhpro import equations as eq
from fedhpro.methods.base import Client, Count, Net, Tensors
from fedhpro.methods.fedhpro_global import orthogonal
from fedhpro.methods.fedhpro_released import weight_gradients
from fedhpro.methods.fedhpro_variants import FedHProVariants


@dataclass(frozen=True)
class Awake(FedHProVariants):
    name = "awake"

    match_on: Literal["features", "weights", "both", "frame"] = "features"  # gradients with respect to z, W or both;
    # "frame": no steps: the orthogonal frame nearest to the hard samples' means, which the gradients of W carry
    match_by: Literal["cosine", "distance"] = "cosine"  # direction, or magnitude too
    taken_at: Literal["trained", "sent"] = "trained"  # the clients' models, or the sent one: one h* on both sides
    adam: bool = False  # a step of the same size in every coordinate, also outside the row space of W
    by: Literal["all", "fifths", "size"] = "all"  # whom vector i answers to: all clients; clients i, i + I, ...; or
    # those of the i-th size, which in digits-lite are those of a domain
    spread: float = 0.0  # weight in matching of the mean squared cosine between two vectors of a class
    keep: float = 0.0  # momentum of the target from round to round
    until: Count = 0  # the last round that matches; 0: all do
    turned: bool = False  # each class matches the gradients of the one before it: a control that knows nothing
    non_negative: bool = False  # S as features behind a ReLU are
    unit_margin: bool = False  # Eq 10 of unit vectors, which does not saturate Eq 12
    hpal_mean: bool = False  # Eq 13 as a mean over d

    @property
    def of_weights(self) -> bool:
        return self.match_on != "features"

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        state = super().server_state(net, rng)
        if self.non_negative:
            state["S"] = state["S"].abs()
        state |= {"count": torch.zeros(()), "sent_weight": net.classifier.weight.detach().clone()}
        state["sent_bias"] = net.classifier.bias.detach().clone()
        return state

    def prepare(self, client: Client) -> Tensors:
        context = super().prepare(client)
        if self.taken_at == "sent":
            context |= self.class_gradients(*client.features(), client.net)
        return context

    def report_gradients(self, features: object, net: Net, context: Tensors) -> Tensors:
        if self.taken_at == "sent":
            return {name: context[name] for name in ("gradients", "counts", "weight_gradients") if name in context}
        return super().report_gradients(features, net, context)  # type: ignore[arg-type]

    def class_gradients(self, z: Tensor, y: Tensor, net: Net) -> Tensors:
        sent = super().class_gradients(z, y, net)
        if self.of_weights:
            sent["weight_gradients"] = weight_gradients(z, y, net.classifier)
        return sent

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        new = {"sent_weight": model["classifier.weight"], "sent_bias": model["classifier.bias"]}
        h = new if self.taken_at == "trained" else state
        new["count"] = state["count"] + 1
        if not self.M or (self.until and new["count"] > self.until):
            return state | new, {}
        names = {"features": ["gradients"], "both": ["gradients", "weight_gradients"]}
        found = [reports[name].flatten(2) for name in names.get(self.match_on, ["weight_gradients"])]
        held = reports["counts"] > 0
        groups = {"all": torch.zeros(len(held)), "fifths": torch.arange(len(held)) % self.I}
        groups["size"] = reports["samples"].unique(return_inverse=True)[1]
        targets = [grouped(each, held, groups[self.by], 1 if self.by == "all" else self.I) for each in found]
        if self.turned:
            targets, held = [target.roll(1, 0) for target in targets], held.roll(1, 1)
        if self.keep:
            before = [state.get(f"target{i}", target) for i, target in enumerate(targets)]
            targets = [self.keep * old + (1 - self.keep) * target for old, target in zip(before, targets, strict=True)]
            new |= {f"target{i}": target for i, target in enumerate(targets)}
        if self.match_on == "frame":
            C, d = held.shape[1], state["S"].shape[2]
            rows = -targets[0][:, 0].view(C, C, d)[torch.arange(C), torch.arange(C)]
            new["S"] = orthogonal(F.normalize(rows, dim=1)[:, None]) * self.hyper_scale
        else:
            new |= self.matched(state["S"], targets, held.any(0), h["sent_weight"], h["sent_bias"])
        return state | new, {}

    def matched(self, S: Tensor, targets: list[Tensor], present: Tensor, weight: Tensor, bias: Tensor) -> Tensors:
        S = S.clone().requires_grad_()
        descent = (torch.optim.Adam if self.adam else torch.optim.SGD)([S], self.match_lr)
        losses = []
        for _ in range(self.M + 1):
            with torch.enable_grad():
                loss = self.distance(S, targets, weight, bias)[present].sum()
            losses.append(loss.detach() / present.sum())
            if len(losses) <= self.M:
                (S.grad,) = torch.autograd.grad(loss, S)
                descent.step()
                if self.non_negative:
                    S.data.clamp_min_(0)
        return {"S": S.detach(), "log/L_GM_start": losses[0], "log/L_GM": losses[-1]}

    def distance(self, S: Tensor, targets: list[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
        """Of each class [C]: Eq 8, or its likes, summed over what is matched."""
        residuals = torch.softmax(S @ weight.T + bias, 2) - torch.eye(len(S), device=S.device)[:, None]
        of_features, of_weights = residuals @ weight, torch.einsum("cij,cid->cijd", residuals, S).flatten(2)
        kinds = {"features": [of_features], "weights": [of_weights], "both": [of_features, of_weights]}[self.match_on]
        total = torch.zeros(len(S), device=S.device)
        for ours, target in zip(kinds, targets, strict=True):
            ours = ours.mean(1, keepdim=True) if self.by == "all" else ours
            if self.match_by == "cosine":
                total = total + (1 - F.cosine_similarity(ours, target, dim=2, eps=1e-20)).mean(1)
            else:
                total = total + ((ours - target).square().sum(2) / target.square().sum(2).clamp_min(1e-20)).mean(1)
        units = F.normalize(S, dim=2)
        return total + self.spread * (units @ units.mT).square().mean((1, 2))

    def margin_of(self, means: Tensor, counts: Tensor) -> Tensor:
        return super().margin_of(F.normalize(means, dim=1) if self.unit_margin else means, counts)

    def align(self, z: Tensor, y: Tensor, context: Tensors) -> Tensor:
        return super().align(z, y, context) / (z.shape[1] if self.hpal_mean else 1)


def grouped(values: Tensor, held: Tensor, of: Tensor, groups: int) -> Tensor:
    """Means over the clients of each group that hold the class -> [C, groups, n]; over all where none does."""
    overall = eq.mean_gradients(values, held.long())[0]
    parts = [eq.mean_gradients(values[of == i], held[of == i].long()) for i in range(groups) if (of == i).any()]
    parts += [(overall, held.any(0))] * (groups - len(parts))
    return torch.stack([torch.where(there[:, None], mean, overall) for mean, there in parts], 1)
