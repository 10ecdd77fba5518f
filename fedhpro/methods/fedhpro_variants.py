"""FedHPro with every switch: the paper's Table 6, other starts of S, and what the authors' released code computes.

With the defaults this is FedHPro as printed, through the same lines of fedhpro.py. Preset `released` turns on what the
code does: gradients before training, on at most 100 augmented samples per class, divided by n twice; agreement of
signs instead of a cosine; weak losses; and a classifier re-trained at the server, which the paper does not mention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import equations as eq
from .base import Client, Count, Net, NonNegative, Tensors
from .fedhpro import FedHPro


@dataclass(frozen=True)
class FedHProVariants(FedHPro):
    """FedHPro: Federated Hyper-Prototype Learning via Gradient Matching (ICML 2026)."""

    name = "fedhpro"
    hyper_init: Literal["randn", "prototypes"] = "randn"  # "prototypes": the first round's P + hyper_scale * randn
    hyper_scale: NonNegative = 1.0  # standard deviation of the random start
    gradients: Literal["after", "before"] = "after"  # when Eq 5 is taken: after (paper) or before local training (code)
    gradient_samples: Count = 0  # at most so many augmented samples per class for Eq 5 (code: 100); 0: all, as they are
    gradient_scale: Literal["mean", "mean/n"] = "mean"  # "mean/n": divided by the number of samples twice (code)
    matching: Literal["cosine", "sign"] = "cosine"  # Eq 8 (paper), or agreement of signs per coordinate (code)
    hpcl_scale: Literal["mean", "mean/n"] = "mean"  # "mean/n": divided by the batch size twice (code)
    hpal_form: Literal["sum", "unit-mean"] = "sum"  # Eq 13 (paper), or of unit vectors and as a mean over d (code)
    hpal_warmup: Count = 0  # rounds over which the weight of HPAL grows to 1
    retrain_classifier: bool = False  # h* re-trained at the server on synthetic features (code; not in the paper)

    @property
    def uses_P(self) -> bool:
        return "global" in (self.hpcl, self.hpal) or self.hyper_init == "prototypes"

    def server_state(self, net: Net, rng: torch.Generator) -> Tensors:
        state = super().server_state(net, rng)
        state["S"] *= self.hyper_scale
        if self.uses_P:
            state["P"] = torch.zeros(net.num_classes, net.dim)
            state["present"] = torch.zeros(net.num_classes, dtype=torch.bool)
        if self.hpal_warmup:
            state["round"] = torch.tensor(1.0)
        return state | (retraining_state(net, rng) if self.retrain_classifier else {})

    def broadcast(self, state: Tensors) -> Tensors:
        sent = super().broadcast(state) | {k: state[k] for k in ("P", "present") if k in state}
        if self.hpal_warmup:
            sent["hpal_weight"] = torch.clamp(state["round"] / self.hpal_warmup, max=1.0)
        return sent

    def prepare(self, client: Client) -> Tensors:
        context = super().prepare(client)
        return context | (super().report(client, context) if self.gradients == "before" else {})

    def report(self, client: Client, context: Tensors) -> Tensors:
        early = ("gradients", "counts", "weight_gradients")
        sent = {k: context[k] for k in early if k in context} or super().report(client, context)
        if self.uses_P:
            z, y = client.features()
            sent["means"], sent["mean_counts"] = eq.class_means(z, y, client.net.num_classes)  # Eq 2
        return sent

    def class_gradients(self, client: Client) -> Tensors:
        z, y = client.features(limit=self.gradient_samples or None, augment=self.gradient_samples > 0)
        h = client.net.classifier.weight.detach(), client.net.classifier.bias.detach()
        gradients, counts = eq.class_gradients(z, y, *h)  # Eq 5
        if self.gradient_scale == "mean/n":
            gradients = gradients / counts.clamp_min(1)[:, None]
        extra = {"weight_gradients": weight_gradients(z, y, *h)} if self.retrain_classifier else {}
        return {"gradients": gradients, "counts": counts} | extra

    def aggregate(
        self, state: Tensors, model: Tensors, reports: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        override: Tensors = {}
        if self.uses_P:
            P, present = eq.global_prototypes(reports["means"], reports["mean_counts"])  # Eq 4
            if self.hyper_init == "prototypes":
                first = (present & ~state["present"])[:, None, None]
                state = state | {"S": state["S"] + torch.where(first, P[:, None], 0.0)}
            P = torch.where(present[:, None], P, state["P"])
            state = state | {"P": P, "present": state["present"] | present}
        if self.hpal_warmup:
            state = state | {"round": state["round"] + 1}
        if self.retrain_classifier:
            state, override = retrain(state, reports, rng)
        return super().aggregate(state, model | override, reports, rng)[0], override

    def anchors(self, which: str, context: Tensors) -> tuple[Tensor, Tensor | None]:
        """[C, I, d] and which classes have any: S, or P as a single vector per class."""
        if which == "global":
            return context["P"][:, None], context["present"]
        return context["S"], context["present"] if self.hyper_init == "prototypes" else None

    def margin_of(self, means: Tensor, counts: Tensor) -> Tensor:
        if self.margin != "denominator":
            return super().margin_of(means, counts)
        products = means @ means.T  # the code has inner products where Eq 10 has distances; absent means are 0
        return (products.sum() - products.trace()) / max(1, len(means) - 1) ** 2

    def contrast(self, z: Tensor, y: Tensor, context: Tensors) -> Tensor:
        S, present = self.anchors(self.hpcl, context)
        if self.margin == "denominator":
            loss = hpcl_with_margin_beside(z, y, S, context["margin"], self.tau)
        else:
            loss = eq.hpcl(z, y, S, context["margin"], self.tau, present)
        return loss / len(y) if self.hpcl_scale == "mean/n" else loss

    def align(self, z: Tensor, y: Tensor, context: Tensors) -> Tensor:
        S, present = self.anchors(self.hpal, context)
        weight = context.get("hpal_weight", 1.0)
        if self.hpal_form == "sum":
            return eq.hpal(z, y, S, present) * weight
        H = F.normalize(S.mean(1), dim=1)[:, None]
        return eq.hpal(F.normalize(z, dim=1), y, H, present) / z.shape[1] * weight

    def match(self, S: Tensor, target: Tensor, present: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.matching == "cosine":
            return super().match(S, target, present, weight, bias)
        return sign_match(S, target, present, weight, bias, self.M, self.match_lr)


def hpcl_with_margin_beside(z: Tensor, y: Tensor, S: Tensor, margin: Tensor, tau: float) -> Tensor:
    """-log(exp(s_c / tau) / (sum_j exp(s_j / tau) + margin)): the margin as a number beside the exponentials."""
    s = eq.similarity(z, S) / tau
    beside = torch.log(margin.clamp_min(torch.finfo(s.dtype).tiny)).expand(len(s), 1)
    return (torch.logsumexp(torch.cat([s, beside], 1), 1) - s.gather(1, y[:, None])[:, 0]).mean()


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
