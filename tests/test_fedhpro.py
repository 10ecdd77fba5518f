"""FedHPro: the method as printed, its control, its ablations, and what the authors' released code computes."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from test_methods import C, client, net, one_round

import fedhpro
from fedhpro import equations as eq
from fedhpro.config import PRESETS, configure
from fedhpro.errors import ConfigError
from fedhpro.federation import Federation
from fedhpro.methods import METHODS
from fedhpro.methods import fedhpro_released as released
from fedhpro.methods.fedhpro import FedHPro
from fedhpro.methods.fedhpro_variants import FedHProVariants
from fedhpro.methods.refit import hard_means, refitted
from fedhpro.randomness import generator


def start(method):
    return method.server_state(net(), generator(0, "state"))


def terms_of(method, state, received=None):
    who = client(method, state, received=received)
    context = method.prepare(who)
    model = who.net.eval()  # fixed statistics: the terms can be computed again by hand
    x = who.transform.plain(who.data.x)
    return method.loss(model, {}, x, who.data.y, context), model.features(x), who.data.y, context


def run(source, **keys):
    with Federation(configure(**(TINY | keys)), source) as federation:
        start = {name: value.clone() for name, value in federation.state.items()}
        history = list(federation.rounds())
        return history, start, federation


def test_the_method_file_is_short():
    assert len(Path(fedhpro.__file__).with_name("methods").joinpath("fedhpro.py").read_text().splitlines()) <= 120


def test_loss_is_eq_12_13_14():
    method = FedHPro()
    state = start(method)
    terms, z, y, context = terms_of(method, state)
    means, counts = eq.class_means(z, y, C)
    margin = eq.client_margin(means, counts)
    torch.testing.assert_close(context["margin"], margin.detach())
    torch.testing.assert_close(terms["hpcl"], eq.hpcl(z, y, state["S"], margin, 0.05))
    torch.testing.assert_close(terms["hpal"], eq.hpal(z, y, state["S"]))
    assert set(terms) == {"ce", "hpcl", "hpal"} and state["S"].shape == (C, 5, 128)


def test_report_is_eq_5_with_the_clients_own_classifier():
    method = FedHPro()
    who = client(method, start(method))
    report = method.report(who, {})
    z, y = who.features()
    z.requires_grad_()
    F.cross_entropy(who.net.classify(z), y, reduction="sum").backward()
    for c in range(C):
        torch.testing.assert_close(report["gradients"][c], z.grad[y == c].mean(0))


def test_aggregate_is_eq_6_to_9_with_the_averaged_classifier():
    method = FedHPro()
    state = start(method)
    reports = {"gradients": torch.randn(3, C, 128), "counts": torch.tensor([[5, 1, 0, 2], [1, 0, 0, 2], [9, 9, 0, 9]])}
    model = {"classifier.weight": torch.randn(C, 128), "classifier.bias": torch.randn(C)}
    new, override = method.aggregate(state, model, reports, generator(0))
    target = torch.stack([reports["gradients"][:, c][reports["counts"][:, c] > 0].mean(0) for c in (0, 1, 3)])
    target = torch.cat([target[:2], torch.zeros(1, 128), target[2:]])
    present = torch.tensor([True, True, False, True])
    expected, trace = eq.match(state["S"], target, present, *model.values(), 30, 0.1)
    torch.testing.assert_close(new["S"], expected)
    assert torch.equal(new["S"][2], state["S"][2]) and override == {}
    torch.testing.assert_close(new["log/L_GM_start"], trace[0][present].mean())


def test_the_control_keeps_S_where_it_started(tiny_source):
    history, before, federation = run(tiny_source, M=0)
    assert torch.equal(federation.state["S"], before["S"])
    assert all(record["server"]["L_GM"] == record["server"]["L_GM_start"] for record in history)
    _, before, federation = run(tiny_source, M=30)
    assert not torch.equal(federation.state["S"], before["S"])


def test_both_losses_off_is_fedavg(tiny_source):
    _, _, ours = run(tiny_source, hpcl="off", hpal="off")
    _, _, fedavg = run(tiny_source, method="fedavg")
    assert all(torch.equal(ours.model[name], fedavg.model[name]) for name in fedavg.model)
    assert not any(name.startswith("report/") for name in ours.schema) and set(ours.sent()) == set(fedavg.sent())


@pytest.mark.parametrize("off, left", [("hpcl", {"ce", "hpal"}), ("hpal", {"ce", "hpcl"})])
def test_ablations_of_table_5(tiny_source, off, left):
    history, *_ = run(tiny_source, **{off: "off"})
    assert set(history[-1]["loss"]) == left


def test_margin_off_and_per_epoch(tiny_source):
    method = FedHPro(margin="off")
    terms, z, y, context = terms_of(method, start(method))
    assert context["margin"] == 0
    torch.testing.assert_close(terms["hpcl"], eq.hpcl(z, y, start(method)["S"], 0.0))
    per_round, *_ = run(tiny_source, local_epochs=2)
    per_epoch, *_ = run(tiny_source, local_epochs=2, margin_per="epoch")
    assert per_round[0]["loss"]["hpcl"] != per_epoch[0]["loss"]["hpcl"]
    who = client(FedHPro(margin_per="epoch"), start(FedHPro()))
    context = FedHPro(margin_per="epoch").refresh(who, {"margin": torch.tensor(-1.0)})
    assert context["margin"] > 0


@pytest.mark.parametrize("swap", [{"hpcl": "global"}, {"hpal": "global"}, {"hpcl": "global", "hpal": "global"}])
def test_global_prototypes_as_anchors_of_table_6(tiny_source, swap):
    history, _, federation = run(tiny_source, **swap)
    for term in swap:
        assert history[0]["loss"][term] == 0  # no prototypes yet in round 1
        assert history[1]["loss"][term] > 0
    assert federation.state["present"].all()
    assert ("S" in federation.method.broadcast(federation.state)) == (len(swap) == 1)
    method = FedHProVariants(**swap)
    state = start(method) | {"P": torch.randn(C, 128), "present": torch.tensor([True, True, False, True])}
    terms, z, y, context = terms_of(method, state)
    if "hpcl" in swap:
        expected = eq.hpcl(z, y, state["P"][:, None], context["margin"], 0.05, state["present"])
        torch.testing.assert_close(terms["hpcl"], expected)
    if "hpal" in swap:
        torch.testing.assert_close(terms["hpal"], eq.hpal(z, y, state["P"][:, None], state["present"]))


def test_start_from_prototypes():
    method = FedHProVariants(hyper_init="prototypes", hyper_scale=0.0, M=0)
    state = start(method)
    assert (state["S"] == 0).all()
    terms, *_ = terms_of(method, state)
    assert terms["hpcl"] == 0 and terms["hpal"] == 0  # nothing to be pulled to before the first means
    state, _ = one_round(method, state, [(0, 1, 2), (0, 1)])
    assert state["present"].tolist() == [True, True, True, False]
    torch.testing.assert_close(state["S"][0, 3], state["P"][0])
    assert (state["S"][3] == 0).all()
    later, _ = one_round(method, state, [(0, 3), (3,)])
    assert torch.equal(later["S"][0], state["S"][0])  # a class starts once
    torch.testing.assert_close(later["S"][3, 0], later["P"][3])


def test_warm_up_of_hpal():
    method = FedHProVariants(hpal_warmup=4)
    state = start(method)
    full, *_ = terms_of(FedHProVariants(), state)
    for weight in (0.25, 0.5, 0.75, 1.0, 1.0):
        terms, *_ = terms_of(method, state)
        torch.testing.assert_close(terms["hpal"], full["hpal"] * weight)
        state = one_round(method, state, [(0, 1, 2, 3)])[0] | {"S": state["S"]}


def test_default_switches_are_the_printed_method():
    plain, switched = FedHPro(), FedHProVariants()
    assert asdict(plain).items() <= asdict(switched).items()
    state = start(plain)
    assert torch.equal(state["S"], start(switched)["S"])
    for a, b in zip(terms_of(plain, state)[0].items(), terms_of(switched, state)[0].items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1])
    ours, theirs = one_round(plain, state, [(0, 1), (2, 3)])[0], one_round(switched, state, [(0, 1), (2, 3)])[0]
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# The smaller uplink, and passes over the data


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"exchange": "classifier"},
        {"gradient_samples": 3, "gradient_scale": "mean/n"},
        {"hpcl": "global", "hyper_init": "prototypes"},
        {"method": "fedproto-hp"},
        {"method": "fedgmkd-hp", "exchange": "classifier"},
    ],
)
def test_probabilities_say_as_much_as_gradients_in_fewer_bytes(tiny_source, keys):
    plain, _, ours = run(tiny_source, **keys)
    smaller, _, theirs = run(tiny_source, **keys, uplink="probabilities")
    torch.testing.assert_close(theirs.state["S"], ours.state["S"], rtol=1e-5, atol=1e-5)
    assert ours.state.keys() == theirs.state.keys() and smaller[-1]["server"] == pytest.approx(
        plain[-1]["server"], rel=1e-4
    )
    saved = len(ours.clients) * 4 * C * (ours.net.dim - C)
    assert [r["bytes_up"] - s["bytes_up"] for r, s in zip(plain, smaller, strict=True)] == [saved] * len(plain)


def test_probabilities_of_the_received_model_cannot_be_decoded():
    with pytest.raises(ConfigError, match=r"^uplink=probabilities needs gradients=after"):
        configure(uplink="probabilities", gradients="before")
    with pytest.raises(ConfigError, match="uplink=probabilities needs gradients=after"):
        configure(preset="released", uplink="probabilities")


def test_frozen_anchors_need_no_gradients(tiny_source):
    keys = {"rounds": 2, "M": 0}
    plain, _, ours = run(tiny_source, **keys)
    less, _, theirs = run(tiny_source, **keys, uplink="off")
    assert ours.schema.keys() - theirs.schema.keys() == {"report/gradients", "report/counts"}
    assert [r["accuracy"] for r in less] == [r["accuracy"] for r in plain]
    assert all(torch.equal(ours.model[name], theirs.model[name]) for name in ours.model)
    with pytest.raises(ConfigError, match=r"^uplink=off needs M=0"):
        configure(uplink="off")
    with pytest.raises(ConfigError, match=r"^uplink=off is for fedhpro with M=0"):
        configure(method="fedproto-hp", uplink="off", M=0)


def test_blocks_are_anchors_that_features_can_reach(tiny_source):
    _, _, federation = run(tiny_source, **(TINY | {"I": 1, "M": 0, "hyper_init": "blocks", "uplink": "off"}))
    S = federation.state["S"][:, 0]
    torch.testing.assert_close(S @ S.T, torch.eye(len(S)) * S.shape[1])
    assert S.min() == 0 and not [name for name in federation.schema if name.startswith("report/")]
    with pytest.raises(ConfigError, match=r"^hyper_init=blocks: 4 classes have no 3 features to share out$"):
        run(tiny_source, **(TINY | {"hyper_init": "blocks", "dim": 3}))


@pytest.mark.parametrize(
    "method, before, after",
    [
        (FedHPro(), 1, 1),
        (FedHPro(margin="off"), 0, 1),
        (FedHPro(M=0, uplink="off"), 1, 0),
        (FedHPro(hpcl="off", hpal="off"), 0, 0),
        (FedHProVariants(hpcl="global", hyper_init="prototypes"), 1, 1),
        (FedHProVariants(hpcl="global", hpal="global"), 1, 1),
        (FedHProVariants(hpcl="global", hpal="off", gradient_samples=2), 1, 1),
        (FedHProVariants(margin="off", gradients="before"), 1, 0),
        (METHODS["fedproto-hp"](), 0, 1),
        (METHODS["fedgmkd-hp"](), 0, 1),
        (METHODS["fedsa-hp"](), 0, 1),
    ],
)
def test_no_pass_over_the_data_that_the_formulas_do_not_need(method, before, after):
    who, passes = client(method, start(method)), []
    real = who.features

    def features(**keys):
        passes.append(keys)
        return real(**keys)

    who.features = features
    context = method.prepare(who)
    assert len(passes) == before
    context = method.refresh(who, context)
    method.report(who, context)
    assert len(passes) == before + after


# What the authors' code computes


def test_released_preset_runs_and_overwrites_the_classifier(tiny_source):
    keys = PRESETS["released"] | TINY | {"min_samples": 2, "clients": 3}
    history, _, federation = run(tiny_source, **keys)
    assert torch.equal(federation.model["classifier.weight"], federation.state["sent_weight"])
    assert history[0]["loss"]["hpcl"] < 0.5 * history[0]["loss"]["ce"]
    assert history[0]["loss"]["hpal"] < 0.05 * history[0]["loss"]["ce"]
    assert len(set(federation.sizes)) <= 2 and max(federation.sizes) - min(federation.sizes) <= 1


def test_gradients_before_training_are_those_of_the_received_model(tiny_source):
    with Federation(configure(**(TINY | {"gradients": "before"})), tiny_source) as federation:
        sent = federation.sent()
        upload, _ = federation.trainer.update(1, 0, sent, {})
        federation.trainer.benches[0].load(sent, {})
        who = client(FedHPro(), federation.state, model=federation.net)
        who.data, who.transform = federation.clients[0].train, federation.trainer.transform
        torch.testing.assert_close(upload["report/gradients"], FedHPro().report(who, {})["gradients"])


def test_gradient_scale_and_sample_limit():
    labels = (0,) * 9 + (1,) * 2
    method = FedHProVariants(gradient_scale="mean/n")
    who = client(method, start(method), labels)
    mean, twice = FedHPro().report(who, {}), method.report(who, {})
    torch.testing.assert_close(twice["gradients"][0], mean["gradients"][0] / 9)
    torch.testing.assert_close(twice["gradients"][1], mean["gradients"][1] / 2)
    few = FedHProVariants(gradient_samples=4).report(who, {})
    assert few["counts"].tolist() == [4, 2, 0, 0]


def test_sign_matching_descends_its_formula():
    torch.manual_seed(0)
    S, target = torch.randn(3, 2, 5), torch.randn(3, 5)
    W, b = torch.randn(3, 5), torch.randn(3)
    present = torch.tensor([True, True, False])
    ours = released.sign_match(S, target, present, W, b, steps=1, lr=0.1)
    S = S.requires_grad_()
    g = eq.hyper_gradients(S, W, b)
    loss = sum(1 - target[c, q] * g[c, q] / (abs(target[c, q] * g[c, q]) + 1e-6) for c in (0, 1) for q in range(5))
    torch.testing.assert_close(ours, (S - 0.1 * torch.autograd.grad(loss, S)[0]).detach())


def test_margin_beside_the_exponentials():
    torch.manual_seed(0)
    z, y, S = torch.randn(6, 8), torch.randint(0, 3, (6,)), torch.randn(3, 2, 8)
    margin = torch.tensor(2.5)
    s = eq.similarity(z, S)
    denominator = torch.exp(s / 0.2).sum(1) + margin
    expected = -torch.log(torch.exp(s / 0.2)[torch.arange(6), y] / denominator).mean()
    torch.testing.assert_close(released.hpcl(z, y, S, margin, 0.2), expected)
    means = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.0, 0.0]])
    inner = FedHProVariants(margin="denominator").margin_of(means, torch.tensor([1, 1, 0]))
    assert inner.item() == pytest.approx(2 * 5 / 4)


def test_weak_losses_of_the_code():
    method = FedHProVariants(hpcl_scale="mean/n", hpal_form="unit-mean", margin="off")
    state = start(method)
    terms, z, y, _ = terms_of(method, state)
    torch.testing.assert_close(terms["hpcl"], eq.hpcl(z, y, state["S"], 0.0) / len(y))
    H = F.normalize(state["S"].mean(1), dim=1)
    torch.testing.assert_close(terms["hpal"], F.huber_loss(F.normalize(z, dim=1), H[y]))


def test_weight_gradients_equal_autograd():
    torch.manual_seed(0)
    z, y = torch.randn(9, 5), torch.randint(0, 2, (9,))
    h = torch.nn.Linear(5, 3)
    ours = released.weight_gradients(z, y, h)
    for c in (0, 1):
        (expected,) = torch.autograd.grad(F.cross_entropy(h(z[y == c]), y[y == c]), h.weight)
        torch.testing.assert_close(ours[c], expected)
    assert (ours[2] == 0).all()


def test_retraining_equals_autograd():
    g = torch.Generator().manual_seed(0)
    features, target = torch.randn(3, 4, 5, generator=g), torch.randn(3, 3, 5, generator=g)
    W, b = torch.randn(3, 5, generator=g), torch.randn(3, generator=g)
    target[1] = 0  # a class that nobody holds
    ours = released.match_features(features, target, W, b, steps=3, lr=0.1)  # written out
    expected, W = features, W.requires_grad_()
    for _ in range(3):
        expected = expected.detach().requires_grad_()
        losses = [F.cross_entropy(expected[c] @ W.T + b, torch.full((4,), c)) for c in (0, 2)]
        rows = torch.stack([torch.autograd.grad(loss, W, create_graph=True)[0] for loss in losses])
        apart = (1 - F.cosine_similarity(rows, target[[0, 2]], dim=2)).sum()
        expected = expected - 0.1 * torch.autograd.grad(apart, expected)[0]
    torch.testing.assert_close(ours, expected.detach())
    assert torch.equal(ours[1], features[1])

    weight, bias = released.fit_classifier(features, generator(1), epochs=5, batch=5)
    rng, layer = generator(1), torch.nn.Linear(5, 3)
    with torch.no_grad():
        layer.weight.copy_((2 * torch.rand(3, 5, generator=rng) - 1) * 5**-0.5)
        layer.bias.copy_((2 * torch.rand(3, generator=rng) - 1) * 5**-0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for _ in range(5):
        for rows in torch.randperm(12, generator=rng).split(5):
            optimizer.zero_grad()
            F.cross_entropy(layer(features.reshape(12, 5)[rows]), rows // 4).backward()
            optimizer.step()
    torch.testing.assert_close((weight, bias), (layer.weight.detach(), layer.bias.detach()))


def test_retraining_gives_a_classifier_that_knows_its_synthetic_features():
    method = FedHProVariants(retrain_classifier=True)
    state = start(method)
    new, override = one_round(method, state, [(0, 1, 2, 3)] * 2)
    logits = new["synthetic"] @ override["classifier.weight"].T + override["classifier.bias"]
    assert (logits.argmax(2) == torch.arange(C)[:, None]).float().mean() > 0.7  # chance is 0.25
    assert not torch.equal(new["synthetic"], state["synthetic"])


def test_every_mix_of_switches_that_share_code_runs(tiny_source):
    for keys in (
        {"hpcl": "off", "hpal": "off", "retrain_classifier": True},
        {"hpcl": "global", "hpal": "global", "retrain_classifier": True, "gradients": "before"},
        {"hpcl": "global", "margin": "denominator"},
        {"hyper_init": "prototypes", "margin": "denominator", "margin_per": "epoch", "local_epochs": 2},
    ):
        history, *_ = run(tiny_source, **keys)
        assert len(history) == 2 and history[-1]["aggregated"] and not history[-1]["refused"]
    history, *_ = run(tiny_source, hpcl="global", margin="denominator")
    assert history[0]["loss"]["hpcl"] == 0  # no prototypes yet


@pytest.mark.parametrize("init", ["orthogonal", "blocks"])
@pytest.mark.parametrize("I", [1, 3])
def test_starts_at_right_angles(init, I):
    S = start(FedHProVariants(hyper_init=init, I=I))["S"]
    torch.testing.assert_close(torch.linalg.vector_norm(S, dim=2), torch.full((C, I), 128**0.5))
    products = S[:, 0] @ S[:, 0].T
    torch.testing.assert_close(products, 128 * torch.eye(C), atol=1e-3, rtol=0)
    assert init != "blocks" or float(S.min()) == 0  # where features behind a ReLU can go


def test_hard_means_have_the_direction_of_the_weight_gradient():
    z, y = torch.randn(30, 8, generator=generator(0, "z")).double(), torch.arange(30) % C
    h = torch.nn.Linear(8, C).double()
    points, counts = hard_means(z, y, h.weight.detach(), h.bias.detach())
    for c in range(C):
        own = y == c
        F.cross_entropy(h(z[own]), y[own], reduction="sum").backward()
        torch.testing.assert_close(F.normalize(points[c], dim=0), -F.normalize(h.weight.grad[c], dim=0))
        assert int(counts[c]) == int(own.sum())
        h.zero_grad()


@pytest.mark.parametrize("kind", ["means", "gradients"])
def test_a_classifier_that_is_fitted_again(tiny_source, kind):
    history, _, federation = run(tiny_source, method="fedhpro", refit=kind, M=0, rounds=3, local_epochs=3)
    plain = run(tiny_source, method="fedhpro", M=0, rounds=3, local_epochs=3)[2]
    assert not history[-1]["refused"]
    assert not torch.equal(federation.model["classifier.weight"], plain.model["classifier.weight"])
    assert history[-1]["accuracy"]["AVG"] > 50  # chance is 25


def test_refitting_separates_the_points():
    points = torch.randn(3, C, 16, generator=generator(1, "points"))
    held = torch.ones(3, C, dtype=torch.bool)
    held[0, 1] = False
    points[0, 1] = torch.nan  # what a client does not hold is not looked at
    weight, bias = refitted(points, held, torch.zeros(C, 16), torch.zeros(C))
    labels = torch.arange(C).expand(3, C)[held]
    assert (F.linear(points[held], weight, bias).argmax(1) == labels).all()
