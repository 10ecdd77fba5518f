"""Equations 2 to 13 of the FedHPro paper, in order, as pure functions.

Shapes: n samples, C classes, K clients, I hyper-prototypes per class, d features. A class that is absent carries a
count of 0 or a False in `present`; its row is never averaged into anything. All functions work in float32 and float64,
on CPU and CUDA, and have correct gradients.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Weighting = Literal["weighted", "paper", "uniform"]


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Eq 2: the mean feature of each class -> means[C, d], counts[C]; an absent class has mean 0 and count 0."""
    counts = count_classes(labels, num_classes)
    return _sum_by_class(features, labels, num_classes) / counts.clamp_min(1)[:, None], counts


def global_prototypes(means: Tensor, counts: Tensor, weighting: Weighting = "weighted") -> tuple[Tensor, Tensor]:
    """Eq 4: prototypes[C, d] from the clients' means[K, C, d] and counts[K, C], and present[C].

    "weighted" is sum_k n_k^c / n^c p_k^c. "paper" is that times 1 / |A^c|, as Eq 4 is printed: it shrinks a class by
    the number of clients that hold it. "uniform" gives every client that holds the class the same weight.
    """
    held = (counts > 0).to(means.dtype)
    if weighting == "uniform":
        weights = held / held.sum(0).clamp_min(1)
    elif weighting in ("weighted", "paper"):
        weights = counts.to(means.dtype) / counts.sum(0).clamp_min(1)
        if weighting == "paper":
            weights = weights / held.sum(0).clamp_min(1)
    else:
        raise ValueError(f"weighting is {weighting!r}; allowed are 'weighted', 'paper', 'uniform'")
    means = torch.where(held[:, :, None] > 0, means, 0.0)
    return torch.einsum("kc,kcd->cd", weights, means), held.sum(0) > 0


def class_gradients(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Eq 5: the mean gradient of cross-entropy at the features of each class -> gradients[C, d], counts[C].

    For a linear classifier the gradient at z is W^T (softmax - onehot), so the mean over a class is W^T times the mean
    of its residuals: one (C x C) matrix carries everything.
    """
    residuals, counts = class_residuals(features, labels, weight, bias)
    return residuals @ weight, counts


def class_residuals(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Mean softmax minus one-hot at the features of each class -> residuals[C, C], counts[C]: Eq 5 without its W."""
    probabilities, counts = class_means(torch.softmax(features @ weight.T + bias, dim=1), labels, len(weight))
    return _minus_onehot(probabilities), counts


def mean_gradients(gradients: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Eq 6: the plain mean over the clients that hold the class -> gradients[C, d], present[C]."""
    return global_prototypes(gradients, counts, "uniform")


def hyper_gradients(hyper: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Eq 7: the mean gradient of cross-entropy at the hyper-prototypes[C, I, d] of each class -> gradients[C, d]."""
    return _minus_onehot(torch.softmax(hyper @ weight.T + bias, dim=2).mean(1)) @ weight


def matching_loss(target: Tensor, gradients: Tensor) -> Tensor:
    """Eq 8: one minus the cosine between target[C, d] and gradients[C, d] -> loss[C]; 0 where the target is 0."""
    loss = 1 - (_direction(target) * _direction(gradients)).sum(1)
    return torch.where(target.abs().amax(1) > 0, loss, 0.0)


def match(
    hyper: Tensor, target: Tensor, present: Tensor, weight: Tensor, bias: Tensor, steps: int = 30, lr: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Eq 9: `steps` of gradient descent on Eq 8 -> hyper[C, I, d] and trace[steps, C], the loss before each step.

    A class that is not present, or whose target is 0, stays untouched and has loss 0. The descent direction is written
    out: with u and v the directions of target and gradient, dL/dg = (v (u.v) - u) / |g|, and dL/ds_i follows through
    the softmax of s_i alone. No second backward pass is needed. Every step stays in the row space of W: what is kept is
    how much of each row was subtracted, and W W^T says what that does to the logits.
    """
    rate = lr / hyper.shape[1]
    active = present & (target.abs().amax(1) > 0)
    goal = torch.where(active[:, None], _direction(target), 0.0)  # a class without a goal has no slope
    logits, gram = hyper @ weight.T + bias, weight @ weight.T
    least = 1e3 * torch.finfo(hyper.dtype).tiny  # of a gradient: below it the slope of a class that is fitted overflows
    moved, trace = torch.zeros_like(logits), []
    for _ in range(steps):
        probabilities = torch.softmax(logits, dim=2)  # [C, I, C]
        gradients = _minus_onehot(probabilities.mean(1)) @ weight  # Eq 7
        length = _length(gradients).clamp_min(least)
        ours = gradients / length
        cosine = (goal * ours).sum(1, keepdim=True)
        trace.append(torch.where(active, 1 - cosine[:, 0], 0.0))  # Eq 8
        slope = rate * (ours * cosine - goal) / length @ weight.T  # of the loss, at the mean probabilities [C, C]
        slope = slope - slope.diagonal()[:, None]  # changes nothing but the rounding, where the own class is certain
        step = probabilities * (slope[:, None] - torch.einsum("cij,cj->ci", probabilities, slope)[:, :, None])
        moved = moved + step
        logits = logits - step @ gram
    return hyper - moved @ weight, torch.stack(trace) if trace else target.new_zeros(0, len(target))


def client_margin(means: Tensor, counts: Tensor) -> Tensor:
    """Eq 10: d_k, the sum of distances over ordered pairs of present classes over (C - 1)^2; 0 below two classes."""
    present = (counts > 0).to(means.dtype)
    means = torch.where(present[:, None] > 0, means, 0.0)
    distances = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist")
    return (distances * present[:, None] * present).sum() / max(1, len(means) - 1) ** 2


def similarity(features: Tensor, hyper: Tensor) -> Tensor:
    """Eq 11: the mean cosine between a feature and the hyper-prototypes of each class -> s[n, C]."""
    return cosines(features, mean_directions(hyper))


def mean_directions(hyper: Tensor) -> Tensor:
    """The mean unit vector of each class [C, d], which is all that Eq 11 needs of the hyper-prototypes."""
    return F.normalize(hyper, dim=2).mean(1)


def cosines(features: Tensor, directions: Tensor) -> Tensor:
    return F.normalize(features, dim=1) @ directions.T


def hpcl(
    features: Tensor,
    labels: Tensor,
    hyper: Tensor,
    margin: Tensor | float,
    tau: float = 0.05,
    present: Tensor | None = None,
) -> Tensor:
    """Eq 12, mean over the batch: softplus(logsumexp_{j != c}(s_j / tau) - s_c / tau + margin / tau).

    The printed exp((s + margin) / tau) overflows from a margin of about 4; this form is finite for any. With `present`,
    classes without anchors are no negatives, and a sample of such a class counts 0.
    """
    margin = torch.as_tensor(margin, dtype=features.dtype, device=features.device)
    return contrast(features, labels, mean_directions(hyper), margins(margin, hyper, present), tau)


def margins(margin: Tensor, hyper: Tensor, present: Tensor | None = None) -> Tensor:
    """What Eq 12 adds to the similarity of a sample of class c with class j, [C, C]: nothing where j is c, -inf where
    one of them has no anchors, the margin elsewhere.
    """
    own = torch.eye(len(hyper), dtype=torch.bool, device=hyper.device)
    both = torch.ones_like(own) if present is None else present[:, None] & present
    return torch.where(both, margin, -torch.inf).masked_fill(own, 0.0)


def contrast(features: Tensor, labels: Tensor, directions: Tensor, margins: Tensor, tau: float) -> Tensor:
    """Eq 12 from what is the same in every step: softplus(logsumexp(others) - own) is a cross-entropy."""
    return F.cross_entropy((cosines(features, directions) + margins[labels]) / tau, labels)


def hpal(features: Tensor, labels: Tensor, hyper: Tensor, present: Tensor | None = None) -> Tensor:
    """Eq 13: the Huber distance to the mean hyper-prototype of the class, summed over d, mean over the batch."""
    return align(features, labels, hyper.mean(1), present)


def align(
    features: Tensor, labels: Tensor, means: Tensor, present: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Eq 13 from the means[C, d]; a sample whose class has none counts 0 and stays in the batch's mean. weights[n]:
    how much each sample counts, 1 where not given.
    """
    target = means[labels]
    if present is not None:
        target = torch.where(present[labels][:, None], target, features.detach())
    if weights is not None:
        return (F.huber_loss(features, target, reduction="none").sum(1) * weights).mean()
    return F.huber_loss(features, target, reduction="sum") / len(labels)


def _minus_onehot(probabilities: Tensor) -> Tensor:
    """Mean probabilities[C, C] of each class minus the one-hot of its own; a row of zeros stays.

    The own entry is minus the sum of the others: in float32, p - 1 is 0 long before they are.
    """
    others = probabilities - torch.diag(probabilities.diagonal())
    return others - torch.diag(others.sum(1))


def count_classes(labels: Tensor, num_classes: int) -> Tensor:
    """Samples per class [C]."""
    if labels.is_cuda:  # bincount would wait for the GPU
        return F.one_hot(labels, num_classes).sum(0)
    return torch.bincount(labels, minlength=num_classes)


def _sum_by_class(values: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    if values.is_cuda:  # index_add_ is not deterministic there
        return F.one_hot(labels, num_classes).to(values.dtype).T @ values
    return values.new_zeros(num_classes, values.shape[1]).index_add(0, labels, values)


def _length(v: Tensor) -> Tensor:
    """Row norms [C, 1] that do not underflow for the tiny gradients of fitted classes; 1 for a row of zeros."""
    largest = v.abs().amax(1, keepdim=True).detach()
    scale = torch.where(largest > 0, largest, 1.0)
    length = torch.linalg.vector_norm(v / scale, dim=1, keepdim=True) * scale
    return torch.where(largest > 0, length, 1.0)


def _direction(v: Tensor) -> Tensor:
    return v / _length(v)
