"""What the authors' released code computes where it departs from the paper: pieces for fedhpro_variants.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import equations as eq
from .base import Net, Tensors


def inner_margin(means: Tensor) -> Tensor:
    """Eq 10 with inner products where the paper has distances; absent means are 0."""
    products = means @ means.T
    return (products.sum() - products.trace()) / max(1, len(means) - 1) ** 2


def hpcl(z: Tensor, y: Tensor, S: Tensor, margin: Tensor, tau: float, present: Tensor | None = None) -> Tensor:
    """-log(exp(s_c / tau) / (sum_j exp(s_j / tau) + margin)): the margin as a number beside the exponentials."""
    s = eq.similarity(z, S) / tau
    own, everything = s.gather(1, y[:, None])[:, 0], s
    if present is not None:
        everything = s.masked_fill(~present, torch.finfo(s.dtype).min / 2)
    beside = torch.log(margin.clamp_min(torch.finfo(s.dtype).tiny)).expand(len(s), 1)
    loss = torch.logsumexp(torch.cat([everything, beside], 1), 1) - own
    return (loss if present is None else loss * present[y]).mean()


def hpal(z: Tensor, y: Tensor, S: Tensor, present: Tensor | None = None) -> Tensor:
    """Eq 13 on unit vectors, and as a mean over d."""
    H = F.normalize(S.mean(1), dim=1)[:, None]
    return eq.hpal(F.normalize(z, dim=1), y, H, present) / z.shape[1]


def sign_match(
    S: Tensor, target: Tensor, present: Tensor, weight: Tensor, bias: Tensor, steps: int, lr: float
) -> Tensor:
    """Descent on sum_q [1 - g_q s_q / (|g_q s_q| + 1e-6)], the released code's row cosine of single coordinates."""
    active = present & (target.abs().amax(1) > 0)
    with torch.enable_grad():
        for _ in range(steps):
            S = S.detach().requires_grad_()
            product = target * eq.hyper_gradients(S, weight, bias)
            (slope,) = torch.autograd.grad((1 - product / (product.abs() + 1e-6))[active].sum(), S)
            S = S - lr * slope
    return S.detach()


# Re-training the classifier, as in Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training
# with Federated Features (CReFF, IJCAI 2022), which the released code is built on.


def retraining_state(net: Net, rng: torch.Generator, per_class: int = 50) -> Tensors:
    """Synthetic features, and the classifier at which the clients take their gradients: the one last sent."""
    weight, bias = net.classifier.weight.detach().clone(), net.classifier.bias.detach().clone()
    features = torch.randn(net.num_classes, per_class, net.dim, generator=rng)
    return {"synthetic": features, "sent_weight": weight, "sent_bias": bias}


def weight_gradients(z: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """For each class, the mean gradient of cross-entropy with respect to W [C, C, d]: mean of (p - e_c) z^T."""
    C = len(weight)
    residuals = torch.softmax(z @ weight.T + bias, 1) - F.one_hot(y, C)
    return torch.stack([residuals[y == c].T @ z[y == c] / (y == c).sum().clamp_min(1) for c in range(C)])


def retrain(
    state: Tensors, reports: Tensors, rng: torch.Generator, steps: int = 100, epochs: int = 100, batch: int = 50
) -> tuple[Tensors, Tensors]:
    """Match synthetic features to the clients' classifier gradients row by row, then train a new classifier on them."""
    features, weight, bias = state["synthetic"], state["sent_weight"], state["sent_bias"]
    C, n, d = features.shape
    held = (reports["counts"] > 0).to(features.dtype)
    target = torch.einsum("kc,kcrd->crd", held / held.sum(0).clamp_min(1), reports["weight_gradients"])
    labels = torch.arange(C).repeat_interleave(n)
    onehot = torch.eye(C)[:, None]
    with torch.enable_grad():
        for _ in range(steps):
            features = features.detach().requires_grad_()
            residuals = torch.softmax(features @ weight.T + bias, 2) - onehot
            ours = residuals.transpose(1, 2) @ features / n
            loss = (1 - F.cosine_similarity(ours, target, dim=2))[held.sum(0) > 0].sum()
            features = features - 0.1 * torch.autograd.grad(loss, features)[0]
        x = features.detach().reshape(C * n, d)
        bound = d**-0.5
        weight = ((2 * torch.rand(C, d, generator=rng) - 1) * bound).requires_grad_()
        bias = ((2 * torch.rand(C, generator=rng) - 1) * bound).requires_grad_()
        optimizer = torch.optim.SGD([weight, bias], lr=0.01)
        for _ in range(epochs):
            for rows in torch.randperm(C * n, generator=rng).split(batch):
                optimizer.zero_grad()
                F.cross_entropy(x[rows] @ weight.T + bias, labels[rows]).backward()
                optimizer.step()
    weight, bias = weight.detach(), bias.detach()
    new = state | {"synthetic": features.detach(), "sent_weight": weight, "sent_bias": bias}
    return new, {"classifier.weight": weight, "classifier.bias": bias}
