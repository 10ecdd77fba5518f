"""As test_goldens.py, for what replaces averaged prototypes: FedGMKD's weighted ones, FedSA's anchors, and the
hyper-prototypes as a plug-in.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.mixture import GaussianMixture
from test_goldens import (
    LABELS,
    Bare,
    C,
    D,
    aggregate,
    batch,
    check,
    cross_entropy,
    eval_features,
    mean,
    nearest_distances,
    nll,
    plain_means,
    prototypes,
    pull,
    random,
    scores,
    softmax,
    squared,
    stacked,
    start,
    trained_client,
)

from fedhpro.methods import METHODS
from fedhpro.methods.fedgmkd import FedGMKD
from fedhpro.methods.fedsa import FedSA
from fedhpro.randomness import generator

PLUGGED = ["fedproto-hp", "fedtgp-hp", "fedgmkd-hp", "fedsa-hp"]


def distributions(*shape, seed=6):
    return torch.softmax(2 * random(*shape, C, seed=seed), dim=-1)


# FedGMKD


@pytest.mark.parametrize("covariance", ["full", "diag"])
@pytest.mark.parametrize("components", [2, 5])
def test_the_mixture_prototype_is_the_class_mean(covariance, components):
    """sum_m pi_m mu_m after any EM step: why no mixture is fitted."""
    features = torch.cat([random(30, 3, seed=1), 4 + random(20, 3, seed=2), random(10, 3, seed=3) - 5]).numpy()
    mixture = GaussianMixture(components, covariance_type=covariance, random_state=0, tol=1e-2).fit(features)
    assert abs(mixture.means_ - features.mean(0)).max() > 1  # no component is the mean
    assert mixture.weights_ @ mixture.means_ == pytest.approx(features.mean(0), abs=1e-9)


def test_fedgmkd_pulls_features_and_teaches_the_classifier_alone_with_soft_predictions():
    model, (x, y) = Bare(), batch()
    context = prototypes(absent=(1,)) | {"Q": distributions(C)}
    context["Q"][1] = 0.0  # nothing is known of class 1
    method = FedGMKD(lam=0.6, gamma=0.5, temperature=0.6)
    terms = method.loss(model, {}, x, y, context)

    def soft():
        known = [c for c in range(C) if c != 1]
        P, Q = context["P"].tolist(), context["Q"].tolist()
        return 0.5 * mean(squared(softmax(scores(model, P[j], 0.6)), Q[j]) for j in known)

    check(terms["proto"], lambda: 0.6 * pull(x, y, context["P"], context["present"]), x, *model.parameters())
    check(terms["soft"], soft, x, *model.parameters())
    assert torch.autograd.grad(terms["soft"], [x], allow_unused=True, retain_graph=True) == (None,)
    check(terms["ce"], cross_entropy(model, x, y), x, *model.parameters())


def test_fedgmkd_reports_mean_soft_predictions_at_its_temperature():
    method, labels = FedGMKD(temperature=0.6), (0, 1, 1, 3, 0)
    who = trained_client(method, labels)
    features = eval_features(who)
    with torch.no_grad():
        report = method.report(who, {})
    for c in range(C):
        rows = [softmax(scores(who.net, z.tolist(), 0.6)) for z, y in zip(features, labels, strict=True) if y == c]
        expected = [mean(column) for column in zip(*rows, strict=True)] if rows else [0.0] * C
        torch.testing.assert_close(report["soft"][c], torch.tensor(expected), rtol=1e-4, atol=1e-5)


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def dat_reference(counts, soft, Q, a, b):
    """Class -> weight of each client: relu(share - a KL(q_k || Q) + b), normalised; the share where all are 0."""
    found = {}
    for c in range(C):
        total = sum(row[c] for row in counts)
        if total == 0:
            continue
        share = [row[c] / total for row in counts]
        gaps = [kl(q[c], Q[c]) if Q else 0.0 for q in soft]
        raw = [max(0.0, s - a * g + b) if row[c] else 0.0 for s, g, row in zip(share, gaps, counts, strict=True)]
        found[c] = [w / sum(raw) for w in raw] if sum(raw) > 0 else share
    return found


def gmkd_reports(counts, seed):
    reports = stacked(counts, seed=seed)
    return reports | {"soft": distributions(len(counts), C, seed=seed) * (reports["counts"] > 0)[:, :, None]}


@pytest.mark.parametrize("a, b", [(0.2, 0.2), (1.0, 0.0), (0.0, 0.0), (1e3, 0.1)])
def test_fedgmkd_weights_clients_by_share_and_discrepancy(a, b):
    method = FedGMKD(a=a, b=b)
    state, Q = start(method), None
    for counts, seed in (([[9, 1, 2, 0], [1, 0, 2, 0], [5, 5, 2, 0]], 5), ([[0, 2, 3, 0], [0, 8, 1, 0]], 7)):
        reports, before = gmkd_reports(counts, seed), state
        weights = dat_reference(counts, reports["soft"].tolist(), Q, a, b)
        state = aggregate(method, before, reports)
        for c, row in weights.items():
            assert sum(row) == pytest.approx(1.0)
            for name, sent in (("P", "means"), ("Q", "soft")):
                expected = sum(w * reports[sent][k, c] for k, w in enumerate(row) if counts[k][c])
                torch.testing.assert_close(state[name][c], expected)
        for c in set(range(C)) - weights.keys():
            assert torch.equal(state["P"][c], before["P"][c]) and torch.equal(state["Q"][c], before["Q"][c])
        Q = state["Q"].tolist()
    assert state["present"].tolist() == [True, True, True, False] and not state["Q"][3].any()


def test_fedgmkd_survives_predictions_of_exactly_0():
    method = FedGMKD()
    certain = torch.eye(C)[None].double()
    reports = stacked([[1, 1, 1, 1]] * 2) | {"soft": torch.cat([certain, certain.roll(1, 2)])}
    state = start(method)
    for _ in range(2):
        state = aggregate(method, state, reports)
        assert all(value.isfinite().all() for value in state.values())
        torch.testing.assert_close(state["Q"].sum(1), torch.ones(C).double())


# FedSA


def test_fedsa_starts_from_anchors_in_the_orthant_of_features():
    model = Bare()
    model.dim, model.num_classes = 512, 10
    anchors = FedSA().server_state(model, generator(3))["A"]
    assert anchors.shape == (10, 512) and (anchors >= 0).all()
    assert 0.4 < (anchors == 0).double().mean() < 0.6
    assert anchors.norm(dim=1).mean() == pytest.approx(16, rel=0.05)  # sqrt(d / 2)
    assert anchors.norm(dim=1).std() < 2 and torch.cdist(anchors, anchors).add(99 * torch.eye(10)).min() > 5


def test_fedsa_loss_is_pull_margin_and_classifier():
    model, (x, y) = Bare(), batch()
    A = random(C, D, seed=9).abs()
    context = {"A": A, "gap": torch.tensor(1.7).double()}
    terms = FedSA(lam_pull=0.1, lam_margin=0.9, lam_classifier=0.8).loss(model, {}, x, y, context)

    def margin():
        found = []
        for z, c in zip(x.tolist(), y.tolist(), strict=True):
            distances = [math.dist(z, anchor) for anchor in A.tolist()]
            distances[c] += 1.7
            found.append(nll([-value for value in distances], c))
        return 0.9 * mean(found)

    everywhere = torch.ones(C, dtype=torch.bool)
    check(terms["pull"], lambda: 0.1 * pull(x, y, A, everywhere), x, *model.parameters())
    check(terms["margin"], margin, x, *model.parameters())
    classifier = terms["classifier"]
    check(classifier, lambda: 0.8 * mean(nll(scores(model, A[c]), c) for c in range(C)), x, *model.parameters())
    assert torch.autograd.grad(classifier, [x], allow_unused=True, retain_graph=True) == (None,)
    check(terms["ce"], cross_entropy(model, x, y), x, *model.parameters())
    assert set(terms) == {"ce", "pull", "margin", "classifier"}


def test_fedsa_has_a_gradient_even_where_a_feature_is_its_anchor():
    A = random(C, D, seed=9)
    x = A[list(LABELS)].clone().requires_grad_()
    terms = FedSA().loss(Bare(), {}, x, torch.tensor(LABELS), {"A": A, "gap": torch.tensor(0.5)})
    sum(terms.values()).backward()
    assert x.grad.isfinite().all()


class Visitor:
    """All that FedSA looks at before training."""

    def __init__(self, anchors, memory=None):
        self.received, self.memory = {"A": anchors}, memory or {}


@pytest.mark.parametrize("scale, held, local_wins", [(9.0, (1, 2, 0, 4), True), (0.1, (1, 2, 0, 4), False)])
def test_fedsa_gap_is_the_larger_of_local_and_global(scale, held, local_wins):
    A, means = random(C, D, seed=9), scale * random(C, D, seed=10)
    memory = {"means": torch.where(torch.tensor(held)[:, None] > 0, means, 0.0), "counts": torch.tensor(held)}
    global_gap = mean(nearest_distances(A.tolist()))
    local_gap = mean(nearest_distances([means[c].tolist() for c in range(C) if held[c]]))
    assert (local_gap > global_gap) == local_wins
    gap = FedSA().prepare(Visitor(A, memory))["gap"]
    assert float(gap) == pytest.approx(max(local_gap, global_gap))


def test_fedsa_gap_without_a_local_one_is_the_global_and_not_infinite():
    A = random(C, D, seed=9)
    alone = {"means": 50 * torch.eye(C, D).double(), "counts": torch.tensor([0, 7, 0, 0])}
    for memory in (None, alone):
        found = FedSA().prepare(Visitor(A, memory))["gap"]
        assert float(found) == pytest.approx(mean(nearest_distances(A.tolist())))
    assert float(FedSA().prepare(Visitor(A[:1], None))["gap"]) == 0.0  # a single class: both are degenerate


def test_fedsa_gap_is_exact_for_many_close_anchors():
    A = (300 + 0.01 * random(30, 8)).float()
    expected = mean(nearest_distances(A.tolist()))
    assert float(FedSA().prepare(Visitor(A))["gap"]) == pytest.approx(expected, rel=1e-3)


def test_fedsa_remembers_what_it_reported():
    method = FedSA()
    who = trained_client(method, (0, 2, 2))
    with torch.no_grad():
        report = method.report(who, {})
        kept = method.remember(who, report)
    assert set(kept) == {"means", "counts"} and torch.equal(kept["means"], report["means"])
    assert kept["counts"].tolist() == [1, 0, 2, 0]


def test_fedsa_anchors_drift_by_a_ten_thousandth_where_a_class_was_sent():
    method, state = FedSA(), start(FedSA())
    for counts in ([[9, 1, 0, 0], [1, 0, 0, 0]], [[0, 5, 0, 0], [0, 1, 0, 0]]):
        reports, before = stacked(counts), state
        state = aggregate(method, before, reports)
        sent = plain_means(reports)
        for c in range(C):
            expected = 0.9999 * before["A"][c] + 0.0001 * sent[c] if c in sent else before["A"][c]
            torch.testing.assert_close(state["A"][c], expected, rtol=1e-12, atol=1e-12)


def test_fedsa_predicts_by_prototypes_and_not_by_anchors():
    x, P = random(5, D), random(C, D, seed=2)
    received = {"P": P, "present": torch.ones(C, dtype=torch.bool), "A": P.flip(0)}
    with torch.no_grad():
        found = FedSA().predict(Bare(), x, received)["nearest_prototype"].argmax(1).tolist()
    assert found == [min(range(C), key=lambda c: math.dist(z, P[c].tolist())) for z in x.tolist()]


# Hyper-prototypes as a plug-in


def plugged_reports(counts, seed=5):
    reports = gmkd_reports(counts, seed)
    gradients = random(len(counts), C, D, seed=seed + 1)
    return reports | {"gradients": torch.where(reports["counts"][:, :, None] > 0, gradients, 1e3)}


def matched(S, reports, weight, bias, steps, lr):
    """Eq 6 to 9 by autograd: descent on 1 - cos between the mean gradient sent and that at the hyper-prototypes."""
    held = [c for c in range(C) if (reports["counts"][:, c] > 0).any()]
    goals = {c: reports["gradients"][reports["counts"][:, c] > 0, c].mean(0) for c in held}
    for _ in range(steps):
        S = S.detach().requires_grad_()
        loss = 0
        for c in held:
            cost = F.cross_entropy(S[c] @ weight.T + bias, torch.full((len(S[c]),), c))  # mean over i
            (gradient,) = torch.autograd.grad(cost, [S], create_graph=True)
            loss = loss + 1 - F.cosine_similarity(goals[c], gradient[c].sum(0), dim=0)
        S = S - lr * torch.autograd.grad(loss, [S])[0]
    return S.detach()


@pytest.mark.parametrize("name", PLUGGED)
def test_hyper_prototypes_are_matched_and_their_mean_takes_the_place_of_prototypes(name):
    method = METHODS[name](I=3, M=4, match_lr=0.5)
    state, model = start(method), Bare(4)
    averaged = {f"classifier.{key}": value.detach() for key, value in model.classifier.named_parameters()}
    assert state["S"].shape == (C, 3, D)
    for counts in ([[9, 1, 2, 0], [1, 0, 2, 0]], [[0, 5, 0, 0], [3, 1, 0, 0]]):
        torch.testing.assert_close(state["P"], sum(state["S"][:, i] for i in range(3)) / 3)
        assert state["present"].all()  # from the first round on
        if name == "fedsa-hp":
            assert torch.equal(state["A"], state["P"])
        reports, before = plugged_reports(counts), state
        expected = matched(before["S"], reports, *averaged.values(), steps=4, lr=0.5)
        state = aggregate(method, before, reports, averaged)
        torch.testing.assert_close(state["S"], expected)
        absent = [c for c in range(C) if not any(row[c] for row in counts)]
        assert torch.equal(state["S"][absent], before["S"][absent]) and not torch.equal(state["S"], before["S"])


@pytest.mark.parametrize("name", PLUGGED)
def test_without_matching_steps_hyper_prototypes_stay_at_their_start(name):
    method = METHODS[name](M=0)
    state, h = start(method), Bare(4).classifier
    averaged = {f"classifier.{key}": value.detach() for key, value in h.named_parameters()}
    new = aggregate(method, state, plugged_reports([[9, 1, 2, 0]]), averaged)
    assert torch.equal(new["S"], state["S"])
    for key in ("P", "A") if name == "fedsa-hp" else ("P",):
        torch.testing.assert_close(new[key], state["S"].mean(1))


@pytest.mark.parametrize(
    "name, term, weight",
    [
        ("fedproto-hp", "proto", 1.0),
        ("fedtgp-hp", "proto", 1.0),
        ("fedgmkd-hp", "proto", 0.6),
        ("fedsa-hp", "pull", 0.1),
    ],
)
def test_hosts_pull_to_hyper_prototypes_with_their_own_weight(name, term, weight):
    model, (x, y), method = Bare(), batch(), METHODS[name]()
    state, everywhere = start(method), torch.ones(C, dtype=torch.bool)
    H = state["S"].mean(1)
    context = method.broadcast(state | {"P": H} | ({"A": H} if name == "fedsa-hp" else {}))
    if name == "fedsa-hp":
        context = method.prepare(Visitor(context["A"]))
        assert float(context["gap"]) == pytest.approx(mean(nearest_distances(H.tolist())))
    terms = method.loss(model, {}, x, y, context)
    check(terms[term], lambda: weight * pull(x, y, H, everywhere), x, *model.parameters())


def test_fedgmkd_with_hyper_prototypes_matches_no_soft_predictions_before_there_are_any():
    """H exists in the first round, Q does not: a Q of 0 would teach the classifier to be unsure."""
    method, host = METHODS["fedgmkd-hp"](), FedGMKD()
    state, model, (x, y) = start(method), Bare(), batch()
    assert method.loss(model, {}, x, y, method.broadcast(state))["soft"].item() == 0.0
    averaged = {f"classifier.{key}": value.detach() for key, value in model.classifier.named_parameters()}
    theirs = start(host)
    for counts, seed in (([[9, 1, 2, 0], [1, 0, 2, 0]], 5), ([[2, 1, 2, 0], [8, 0, 2, 0]], 7)):
        reports = plugged_reports(counts, seed)
        state, theirs = aggregate(method, state, reports, averaged), aggregate(host, theirs, reports)
        assert torch.equal(state["Q"], theirs["Q"])  # Q is aggregated as ever
    Q, P = state["Q"].tolist(), state["P"].tolist()
    term = method.loss(model, {}, x, y, method.broadcast(state))["soft"]
    known = (0, 1, 2)  # nobody ever sent class 3
    reference = lambda: 0.5 * mean(squared(softmax(scores(model, P[j], 0.6)), Q[j]) for j in known)  # noqa: E731
    check(term, reference, x, *model.parameters())


@pytest.mark.parametrize("name", PLUGGED)
def test_clients_send_the_gradients_at_their_features_too(name):
    method, labels = METHODS[name](), (0, 1, 1, 3, 0)
    who = trained_client(method, labels)
    z = torch.stack(eval_features(who)).requires_grad_()
    logits = who.net.classifier(z)
    (gradients,) = torch.autograd.grad(F.cross_entropy(logits, torch.tensor(labels), reduction="sum"), [z])
    with torch.no_grad():
        report = method.report(who, {})
        host = METHODS[name.removesuffix("-hp")]().report(who, {})
    assert report.keys() - host.keys() == {"gradients"}
    assert all(torch.equal(report[key], value) for key, value in host.items())
    for c in range(C):
        rows = [g for g, label in zip(gradients, labels, strict=True) if label == c]
        expected = sum(rows) / len(rows) if rows else torch.zeros(who.net.dim)
        torch.testing.assert_close(report["gradients"][c], expected, rtol=1e-4, atol=1e-6)
