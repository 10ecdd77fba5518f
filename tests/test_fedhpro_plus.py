"""FedHPro plus: its anchors, its loss from the formulas, and what it comes to without each of its parts."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from test_fedhpro import run, terms_of

from fedhpro.config import configure
from fedhpro.engines.cuda import Seat
from fedhpro.errors import ConfigError
from fedhpro.methods import fedhpro_plus
from fedhpro.methods.fedhpro_plus import FedHProPlus, frame
from fedhpro.methods.fedrcl import FedRCL
from fedhpro.methods.mixture import mixture


@pytest.mark.parametrize("classes, dim", [(10, 512), (7, 512), (3, 3), (4, 9), (397, 512)])
def test_anchors_are_at_right_angles_as_long_as_random_ones_and_not_negative(classes, dim):
    A = frame(classes, dim)
    torch.testing.assert_close(A @ A.T, torch.eye(classes) * dim)
    assert A.min() >= 0 and ((A > 0).sum(0) == 1).all()  # every feature belongs to one class
    sizes = (A > 0).sum(1)
    assert sizes.max() - sizes.min() <= 1 and sizes.min() >= 1


@pytest.mark.parametrize(
    "counts, strength",
    [
        ([7, 0, 0, 0], 0),
        ([3000, 3000, 0, 0], 1 / 3),
        ([3000, 1000, 0, 0], (4 / 3**0.75 - 1) / 3),
        ([9], 0),
        ([1, 0], 0),
    ],
)
def test_a_mixture_is_how_evenly_many_labels_are_spread(counts, strength):
    assert mixture(torch.tensor(counts)).item() == pytest.approx(strength, abs=2e-4)


@pytest.mark.parametrize("classes, samples", [(10, 5), (10, 30), (100, 50), (100, 5000), (397, 198)])
def test_a_mixture_does_not_blame_small_clients(classes, samples):
    """Labels drawn evenly: the reference is their mean entropy, so most of any number of them count as mixed."""
    draws = torch.randint(classes, (400, samples), generator=torch.Generator().manual_seed(0))
    held = F.one_hot(draws, classes).sum(1)
    entropies = torch.special.entr(held / samples).sum(1).double()
    even = (
        torch.tensor([samples // classes] * classes) if samples >= classes else (torch.arange(classes) < samples).long()
    )
    seen = torch.stack([mixture(counts) for counts in held])
    inside = seen < 1
    reference = (entropies.expm1() / seen)[inside].mean().log1p()  # what its entropy was compared with
    assert reference.item() == pytest.approx(entropies.mean().item(), rel=0.01)
    assert (seen >= 0.5).double().mean() > 0.95 and mixture(even) == 1
    assert mixture(torch.tensor([samples - 1, 1] + [0] * (classes - 2))) < 0.5  # one class, and one other sample


def test_loss_by_hand():
    terms, z, y, context = terms_of(FedHProPlus(agreed=False), {})
    C, d = context["anchors"].shape
    ce, hpal = 0.0, 0.0
    for feature, label in zip(z.detach().double().tolist(), y.tolist(), strict=True):
        own = [[q for q in range(d) if q * C // d == c] for c in range(C)]
        logits = [sum(feature[q] for q in block) / math.sqrt(len(block)) for block in own]
        ce += (math.log(sum(map(math.exp, logits))) - logits[label]) / len(y)
        for q, value in enumerate(feature):
            gap = abs(value - (math.sqrt(d / len(own[label])) if q in own[label] else 0))
            hpal += (gap**2 / 2 if gap <= 1 else gap - 0.5) / len(y)
    assert terms["ce"].item() == pytest.approx(ce, rel=1e-5)
    assert terms["hpal"].item() == pytest.approx(hpal, rel=1e-5)
    other = terms_of(FedRCL(), {})[0]
    assert terms["contrast"] == other["contrast"] and terms["penalty"] == other["penalty"]
    assert set(terms) == {"ce", "hpal", "contrast", "penalty"}


def test_it_is_paced_from_25_classes_on():
    for classes, paced in ((24, False), (25, True)):
        net = SimpleNamespace(num_classes=classes)
        z, y, logits = torch.rand(4, classes), torch.arange(4), torch.randn(4, classes)
        usual, given = (
            method.alignment(net, z, y, logits, {"anchors": frame(classes, classes)})
            for method in (FedHProPlus(), FedHProPlus(paced=paced))
        )
        assert torch.equal(usual, given)


def test_paced_alignment_by_hand():
    """A sample counts as much as its class is probable, and is not paid for making it less so."""
    terms, z, y, context = terms_of(FedHProPlus(agreed=False, paced=True), {})
    plain = terms_of(FedHProPlus(agreed=False), {})[0]
    probable = (z @ context["directions"].T).softmax(1)[torch.arange(len(y)), y].detach()
    each = F.huber_loss(z, context["anchors"][y], reduction="none").sum(1)
    torch.testing.assert_close(terms["hpal"], (probable * each).mean())
    assert 0 < terms["hpal"] < plain["hpal"] and all(terms[name] == plain[name] for name in plain if name != "hpal")
    z = z.detach().requires_grad_()
    net = SimpleNamespace(features=lambda z: z, balanced=lambda logits: logits)
    FedHProPlus(agreed=False, contrasted=False, paced=True).loss(net, {}, z, y, context)["hpal"].backward()
    slopes = (z - context["anchors"][y]).clamp(-1, 1) * probable[:, None] / len(y)
    torch.testing.assert_close(z.grad, slopes.detach())


@pytest.mark.parametrize("pro, wanted", [(1.0, True), (0.9, True), (0.89, False), (0.0, False)])
def test_all_align_and_contrast_or_all_have_a_margin_and_balanced_cross_entropy(pro, wanted):
    alone = terms_of(FedHProPlus(agreed=False), {})[0]
    terms, z, y, context = terms_of(FedHProPlus(), {"votes": torch.tensor([1000 * pro, 1000])})
    if wanted:
        assert terms == alone | {"margin": 0}
        return
    assert not any(terms[name] for name in ("hpal", "contrast", "penalty"))
    counts = torch.bincount(y, minlength=len(context["anchors"])).tolist()
    anchors, ce, margin = context["anchors"].double(), 0.0, 0.0
    apart = math.dist(*anchors[:2].tolist())

    def balanced(values, label):  # cross-entropy of values + log(n / N)
        held = [n * math.exp(value) for n, value in zip(counts, values, strict=True)]
        return (math.log(sum(held)) - math.log(held[label])) / len(y)

    for feature, label in zip(z.detach().double(), y.tolist(), strict=True):
        logits = (context["directions"].double() @ feature).tolist()
        nearness = [-math.dist(feature.tolist(), anchor) for anchor in anchors.tolist()]
        nearness[label] -= apart / 8
        ce, margin = ce + balanced(logits, label), margin + 0.9 * balanced(nearness, label)
    assert terms["ce"].item() == pytest.approx(ce, rel=1e-5) and terms["ce"] != alone["ce"]
    assert terms["margin"].item() == pytest.approx(margin, rel=1e-5)


def test_the_margin_ends_where_it_is_reached_and_a_client_of_one_class_has_none():
    d, y = 128, torch.arange(4)
    method, anchors = FedHProPlus(contrasted=False), frame(4, d)
    net = SimpleNamespace(dim=d, features=lambda z: z, balanced=lambda logits: logits)

    def margin(z, y, counts):
        context = {"anchors": anchors, "directions": anchors, "prior": counts.log()}
        return method.loss(net, {}, z, y, context)["margin"].item()

    evenly, one_class = torch.full((4,), 0.25), torch.tensor([1.0, 0, 0, 0])
    assert method.lam_margin == 0.9 and margin(anchors, y, evenly) < 0.01 < 1 < margin(0 * anchors, y, evenly)
    assert margin(0 * anchors, torch.zeros(4, dtype=torch.int64), one_class) == 0


def test_clients_vote_with_their_samples_in_all_rounds_so_far():
    method, model = FedHProPlus(classifier="trained"), {}
    state = {"votes": torch.zeros(2)}
    assert method.broadcast(state)["pro"] == 0  # nobody has voted yet
    reports = {"vote": torch.tensor([1.0, 0.0]), "samples": torch.tensor([30, 10])}
    state, _ = method.aggregate(state, model, reports, torch.Generator())
    assert method.broadcast(state)["pro"] == 0.75
    reports = {"vote": torch.tensor([1.0, 1e9]), "samples": torch.tensor([100, 60])}  # nobody has more than one vote
    state, _ = method.aggregate(state, model, reports, torch.Generator())
    assert method.broadcast(state)["pro"] == pytest.approx(190 / 200) == state["log/vote"]


def test_the_classifier_is_the_anchors_and_nothing_but_the_model_travels(tiny_source):
    _, _, federation = run(tiny_source, method="fedhpro-plus", agreed=False)
    W, b = federation.model["classifier.weight"], federation.model["classifier.bias"]
    torch.testing.assert_close(W, frame(*W.shape) / W.shape[1] ** 0.5)
    assert not b.any() and not [name for name in federation.schema if name.startswith("report/")]
    assert not federation.method.broadcast(federation.state)
    _, _, trained = run(tiny_source, method="fedhpro-plus", classifier="trained")
    assert trained.model["classifier.bias"].any()


def test_votes_are_counted_in_a_federation(tiny_source):
    history, _, federation = run(tiny_source, method="fedhpro-plus")
    held = [torch.bincount(client.train.to(torch.device("cpu")).y, minlength=4) for client in federation.clients]
    votes = [counts.sum() * (mixture(counts) >= 0.5) for counts in held]
    assert federation.state["votes"].tolist() == [sum(votes) * 2, sum(federation.sizes) * 2]  # in two rounds
    assert [record["server"] for record in history] == [{"vote": pytest.approx(sum(votes) / sum(federation.sizes))}] * 2


@pytest.mark.parametrize("classifier", ["anchors", "trained"])
def test_a_vote_against_leaves_balanced_cross_entropy_and_a_margin_and_one_for_it_changes_nothing(
    tiny_source, monkeypatch, classifier
):
    keys = {"method": "fedhpro-plus", "classifier": classifier, "lam_margin": 0.0}
    monkeypatch.setattr(fedhpro_plus, "MAJORITY", 1.1)  # more than all
    against = run(tiny_source, **keys)[2].model
    bare = run(tiny_source, agreed=False, balanced=True, aligned=False, contrasted=False, **keys)[2].model
    both = run(tiny_source, balanced=True, **keys)[2].model  # balanced once, not twice
    monkeypatch.setattr(fedhpro_plus, "MAJORITY", 0.0)
    pro, silent = (run(tiny_source, agreed=agreed, **keys)[2].model for agreed in (True, False))
    for name, value in bare.items():
        assert torch.equal(against[name], value) and torch.equal(both[name], value)
        assert torch.equal(pro[name], silent[name])
    assert any(not torch.equal(against[name], silent[name]) for name in bare)
    monkeypatch.setattr(fedhpro_plus, "MAJORITY", 1.1)
    margined = run(tiny_source, **keys | {"lam_margin": 0.9})[2].model
    assert any(not torch.equal(against[name], margined[name]) for name in bare)


def test_an_engine_that_keeps_contexts_in_place_keeps_one_of_each_kind(tiny_source):
    """What engine=cuda does around a captured step, without a GPU; with one: test_cuda.py."""
    trainer = run(tiny_source, method="fedhpro-plus")[2].trainer
    slot = SimpleNamespace(device=torch.device("cpu"), settings=trainer.settings, method=trainer.method)
    slot.refused, slot.pace = {"steps of fedhpro-plus"}, lambda: None  # nothing is captured
    seat, seen = Seat(slot, trainer.benches[0]), []
    seat.step = lambda size: seen.append((size, {name: value.tolist() for name, value in seat.context.items()}))
    against, wanted = {"anchors": torch.ones(2), "prior": torch.zeros(2)}, {"anchors": torch.full((2,), 3.0)}
    for context in (against, wanted, {name: value + 1 for name, value in against.items()}):
        seat.take_step(8, context)
    assert seen[:2] == [(8, {"anchors": [1, 1], "prior": [0, 0]}), (8, {"anchors": [3, 3]})]
    assert seen[2] == (8, {"anchors": [2, 2], "prior": [1, 1]}) and len(seat.graphs) == 2


@pytest.mark.parametrize("host, without", [("fedrcl", {}), ("fedavg", {"contrasted": False})])
def test_without_anchors_it_is_fedrcl_and_without_contrast_fedavg(tiny_source, host, without):
    keys = {"method": "fedhpro-plus", "classifier": "trained", "aligned": False, "agreed": False} | without
    ours, theirs = run(tiny_source, **keys)[2], run(tiny_source, method=host)[2]
    assert all(torch.equal(ours.model[name], theirs.model[name]) for name in theirs.model)


def test_preset_plus_has_the_training_of_preset_paper():
    paper, plus = configure(preset="paper").flat(), configure(preset="plus").flat()
    assert plus["method"] == "fedhpro-plus" and configure(preset="plus").build_method() == FedHProPlus()
    shared = paper.keys() & plus.keys() - {"method", "preset"}
    assert {key: plus[key] for key in shared} == {key: paper[key] for key in shared} and len(shared) > 30


def test_more_classes_than_features_are_refused(tiny_source):
    told = "fedhpro-plus: 4 classes have no 3 features to share out: try dim=8, or method=fedhpro"
    with pytest.raises(ConfigError, match=f"^{told}$"):
        run(tiny_source, **(TINY | {"method": "fedhpro-plus", "dim": 3}))


def test_texts_have_no_depths_to_contrast():
    assert not configure(method="fedhpro-plus", data="docs-lite").build_method().contrasted
    assert configure(method="fedhpro-plus").build_method().contrasted
    assert configure(method="fedhpro-plus", data="docs-lite", contrasted=True).build_method().contrasted


def test_with_noise_there_is_no_vote_unless_somebody_asks_for_one():
    assert configure(method="fedhpro-plus").build_method().agreed
    private = {"method": "fedhpro-plus", "privacy": "central", "noise": 1.0, "clip": 1.0}
    assert not configure(**private).build_method().agreed
    assert configure(**private, agreed=True).build_method().agreed  # which the federation then refuses
