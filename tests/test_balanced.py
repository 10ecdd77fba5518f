"""FedAvg with balanced=true: cross-entropy that knows the client's class frequencies."""

import math
from types import SimpleNamespace

import pytest
import torch
from test_fedhpro import terms_of

from fedhpro.methods.fedavg import FedAvg


def loss_of(counts, logits, labels):
    method = FedAvg(balanced=True)
    logits = torch.tensor(logits, requires_grad=True)
    context = method.prepare(SimpleNamespace(received={}, counts=torch.tensor(counts)))
    loss = method.loss(lambda x: x, {}, logits, torch.tensor(labels), context)["ce"]
    loss.backward()
    return loss.item(), logits.grad


def test_loss_by_hand_and_a_missing_class_is_left_alone():
    loss, slopes = loss_of([3, 1, 0], [[0.5, -1.0, 2.0], [1.5, 0.25, -3.0]], [0, 1])
    first = math.log(0.75 * math.exp(0.5) + 0.25 * math.exp(-1.0)) - math.log(0.75 * math.exp(0.5))
    second = math.log(0.75 * math.exp(1.5) + 0.25 * math.exp(0.25)) - math.log(0.25 * math.exp(0.25))
    assert loss == pytest.approx((first + second) / 2, rel=1e-6)
    assert slopes.isfinite().all() and (slopes[:, 2] == 0).all() and (slopes[:, :2] != 0).all()


def test_a_client_of_one_class_has_no_loss():
    loss, slopes = loss_of([0, 5, 0], [[3.0, -2.0, 1.0]], [1])
    assert loss == 0 and (slopes == 0).all()


def test_even_labels_change_nothing():
    _, slopes = loss_of([4, 4, 4], [[0.5, -1.0, 2.0]], [0])
    plain = torch.tensor([[0.5, -1.0, 2.0]], requires_grad=True)
    torch.nn.functional.cross_entropy(plain, torch.tensor([0])).backward()
    torch.testing.assert_close(slopes, plain.grad)


def test_without_it_fedavg_is_what_it_was():
    terms, _, _, context = terms_of(FedAvg(), {})
    assert set(terms) == {"ce"} and "prior" not in context
