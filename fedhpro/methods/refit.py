"""FedHPro with the averaged classifier h* fitted again at the server, on one point per client and class.

The row of class c in the gradient of cross-entropy with respect to W is, from the samples of class c, -sum_i (1 - p_ic)
z_i. One point that stands for them has this direction: s = sum_i (1 - p_ic) z_i / sum_i (1 - p_ic), the mean of the
samples that h* still gets wrong. That is gradient matching on W in closed form: no steps, no rate and no start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import equations as eq
from .base import Client, Tensors
from .fedhpro_global import FedHProGlobal


@dataclass(frozen=True)
class FedHProRefit(FedHProGlobal):
    refit: Literal["off", "means", "gradients"] = "off"  # h* fitted again on the clients' class means, or hard means

    def prepare(self, client: Client) -> Tensors:
        return super().prepare(client) | (self.points(client) if self.refit != "off" else {})

    def points(self, client: Client) -> Tensors:
        """Of the received model, the same one at every client: what h* is fitted to again."""
        (z, y), h = client.features(), client.net.classifier
        if self.refit == "means":
            points, counts = eq.class_means(z, y, client.net.num_classes)  # Eq 2
        else:
            points, counts = hard_means(z, y, h.weight.detach(), h.bias.detach())
        return {"points": points, "point_counts": counts}

    def report(self, client: Client, context: Tensors) -> Tensors:
        return super().report(client, context) | {k: context[k] for k in ("points", "point_counts") if k in context}

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        override: Tensors = {}
        if self.refit != "off":
            h = model["classifier.weight"], model["classifier.bias"]
            weight, bias = refitted(reports["points"], reports["point_counts"] > 0, *h)
            override = {"classifier.weight": weight, "classifier.bias": bias}
        return super().aggregate(state, model | override, reports, rng)[0], override


def hard_means(z: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """s of each class -> points[C, d], and how many samples they stand for [C]."""
    C = len(weight)
    missing = 1 - torch.softmax(F.linear(z, weight, bias), 1).gather(1, y[:, None])
    missing = missing.clamp_min(1e-6)  # of samples that are all fitted, the plain mean
    means, counts = eq.class_means(torch.cat([missing * z, missing], 1), y, C)
    return means[:, :-1] / means[:, -1:].clamp_min(1e-12), counts


def refitted(points: Tensor, held: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Adam from h* on the points[K, C, d] of the classes that each client holds [K, C], all of one weight."""
    labels = torch.arange(len(weight), device=weight.device).expand(held.shape)[held]
    return fit(points[held], labels, None, weight, bias)


def fit(
    x: Tensor, y: Tensor, sample_weight: Tensor | None, weight: Tensor, bias: Tensor, steps: int = 100, lr: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Adam on the (weighted) mean cross-entropy of a linear classifier, all points in every step."""
    W, b = weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([W, b], lr)
    share = torch.full_like(x[:, 0], 1 / len(x)) if sample_weight is None else sample_weight / sample_weight.sum()
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            (F.cross_entropy(F.linear(x, W, b), y, reduction="none") * share).sum().backward()
            optimizer.step()
    return W.detach(), b.detach()
