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


def align(z: Tensor, y: Tensor, H: Tensor, present: Tensor | None = None) -> Tensor:
    """Eq 13 on unit vectors, those of H among them, and as a mean over d."""
    return eq.align(F.normalize(z, dim=1), y, H, present) / z.shape[1]


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


def weight_gradients(z: Tensor, y: Tensor, h: torch.nn.Linear) -> Tensor:
    """For each class, the mean gradient of cross-entropy with respect to W [C, C, d]: mean of (p - e_c) z^T."""
    C = len(h.weight)
    residuals = torch.softmax(F.linear(z, h.weight, h.bias).detach(), 1) - F.one_hot(y, C)
    return torch.stack([residuals[y == c].T @ z[y == c] / (y == c).sum().clamp_min(1) for c in range(C)])


def retrain(state: Tensors, reports: Tensors, rng: torch.Generator) -> tuple[Tensors, Tensors]:
    """Match synthetic features to the clients' classifier gradients, then train a new classifier on them."""
    held = (reports["counts"] > 0).to(state["synthetic"].dtype)
    target = torch.einsum("kc,kcrd->crd", held / held.sum(0).clamp_min(1), reports["weight_gradients"])
    target = target * (held.sum(0) > 0)[:, None, None]
    features = match_features(state["synthetic"], target, state["sent_weight"], state["sent_bias"])
    weight, bias = fit_classifier(features, rng)
    new = state | {"synthetic": features, "sent_weight": weight, "sent_bias": bias}
    return new, {"classifier.weight": weight, "classifier.bias": bias}


def match_features(
    features: Tensor, target: Tensor, weight: Tensor, bias: Tensor, steps: int = 100, lr: float = 0.1
) -> Tensor:
    """Descent on the sum over classes and rows of 1 - cos(target, weight gradient at the features[C, n, d])."""
    n, onehot = features.shape[1], torch.eye(len(weight))[:, None]
    goal = F.normalize(target, dim=2, eps=1e-8)  # a row of zeros pulls nowhere
    for _ in range(steps):
        probabilities = torch.softmax(features @ weight.T + bias, 2)
        residuals = probabilities - onehot
        gradients = residuals.mT @ features / n  # [C, C, d]
        length = torch.linalg.vector_norm(gradients, dim=2, keepdim=True).clamp_min(1e-8)
        ours = gradients / length
        slope = (ours * (goal * ours).sum(2, keepdim=True) - goal) / (n * length)
        through = features @ slope.mT
        through = probabilities * (through - (probabilities * through).sum(2, keepdim=True))
        features = features - lr * (residuals @ slope + through @ weight)
    return features


def fit_classifier(
    features: Tensor, rng: torch.Generator, epochs: int = 100, batch: int = 50, lr: float = 0.01
) -> tuple[Tensor, Tensor]:
    """SGD on cross-entropy from a fresh linear layer, its gradient written out; the bias is the last column."""
    C, n, d = features.shape
    x, onehot = F.pad(features.reshape(C * n, d), (0, 1), value=1.0), torch.eye(C).repeat_interleave(n, 0)
    weight, bias = 2 * torch.rand(C, d, generator=rng) - 1, 2 * torch.rand(C, 1, generator=rng) - 1
    layer = torch.cat([weight, bias], 1) * d**-0.5  # torch's default for a linear layer
    for _ in range(epochs):
        for rows in torch.randperm(C * n, generator=rng).split(batch):
            residuals = torch.softmax(x[rows] @ layer.T, 1) - onehot[rows]
            layer = layer.addmm(residuals.T, x[rows], alpha=-lr / len(rows))
    return layer[:, :-1].contiguous(), layer[:, -1].contiguous()
