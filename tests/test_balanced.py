"""balanced=true, for any method: cross-entropy that knows the client's class frequencies."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY

from fedhpro import methods, models, runs
from fedhpro.config import configure
from fedhpro.data.batches import Transform
from fedhpro.data.sources import IMAGENET_MEAN, IMAGENET_STD, Split
from fedhpro.randomness import generator
from fedhpro.training import LocalSettings, LocalTrainer

CLASSES = 3


def trained(method, labels, balanced):
    """A client's upload after one step on all of its samples, and the net that it trained."""
    chosen = methods.METHODS[method]()
    torch.manual_seed(0)
    net = models.build("resnet10", CLASSES, width=16)
    settings = LocalSettings(1, 1, 8, 0.01, "constant", 1.0, 1, 0.9, 0.0, "sgd", balanced)
    trainer = LocalTrainer(
        [net], chosen, chosen.exchanges[0], settings, Transform(IMAGENET_MEAN, IMAGENET_STD), [], {}, seed=0
    )
    state = chosen.server_state(net, generator(0, "state"))
    extras = {} if chosen.exchanges[0] == "nothing" else chosen.broadcast(state)
    x = torch.randint(0, 256, (len(labels), 3, 32, 32), generator=generator(0, "noise")).byte()
    sent = {f"extra/{name}": value for name, value in extras.items()}
    upload, _ = trainer.update_on(Split(x, torch.tensor(labels)), settings, 1, 0, sent, {})
    return upload, trainer.benches[0].net


def loss_of(counts, logits, labels):
    net = models.build("resnet10", CLASSES, width=16).train()
    net.prior = (torch.tensor(counts) / sum(counts)).log()
    logits = torch.tensor(logits, requires_grad=True)
    loss = F.cross_entropy(net.balanced(logits), torch.tensor(labels))
    loss.backward()
    return loss.item(), logits.grad


def test_loss_by_hand_and_a_missing_class_is_left_alone():
    loss, slopes = loss_of([3, 1, 0], [[0.5, -1.0, 2.0], [1.5, 0.25, -3.0]], [0, 1])
    first = math.log(0.75 * math.exp(0.5) + 0.25 * math.exp(-1.0)) - math.log(0.75 * math.exp(0.5))
    second = math.log(0.75 * math.exp(1.5) + 0.25 * math.exp(0.25)) - math.log(0.25 * math.exp(0.25))
    assert loss == pytest.approx((first + second) / 2, rel=1e-6)
    assert slopes.isfinite().all() and (slopes[:, 2] == 0).all() and (slopes[:, :2] != 0).all()


def test_even_labels_change_nothing():
    _, slopes = loss_of([4, 4, 4], [[0.5, -1.0, 2.0]], [0])
    plain = torch.tensor([[0.5, -1.0, 2.0]], requires_grad=True)
    F.cross_entropy(plain, torch.tensor([0])).backward()
    torch.testing.assert_close(slopes, plain.grad)


def test_a_model_that_does_not_train_says_what_it_is_sure_of_itself():
    net = models.build("resnet10", CLASSES, width=16).eval()
    z = torch.rand(2, net.dim, generator=generator(0, "z"))
    before = net.classify(z)
    net.prior = torch.tensor([0.0, -1.0, -torch.inf])
    assert torch.equal(net.classify(z), before)
    assert torch.equal(net.train().classify(z), before + net.prior)


@pytest.mark.parametrize("method", sorted(methods.METHODS))
def test_every_method_balances_its_cross_entropy(method):
    upload, net = trained(method, [0, 0, 0, 1], True)
    assert torch.equal(net.prior, torch.tensor([0.75, 0.25, 0.0]).log())
    plain, other = trained(method, [0, 0, 0, 1], False)
    assert other.prior is None
    if method == "fedhpro-plus":  # nobody has voted for alignment yet, and without it it is balanced anyway
        assert upload["loss/ce"] == plain["loss/ce"]
    else:
        assert upload["loss/ce"] < plain["loss/ce"]  # nothing is lost on the class that is not there
    assert all(value.isfinite().all() for value in upload.values())


@pytest.mark.parametrize("method", sorted(methods.METHODS))
def test_a_client_of_one_class_has_no_loss(method):
    upload, _ = trained(method, [1, 1, 1, 1], True)
    assert upload["loss/ce"] == 0


@pytest.mark.parametrize("keys", [{"method": "fedavg"}, {"method": "fedhpro-plus"}])
def test_a_run_with_it_in_one_process_and_in_two(tiny_source, tmp_path, keys):
    found = [
        runs.run(configure(**(TINY | keys), balanced=balanced, out=str(tmp_path / f"{number}")), source=tiny_source)
        for number, balanced in enumerate([True, False])
    ]
    assert found[0].history[-1]["loss"]["ce"] != found[1].history[-1]["loss"]["ce"]
    workers = TINY | keys | {"workers": 2, "balanced": True, "out": str(tmp_path / "workers")}
    assert runs.run(configure(**workers), source=tiny_source).history == found[0].history
