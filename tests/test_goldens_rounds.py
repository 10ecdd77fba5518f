"""As test_goldens.py, in whole rounds: frozen models, partial participation, prototypes only, and what travels."""

import math
from collections import Counter

import pytest
import torch
from conftest import TINY
from test_goldens import nearest_distances
from test_methods import C, net

from fedhpro.config import configure
from fedhpro.data.sources import Split
from fedhpro.errors import ConfigError
from fedhpro.federation import Federation
from fedhpro.methods import METHODS
from fedhpro.training import section

PROTOTYPES = ["fedproto", "fedtgp", "fedgmkd", "fedsa"]
PLUGGED = [f"{name}-hp" for name in PROTOTYPES]
RIVALS = ["fedprox", "moon", "fedrcl", *PROTOTYPES, *PLUGGED]
D = net().dim


def federate(source, **keys):
    return Federation(configure(**(TINY | keys)), source)


def floats(model):
    return {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Watched:
    """A federation's clients, observed: for each update, what its first and last step saw and what came out."""

    def __init__(self, federation):
        self.updates, method, update = [], federation.trainer.method, federation.trainer.update
        steps = []

        class Spy(type(method)):
            def loss(self, net, frozen, x, y, context):
                terms = super().loss(net, frozen, x, y, context)
                others = {name: floats(other) for name, other in frozen.items()}
                trained = {name: p.detach().clone() for name, p in net.named_parameters()}
                quiet = not any(module.training for other in frozen.values() for module in other.modules())
                quiet &= not any(p.requires_grad for other in frozen.values() for p in other.parameters())
                values = {name: term.item() for name, term in terms.items()}
                seen = {"terms": values, "frozen": others, "net": trained, "quiet": quiet, "context": context}
                steps.append(seen)
                return terms

        def watched(round, k, received, memory):
            steps.clear()
            received = {name: value.clone() for name, value in received.items()}
            upload, kept = update(round, k, received, memory)
            seen = {"k": k, "round": round, "sent": received, "upload": upload, "kept": kept, "steps": list(steps)}
            self.updates.append(seen)
            return upload, kept

        federation.trainer.method = Spy(**federation.config.parameters)
        federation.trainer.update = watched


@pytest.mark.parametrize("method", ["fedprox", "moon"])
def test_frozen_models_are_those_of_this_round_and_never_change_while_training(tiny_source, method):
    """A copy from an earlier round, or BatchNorm statistics that follow the batches, would show here."""
    with federate(tiny_source, method=method) as federation:
        watched = Watched(federation)
        list(federation.rounds())
    assert len(watched.updates) == 2 * 3
    for update in watched.updates:
        assert len(update["steps"]) > 1 and all(step["quiet"] for step in update["steps"])
        received = section(update["sent"], "model")
        assert any("running_var" in name for name in received)
        for step in update["steps"]:
            assert same(step["frozen"]["received"], received)
        if method == "fedprox":
            assert update["steps"][0]["terms"]["prox"] == 0.0 < update["steps"][-1]["terms"]["prox"]
    assert not same(section(watched.updates[0]["sent"], "model"), section(watched.updates[-1]["sent"], "model"))


def test_moons_previous_model_is_the_one_after_training_of_the_last_participation(tiny_source):
    with federate(tiny_source, method="moon", participation=0.4, rounds=7, seed=2) as federation:
        watched = Watched(federation)
        history = list(federation.rounds())
    assert all(record["refused"] == [] for record in history)
    last, gaps = {}, Counter()
    for update in watched.updates:
        k, values = update["k"], [step["terms"]["contrast"] for step in update["steps"]]
        if k not in last:
            assert values == [0.0] * len(values)  # log 2 with the received model in the place of the previous one
        else:
            gaps[update["round"] - last[k]["round"]] += 1
            trained = section(last[k]["upload"], "model")
            assert all(same(step["frozen"]["previous"], trained) for step in update["steps"])
            assert all(value > 0 for value in values)
        last[k] = update
    assert max(gaps) > 1  # somebody came back after a pause


def test_fedsas_local_gap_is_that_of_the_prototypes_it_sent_the_last_time(tiny_source):
    with federate(tiny_source, method="fedsa", participation=0.7, rounds=4) as federation:
        federation.state["A"] *= 1e-3  # anchors so close together that the local gap is the larger one
        watched = Watched(federation)
        list(federation.rounds())
    last = {}
    for update in watched.updates:
        candidates = [update["sent"]["extra/A"].tolist()]
        if update["k"] in last:
            sent = last[update["k"]]["upload"]
            held = sent["report/counts"].nonzero()[:, 0]
            candidates.append(sent["report/means"][held].tolist())
        gaps = [sum(nearest_distances(rows)) / len(rows) for rows in candidates]
        assert gaps[-1] == max(gaps)
        for step in update["steps"]:
            assert step["context"]["gap"].item() == pytest.approx(gaps[-1], rel=1e-4)
        last[update["k"]] = update
    assert len(watched.updates) > len(last)


@pytest.mark.parametrize("method", PROTOTYPES)
def test_prototypes_only(tiny_source, method):
    """No model travels; each client goes on with its own, tested on its own domain by the nearest global prototype."""
    with federate(tiny_source, method=method, exchange="prototypes", lr=0.02) as federation:
        watched = Watched(federation)
        history = list(federation.rounds())
        assert federation.model == {} and federation.headline == "nearest_prototype"
        assert not [name for name in (federation.schema | federation.sent()) if name.startswith("model/")]
        owned = {k: section(memory, "net") for k, memory in federation.memories.items()}
        assert set(owned) == {0, 1, 2} and not same(owned[0], owned[1])

        first, second = watched.updates[:3], watched.updates[3:]
        for before, after in zip(first, second, strict=True):
            assert before["k"] == after["k"] and before["upload"].keys() == federation.schema.keys()
            mine = section(before["kept"], "net")
            assert all(torch.equal(value, mine[name]) for name, value in after["steps"][0]["net"].items())

        P, present = federation.state["P"].tolist(), federation.state["present"].tolist()
        expected = {}
        for k, tensors in owned.items():
            name = federation.clients[k].domain
            test = next(domain.test for domain in tiny_source.domains if domain.name == name)
            model = net(seed=9).eval()
            model.load_state_dict(tensors, strict=False)
            with torch.no_grad():
                z = model.features(federation.trainer.transform.plain(test.x))
                guesses = {
                    "head": model.classifier(z).argmax(1).tolist(),
                    "nearest_prototype": [
                        min((c for c in range(C) if present[c]), key=lambda c: math.dist(row, P[c]))
                        for row in z.tolist()
                    ],
                }
            for head, found in guesses.items():
                hits = sum(a == b for a, b in zip(found, test.y.tolist(), strict=True))
                expected.setdefault(head, {}).setdefault(name, []).append(100 * hits / len(test.y))
    last = history[-1]
    assert (
        list(last["heads"]) == ["nearest_prototype", "head"] and last["accuracy"] == last["heads"][federation.headline]
    )
    for head, domains in expected.items():
        assert {name: len(values) for name, values in domains.items()} == {"dark": 2, "light": 1}
        means = {name: sum(values) / len(values) for name, values in domains.items()}
        assert last["heads"][head] == pytest.approx(means | {"AVG": sum(means.values()) / 2})


@pytest.mark.parametrize("method", PLUGGED)
def test_hyper_prototypes_need_a_classifier(tiny_source, method):
    with pytest.raises(ConfigError, match=f"{method} exchanges model or classifier"):
        federate(tiny_source, method=method, exchange="prototypes")


def test_fedtgp_with_hyper_prototypes_is_fedproto_with_hyper_prototypes_bit_for_bit(tiny_source):
    """Its server trains nothing."""
    results = []
    for method in ("fedproto-hp", "fedtgp-hp"):
        with federate(tiny_source, method=method, M=3) as federation:
            start = dict(federation.state)
            results.append((list(federation.rounds()), federation.model, federation.state))
    (history, model, state), (other_history, other_model, other_state) = results
    assert history == other_history and same(model, other_model)
    for name, value in other_state.items():  # FedTGP's generator may lie there, but as it was
        assert torch.equal(value, state[name] if name in state else start[name])


F32, I64, BOOL = torch.float32, torch.int64, torch.bool
MODEL = {f"model/{name}": (tuple(value.shape), F32) for name, value in floats(net()).items()}
CLASSIFIER = {name: MODEL[name] for name in ("model/classifier.weight", "model/classifier.bias")}
MEANS = {"report/means": ((C, D), F32), "report/counts": ((C,), I64)}
SOFT = {"report/soft": ((C, C), F32)}
GRADIENTS = {"report/gradients": ((C, D), F32)}
GLOBAL = {"extra/P": ((C, D), F32), "extra/present": ((C,), BOOL)}

#   method -> terms of the loss, what a client reports, what the server sends besides the model
WIRE = {
    "fedprox": ({"ce", "prox"}, {}, {}),
    "moon": ({"ce", "contrast"}, {}, {}),
    "fedrcl": ({"ce", "contrast", "penalty"}, {}, {}),
    "fedproto": ({"ce", "proto"}, MEANS, GLOBAL),
    "fedtgp": ({"ce", "proto"}, MEANS, GLOBAL),
    "fedgmkd": ({"ce", "proto", "soft"}, MEANS | SOFT, GLOBAL | {"extra/Q": ((C, C), F32)}),
    "fedsa": ({"ce", "pull", "margin", "classifier"}, MEANS, GLOBAL | {"extra/A": ((C, D), F32)}),
}
WIRE |= {f"{name}-hp": (WIRE[name][0], WIRE[name][1] | GRADIENTS, WIRE[name][2]) for name in PROTOTYPES}


def size(schema):
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in schema.values())


@pytest.mark.parametrize(
    "method, exchange",
    [(method, exchange) for method in RIVALS for exchange in METHODS[method].exchanges],
    ids=lambda value: value,
)
def test_what_travels_is_exactly_this(tiny_source, method, exchange):
    travelling = {"model": MODEL, "classifier": CLASSIFIER, "prototypes": {}}[exchange]
    terms, report, extras = WIRE[method]
    up = travelling | report | {f"loss/{term}": ((), F32) for term in terms} | {"samples": ((), I64)}
    down = travelling | extras
    with federate(tiny_source, method=method, exchange=exchange, rounds=1, evaluate_every=9) as federation:
        assert federation.schema == up
        assert {name: (tuple(value.shape), value.dtype) for name, value in federation.sent().items()} == down
        if exchange == METHODS[method].exchanges[-1]:
            record = federation.next_round()
            assert record["refused"] == []
            assert record["bytes_up"] == 3 * size(up) and record["bytes_down"] == 3 * size(down)


@pytest.mark.parametrize("method", RIVALS)
def test_clients_of_one_class_or_one_sample_train_and_report_what_they_have(tiny_source, method):
    """Before there are prototypes and after; the fields of absent classes are 0, never NaN."""
    with federate(tiny_source, method=method, rounds=1, evaluate_every=9) as federation:
        x = federation.clients[0].train.x
        for _ in range(2):
            for labels in ((2, 2, 2), (1,)):
                data = Split(x[: len(labels)], torch.tensor(labels))
                upload, _ = federation.trainer.update_on(data, federation.trainer.settings, 1, 0, federation.sent(), {})
                assert all(value.isfinite().all() for value in upload.values())
                assert int(upload["samples"]) == len(labels)
                for name, value in section(upload, "report").items():
                    absent = [c for c in range(C) if c not in labels]
                    assert (value[absent] == 0).all(), name
                    assert (value[labels[0]] != 0).any() or name == "gradients"  # 0 where the fit is perfect
                if method == "fedrcl":
                    assert upload["loss/contrast"] == 0.0
            federation.next_round()
