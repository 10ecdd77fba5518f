"""The rivals' losses, reports and server steps against plain loops that are written from the formulas, not the code.

A test named after a mistake ("not", "never", "even") fails for an implementation that makes it: all of them are in
public code of these methods. `check` compares values and, by finite differences of the loop, gradients at every leaf:
a part that a term must not reach has gradient 0.
"""

import math

import pytest
import torch
from test_methods import client, net

from fedhpro.methods.fedgmkd import FedGMKD
from fedhpro.methods.fedproto import FedProto
from fedhpro.methods.fedprox import FedProx
from fedhpro.methods.fedrcl import FedRCL
from fedhpro.methods.fedsa import FedSA
from fedhpro.methods.fedtgp import FedTGP
from fedhpro.methods.moon import Moon
from fedhpro.randomness import generator

C, D = 4, 6
LABELS = (0, 1, 1, 2, 1, 0, 1)  # class 2 is alone in the batch, class 3 is missing


class Bare(torch.nn.Module):
    """A model in float64 whose feature is its input, so that what reaches the features is the input's gradient."""

    dim, num_classes = D, C

    def __init__(self, seed=0):
        super().__init__()
        rng = generator(seed, "bare")
        self.mix = torch.eye(D).double() if seed == 0 else torch.randn(D, D, generator=rng).double()
        self.classifier = torch.nn.Linear(D, C).double()
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=rng).double()

    def features(self, x):
        return x @ self.mix

    def stages_and_features(self, x):
        return [x + 0.3 * depth for depth in range(5)], x

    def classify(self, z):
        return self.classifier(z)

    def forward(self, x):
        return self.classify(self.features(x))


def random(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed, "random")).double()


def batch(labels=LABELS, seed=1):
    return random(len(labels), D, seed=seed).requires_grad_(), torch.tensor(labels)


def prototypes(seed=2, absent=()):
    """P and present; the rows of absent classes hold nonsense that nobody may read."""
    present = torch.tensor([c not in absent for c in range(C)])
    return {"P": torch.where(present[:, None], random(C, D, seed=seed), 1e3), "present": present}


def start(method, model=None):
    """The server's state before round 1; in float64 for the bare model."""
    state = method.server_state(model or Bare(), generator(0, "state"))
    return state if model else in_double(state)


def in_double(state):
    return {name: value.double() if value.is_floating_point() else value for name, value in state.items()}


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def dot(a, b):
    return sum(p * q for p, q in zip(a, b, strict=True))


def squared(a, b):
    return sum((p - q) ** 2 for p, q in zip(a, b, strict=True))


def cosine(a, b):
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def softmax(logits):
    top = max(logits)
    powers = [math.exp(value - top) for value in logits]
    return [power / sum(powers) for power in powers]


def nll(logits, target):
    return -math.log(softmax(logits)[target])


def scores(model, z, temperature=1.0):
    h = model.classifier
    return [(dot(w, z) + b) / temperature for w, b in zip(h.weight.tolist(), h.bias.tolist(), strict=True)]


def cross_entropy(model, x, y):
    return lambda: mean(nll(scores(model, z), c) for z, c in zip(x.tolist(), y.tolist(), strict=True))


def check(term, reference, *leaves):
    torch.testing.assert_close(term.item(), reference(), rtol=1e-6, atol=1e-9)
    gradients = torch.autograd.grad(term, leaves, retain_graph=True, allow_unused=True)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        slopes, flat = torch.zeros(leaf.numel()).double(), leaf.data.view(-1)
        for i in range(leaf.numel()):
            before = float(flat[i])
            flat[i] = before + 1e-6
            above = reference()
            flat[i] = before - 1e-6
            slopes[i] = (above - reference()) / 2e-6
            flat[i] = before
        found = torch.zeros_like(leaf) if gradient is None else gradient
        torch.testing.assert_close(found.reshape(-1), slopes, rtol=1e-5, atol=1e-7)


def pull(z, y, P, present):
    """Mean over samples and dimensions of (z - P^y)^2; a sample without a prototype is in the mean as 0."""
    rows = zip(z.tolist(), y.tolist(), strict=True)
    return mean(squared(v, P[c].tolist()) / D if present[c] else 0.0 for v, c in rows)


def stacked(counts, d=D, seed=3):
    """Reports of several clients; where a client does not hold a class, its mean is nonsense."""
    counts = torch.tensor(counts)
    means = torch.where(counts[:, :, None] > 0, random(*counts.shape, d, seed=seed), 1e3)
    return {"means": means, "counts": counts, "samples": counts.sum(1)}


def plain_means(reports):
    """Class -> mean over the clients that hold it, each with the same weight."""
    found = {}
    for c in range(reports["counts"].shape[1]):
        rows = [m[c] for m, n in zip(reports["means"], reports["counts"], strict=True) if n[c] > 0]
        if rows:
            found[c] = sum(rows) / len(rows)
    return found


def aggregate(method, state, reports, model=None, seed=0):
    with torch.no_grad():
        new, override = method.aggregate(state, model or {}, reports, generator(seed, "server"))
    assert override == {}
    return new


def trained_client(method, labels, seed=5):
    """A client whose BatchNorm statistics are far from those of its data, left in training mode."""
    model = net(seed)
    who = client(method, start(method, model), labels, model=model)
    with torch.no_grad():
        model.train()(3 * torch.randn(8, 3, 16, 16, generator=generator(seed)) + 1)
    return who


def eval_features(who):
    """One sample at a time: in training mode this would be another feature."""
    who.net.eval()
    with torch.no_grad():
        rows = [who.net.features(who.transform.plain(x[None]))[0] for x in who.data.x]
    who.net.train()
    return rows


# FedProx


class Normed(Bare):
    def __init__(self, seed=0):
        super().__init__(seed)
        self.norm = torch.nn.BatchNorm1d(D).double()
        self.norm.weight.data = random(D, seed=seed)
        self.norm.running_mean += 100 * seed  # not trained: no part of the distance

    def features(self, x):
        return self.norm(x)


def test_fedprox_is_half_mu_times_the_squared_distance_of_the_trained_parameters():
    model, received, (x, y) = Normed(0), Normed(1), batch()
    parameters = dict(model.named_parameters())
    assert set(parameters) == {"classifier.weight", "classifier.bias", "norm.weight", "norm.bias"}

    def reference():
        started = dict(received.named_parameters())
        return 0.3 / 2 * sum(squared(w.view(-1).tolist(), started[k].view(-1).tolist()) for k, w in parameters.items())

    term = FedProx(mu=0.3).loss(model, {"received": received}, x, y, {})["prox"]
    check(term, reference, x, *model.parameters())
    (gradient,) = torch.autograd.grad(term, [model.norm.weight])
    torch.testing.assert_close(gradient, 0.3 * (model.norm.weight - received.norm.weight).detach())


def test_fedprox_is_zero_and_smooth_at_the_start():
    model, received, (x, y) = Normed(1), Normed(1), batch()
    terms = FedProx(mu=1e6).loss(model, {"received": received}, x, y, {})
    assert terms["prox"].item() == 0.0
    assert all((g == 0).all() for g in torch.autograd.grad(terms["prox"], list(model.parameters())))


# MOON


def moon_terms(labels=LABELS, has_previous=True, mu=0.7, temperature=0.5):
    model, frozen = Bare(0), {"received": Bare(1), "previous": Bare(2)}
    x, y = batch(labels)
    context = {"has_previous": torch.tensor(has_previous)}
    terms = Moon(mu=mu, temperature=temperature).loss(model, frozen, x, y, context)
    return terms, model, frozen, x, y


@pytest.mark.parametrize("labels", [LABELS, (1,)], ids=["batch", "batch of one"])
@pytest.mark.parametrize("temperature", [0.5, 0.1])
def test_moon_contrasts_cosines_with_the_received_and_the_previous_model(labels, temperature):
    terms, model, frozen, x, y = moon_terms(labels, temperature=temperature)
    # constants: neither frozen model is learned from
    z_received, z_previous = (frozen[name].features(x).tolist() for name in ("received", "previous"))

    def reference():
        pairs = [(cosine(z, g), cosine(z, p)) for z, g, p in zip(x.tolist(), z_received, z_previous, strict=True)]
        return 0.7 * mean(nll([g / temperature, p / temperature], 0) for g, p in pairs)

    check(terms["contrast"], reference, x, *model.parameters())
    check(terms["ce"], cross_entropy(model, x, y), x, *model.parameters())
    sum(terms.values()).backward()
    assert all(p.grad is None for other in frozen.values() for p in other.parameters())


def test_moon_without_a_previous_model_is_zero_and_not_log_2():
    terms, model, _, x, _ = moon_terms(has_previous=False)
    assert terms["contrast"].item() == 0.0
    check(terms["contrast"], lambda: 0.0, x, *model.parameters())


def test_moon_knows_whether_it_took_part_before_and_remembers_the_model_as_it_is_after_training():
    method = Moon()
    who = client(method, {})
    assert not method.prepare(who)["has_previous"]
    with torch.no_grad():
        who.net.classifier.weight += 1  # training
    who.memory = method.remember(who, {})
    assert method.prepare(who)["has_previous"]
    floats = {name: value for name, value in who.net.state_dict().items() if value.is_floating_point()}
    assert {f"previous/{name}" for name in floats} == set(who.memory)
    assert all(torch.equal(who.memory[f"previous/{name}"], value) for name, value in floats.items())


# FedRCL


def rcl_reference(stages, labels, tau=0.05, beta=1.0, threshold=0.7):
    """(contrast, penalty): means over samples, then over depths."""
    contrasts, penalties = [], []
    for rows in stages:
        n = range(len(rows))
        s = [[cosine(a, b) for b in rows] for a in rows]
        contrast, penalty = [], []
        for i in n:
            positive = min(s[i][j] for j in n if labels[j] == labels[i])  # the anchor itself is a candidate
            negatives = sorted((s[i][j] for j in n if labels[j] != labels[i]), reverse=True)[:2]
            contrast.append(nll([v / tau for v in (positive, *negatives)], 0))
            others = [s[i][j] for j in n if labels[j] == labels[i] and j != i]
            closest = min(others) if others and min(others) >= threshold else -1.0
            penalty.append(nll([1 / tau, closest / tau], 0))
        contrasts.append(mean(contrast))
        penalties.append(mean(penalty))
    return mean(contrasts), beta * mean(penalties)


@pytest.mark.parametrize("keys", [{"beta": 0.4}, {"beta": 2.0, "tau": 0.5, "threshold": -0.2}], ids=str)
@pytest.mark.parametrize("labels", [LABELS, (0, 1), (2, 2, 2), (3,)], ids=["mixed", "a pair", "one class", "one"])
def test_fedrcl_takes_the_hardest_positive_and_two_negatives_at_five_depths(labels, keys):
    model, (x, y) = Bare(), batch(labels)
    terms = FedRCL(**keys).loss(model, {}, x, y, {})
    assert set(terms) == {"ce", "contrast", "penalty"}
    for which, name in enumerate(("contrast", "penalty")):

        def reference(which=which):
            stages = [stage.tolist() for stage in model.stages_and_features(x)[0]]
            return rcl_reference(stages, labels, **keys)[which]

        check(terms[name], reference, x, *model.parameters())
    check(terms["ce"], cross_entropy(model, x, y), x, *model.parameters())


def angles(*cosines):
    """Unit vectors in the plane, each at the given cosine to the first axis."""
    rows = [[c, math.sqrt(1 - c * c), *[0.0] * (D - 2)] for c in cosines]
    return torch.tensor(rows).double().requires_grad_()


def rcl(vectors, labels, **keys):
    model = Bare()
    model.stages_and_features = lambda x: ([x] * 5, x)
    terms = FedRCL(**keys).loss(model, {}, vectors, torch.tensor(labels), {})
    sum(terms.values()).backward()
    assert vectors.grad.isfinite().all()
    return {name: term.item() for name, term in terms.items()}


@pytest.mark.parametrize("s, pushed", [(0.69, False), (0.71, True), (0.95, True)])
def test_fedrcl_pushes_a_pair_apart_from_a_similarity_of_0_7(s, pushed):
    expected = math.log(1 + math.exp(((s if pushed else -1) - 1) / 0.05))
    assert rcl(angles(1.0, s), (0, 0))["penalty"] == pytest.approx(expected, rel=1e-6)


def test_fedrcl_judges_by_the_least_similar_sample_of_the_class():
    """Two are close, but the third is far from both: nobody is pushed."""
    assert rcl(angles(1.0, 0.99, 0.1), (0, 0, 0))["penalty"] < 1e-15


def test_fedrcl_without_negatives_is_zero_and_not_nan():
    assert rcl(angles(1.0, 0.5, 0.2), (3, 3, 3))["contrast"] == 0.0
    assert rcl(angles(1.0), (3,))["contrast"] == 0.0


def test_fedrcl_an_anchor_that_is_alone_is_its_own_positive():
    found = rcl(angles(1.0, 0.8), (0, 1))
    assert found["contrast"] == pytest.approx(math.log(1 + math.exp((0.8 - 1) / 0.05)), rel=1e-6)
    assert found["penalty"] < 1e-15


# FedProto, and what the other prototype methods share with it


def test_fedproto_pulls_by_the_mean_squared_error_and_leaves_missing_classes_alone():
    model, (x, y) = Bare(), batch()
    context = prototypes(absent=(1, 3))
    terms = FedProto(lam=0.8).loss(model, {}, x, y, context)
    check(terms["proto"], lambda: 0.8 * pull(x, y, **context), x, *model.parameters())
    check(terms["ce"], cross_entropy(model, x, y), x, *model.parameters())
    (gradient,) = torch.autograd.grad(terms["proto"], [x])
    assert (gradient[y == 1] == 0).all()  # neither to the origin nor to the nonsense in that row
    row = 0.8 * 2 * (x[0] - context["P"][0]) / (len(y) * D)
    torch.testing.assert_close(gradient[0], row.detach())


@pytest.mark.parametrize("method", [FedProto(), FedTGP(), FedGMKD()], ids=lambda m: m.name)
def test_the_first_round_is_cross_entropy_only(method):
    model, (x, y) = Bare(), batch()
    terms = method.loss(model, {}, x, y, method.broadcast(start(method)))
    check(terms["ce"], cross_entropy(model, x, y), x, *model.parameters())
    assert "proto" in terms and all(terms[name].item() == 0.0 for name in terms.keys() - {"ce"})
    leaves = [x, *model.parameters()]
    whole = torch.autograd.grad(sum(terms.values()), leaves, retain_graph=True)
    alone = torch.autograd.grad(terms["ce"], leaves)
    assert all(torch.equal(a, b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.parametrize("method", [FedProto(), FedTGP(), FedGMKD(), FedSA()], ids=lambda m: m.name)
@pytest.mark.parametrize("labels", [(0, 1, 1, 3, 0), (2, 2, 2), (1,)], ids=["some", "one class", "one sample"])
def test_reported_means_are_those_of_evaluation_mode(method, labels):
    who = trained_client(method, labels)
    features = eval_features(who)
    before = {name: value.clone() for name, value in who.net.state_dict().items()}
    with torch.no_grad():
        report = method.report(who, {})
    assert report["counts"].tolist() == [labels.count(c) for c in range(C)]
    for c in range(C):
        rows = [z for z, label in zip(features, labels, strict=True) if label == c]
        expected = sum(rows) / len(rows) if rows else torch.zeros(who.net.dim)
        torch.testing.assert_close(report["means"][c], expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(before[name], value) for name, value in who.net.state_dict().items())


@pytest.mark.parametrize("method", [FedProto(), FedSA()], ids=lambda m: m.name)
def test_the_server_takes_the_plain_mean_of_the_holders_and_keeps_absent_classes(method):
    first, second = stacked([[9, 1, 0, 0], [1, 0, 0, 0]]), stacked([[0, 5, 2, 0], [0, 1, 2, 0], [0, 0, 7, 0]], seed=4)
    state = aggregate(method, start(method), first)
    assert state["present"].tolist() == [True, True, False, False]
    for c, row in plain_means(first).items():
        torch.testing.assert_close(state["P"][c], row)
    later = aggregate(method, state, second)
    assert later["present"].tolist() == [True, True, True, False]
    for c, row in plain_means(second).items():
        torch.testing.assert_close(later["P"][c], row)
    assert torch.equal(later["P"][0], state["P"][0])  # nobody held it this time


@pytest.mark.parametrize("n", [5, 300], ids=["few", "many"])
def test_nearest_prototype_by_loops_even_far_from_the_origin(n):
    """The product form of distances would lose these in rounding, and a zero row for class 1 would win."""
    model = Bare().float()
    model.mix = model.mix.float()
    P = 3000 + random(C, D).float()
    present = torch.tensor([True, False, True, True])
    x = 3000 + random(n, D, seed=8).float()
    with torch.no_grad():
        found = FedProto().predict(model, x, {"P": P, "present": present})
    assert list(found) == ["head", "nearest_prototype"]
    expected = [min((0, 2, 3), key=lambda c: math.dist(z, P[c].tolist())) for z in x.tolist()]
    assert found["nearest_prototype"].argmax(1).tolist() == expected
    torch.testing.assert_close(found["head"], model(x))


# FedTGP


def tgp_network(state):
    names = ("embedding", "weight1", "bias1", "weight2", "bias2")
    return {name: state[name].clone().requires_grad_() for name in names}


def tgp_reference(network, reports, margin, steps, lr):
    """Embedding -> linear -> ReLU -> linear, taught by plain gradient descent on all uploads at once -> P."""
    counts = reports["counts"]
    uploads = [(reports["means"][k, c], c) for k in range(len(counts)) for c in range(C) if counts[k, c] > 0]

    def make():
        hidden = (network["embedding"] @ network["weight1"].T + network["bias1"]).clamp(min=0)
        return hidden @ network["weight2"].T + network["bias2"]

    for _ in range(steps):
        P, losses = make(), []
        for upload, c in uploads:
            distances = [torch.linalg.vector_norm(upload - P[j]) + (margin if j == c else 0.0) for j in range(C)]
            losses.append(torch.logsumexp(-torch.stack(distances), 0) + distances[c])
        gradients = torch.autograd.grad(sum(losses) / len(losses), list(network.values()))
        for value, gradient in zip(network.values(), gradients, strict=True):
            value.data -= lr * gradient
    return make().detach()


def nearest_distances(rows):
    return [min(math.dist(a, b) for j, b in enumerate(rows) if j != i) for i, a in enumerate(rows)]


def test_fedtgp_trains_its_generator_from_round_to_round():
    method = FedTGP(server_epochs=4, server_lr=0.2)
    state = start(method)
    network = tgp_network(state)
    assert not state["present"].any()
    for counts in ([[5, 1, 0, 0], [1, 2, 3, 0]], [[2, 0, 0, 0], [2, 1, 0, 0]]):
        reports = stacked(counts, seed=len(counts[0]) + counts[0][0])
        margin = max(nearest_distances([row.tolist() for row in plain_means(reports).values()]))
        P = tgp_reference(network, reports, margin, 4, 0.2)
        state = aggregate(method, state, reports)
        assert float(state["log/margin"]) == pytest.approx(margin)
        torch.testing.assert_close(state["P"], P)
        assert state["present"].tolist() == [True, True, True, False]  # class 3 has a row, but nobody ever sent one
    assert not any(value.requires_grad for value in state.values())


def test_fedtgp_makes_one_step_per_batch():
    """Equal uploads, so that their order does not matter: 5 of them in batches of 2 are 3 steps."""
    method = FedTGP(server_epochs=3, server_batch=2, server_lr=0.2)
    state = start(method)
    reports = {"means": random(1, C, D).expand(5, C, D), "counts": torch.tensor([[0, 1, 0, 0]] * 5)}
    P = tgp_reference(tgp_network(state), reports, 0.0, 3 * 3, 0.2)
    torch.testing.assert_close(aggregate(method, state, reports)["P"], P)


def tgp_margin(rows, **keys):
    """The margin that the server uses when one client sends these class means."""
    means = torch.zeros(1, C, D).double()
    means[0, : len(rows), : len(rows[0])] = torch.tensor(rows)
    reports = {"means": means, "counts": (torch.arange(C) < len(rows)).long()[None]}
    method = FedTGP(server_epochs=1, **keys)
    state = aggregate(method, start(method), reports)
    assert all(value.isfinite().all() for value in state.values())
    return float(state["log/margin"])


def test_fedtgp_margin_is_the_largest_of_the_nearest_distances_and_capped():
    rows = [[0.0, 0.0], [3.0, 0.0], [3.0, 4.0]]  # nearest: 3, 3, 4; the largest distance of all is 5
    assert tgp_margin(rows) == pytest.approx(4.0)
    assert tgp_margin([[0.0], [1e4]]) == 100.0
    assert tgp_margin([[0.0], [9.0]], max_margin=2.0) == 2.0


def test_fedtgp_margin_is_exact_for_many_close_classes():
    means = (300 + 0.01 * random(1, 30, 8)).float()
    margin = FedTGP().margin(means, torch.ones(1, 30, dtype=torch.long))
    assert float(margin) == pytest.approx(max(nearest_distances(means[0].tolist())), rel=1e-3)


def test_fedtgp_margin_of_a_single_class_is_0_and_not_a_billion():
    assert tgp_margin([[1.0, 2.0]]) == 0.0


def test_fedtgp_survives_an_upload_that_coincides_with_its_prototype():
    method = FedTGP(server_epochs=3)
    state = start(method)
    target = random(D)
    state |= {"weight2": torch.zeros(D, D).double(), "bias2": target}  # the generator gives this vector for every class
    reports = {"means": target.expand(2, C, D), "counts": torch.ones(2, C, dtype=torch.long)}
    assert all(value.isfinite().all() for value in aggregate(method, state, reports).values())


def test_fedtgp_clients_compute_fedprotos_loss():
    model, (x, y), context = Bare(), batch(), prototypes(absent=(1,))
    ours, theirs = (method.loss(model, {}, x, y, context) for method in (FedTGP(lam=2.0), FedProto(lam=2.0)))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
