"""The averaged classifier h*, fitted again at the server on one point per client and class.

The row of class c in the gradient of cross-entropy with respect to W is, from the samples of class c, -sum_i (1 - p_ic)
z_i. One point that stands for them has this direction: s = sum_i (1 - p_ic) z_i / sum_i (1 - p_ic), the mean of the
samples that h* still gets wrong. That is gradient matching on W in closed form: no steps, no rate and no start.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import equations as eq


def hard_means(z: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """s of each class -> points[C, d], and how many samples they stand for [C]."""
    C = len(weight)
    missing = 1 - torch.softmax(F.linear(z, weight, bias), 1).gather(1, y[:, None])
    missing = missing.clamp_min(1e-6)  # of samples that are all fitted, the plain mean
    means, counts = eq.class_means(torch.cat([missing * z, missing], 1), y, C)
    return means[:, :-1] / means[:, -1:].clamp_min(1e-12), counts


def refitted(
    points: Tensor, held: Tensor, weight: Tensor, bias: Tensor, steps: int = 100, lr: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Adam from h* on the points[K, C, d] of the classes that each client holds [K, C], all of one weight."""
    labels = torch.arange(len(weight), device=weight.device).expand(held.shape)[held]
    return fit(points[held], labels, None, weight, bias, steps, lr)


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
