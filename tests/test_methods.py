"""One suite over all methods: what every method promises, whatever it computes."""

import pytest
import torch
from conftest import TINY

from fedhpro.client import LocalClient
from fedhpro.config import configure
from fedhpro.data.batches import Transform
from fedhpro.data.sources import Split
from fedhpro.federation import Federation
from fedhpro.methods import METHODS
from fedhpro.methods.base import Method
from fedhpro.models import build
from fedhpro.randomness import generator
from fedhpro.wire import schema_of

NAMES = sorted(METHODS)
C = 4


def net(seed=0):
    return build("resnet10", C, width=16, stem="3x3/2", seed=seed)


def client(method, state, labels=(0, 1, 2, 3, 0, 1), received=None, model=None):
    rng = generator(7, "images", len(labels))
    x = torch.randint(0, 256, (len(labels), 3, 16, 16), generator=rng, dtype=torch.uint8)
    received = method.broadcast(state) if received is None else received
    transform = Transform((0.5,) * 3, (0.25,) * 3, crop=1)
    return LocalClient(model or net(), Split(x, torch.tensor(labels)), transform, received, {}, generator(7, "client"))


def frozen(method):
    return {name: net(seed=3).eval().requires_grad_(False) for name in method.frozen}


def one_round(method, state, labels_of_clients, seed=1):
    """Reports of several clients, stacked, and what the server makes of them."""
    reports = []
    for k, labels in enumerate(labels_of_clients):
        who = client(method, state, labels, model=net(seed + k))
        with torch.no_grad():
            reports.append(method.report(who, method.prepare(who)) | {"samples": torch.tensor(len(labels))})
    stacked = {name: torch.stack([report[name] for report in reports]) for name in reports[0]}
    model = {name: value for name, value in net(seed).state_dict().items() if value.is_floating_point()}
    with torch.no_grad():
        return method.aggregate(state, model, stacked, generator(0, "server"))


@pytest.fixture(params=NAMES)
def method(request):
    return METHODS[request.param]()


@pytest.fixture
def state(method):
    return method.server_state(net(), generator(0, "state"))


def test_loss_terms_are_finite_scalars_and_reach_the_whole_net(method, state):
    who = client(method, state)
    context = method.prepare(who)
    model = who.net.train()
    x = who.transform.plain(who.data.x)
    terms = method.loss(model, frozen(method), x, who.data.y, context)
    assert "ce" in terms and all(term.shape == () and term.isfinite() for term in terms.values())
    sum(terms.values()).backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.isfinite().all()}
    fixed = {"classifier.weight", "classifier.bias"} if method.name == "fedhpro-plus" else set()  # it is the anchors
    assert {name for name, _ in model.named_parameters()} - reached == fixed
    assert all(not value.requires_grad for value in (state | context).values())


@pytest.mark.parametrize("labels", [(2, 2, 2), (1,), (0, 1)], ids=["one class", "one sample", "two classes"])
def test_clients_with_missing_classes_report_the_same_names_and_shapes(method, state, labels):
    full, scarce = client(method, state), client(method, state, labels)
    with torch.no_grad():
        contexts = [method.prepare(who) for who in (full, scarce)]
        reports = [method.report(who, context) for who, context in zip((full, scarce), contexts, strict=True)]
    assert schema_of(contexts[0]) == schema_of(contexts[1])
    assert schema_of(reports[0]) == schema_of(reports[1])
    assert all(value.isfinite().all() for report in reports for value in report.values())


def test_the_server_survives_clients_that_hold_little(method, state):
    for _ in range(2):  # the second round starts from what the first one left
        state, override = one_round(method, state, [(0, 0), (1,), (0, 1, 2)])  # nobody holds class 3
        assert all(value.isfinite().all() for value in (state | override).values())
    assert schema_of(method.broadcast(state)) == schema_of(method.broadcast(method.server_state(net(), generator(0))))


def test_server_state_keeps_names_and_shapes_from_round_to_round(method, state):
    first, _ = one_round(method, state, [(0, 1, 2, 3)] * 2)
    second, _ = one_round(method, first, [(0, 1), (2, 3)])
    assert schema_of(first) == schema_of(second)
    assert schema_of(state).items() <= schema_of(first).items()


def test_predict_gives_logits(method, state):
    x = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        for logits in method.predict(net().eval(), x, method.broadcast(state)).values():
            assert logits.shape == (3, C)


def test_deterministic(method):
    states = [one_round(method, method.server_state(net(), generator(0)), [(0, 1), (1, 2, 3)])[0] for _ in range(2)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_new_method_is_one_class(tiny_source):
    """Documented in CONTRIBUTING: a method of your own, from outside the package."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Shrink(Method):
        """Cross-entropy with shorter features."""

        name = "shrink"
        strength: float = 0.1

        def loss(self, net, frozen, x, y, context):
            z = net.features(x)
            ce = torch.nn.functional.cross_entropy(net.classify(z), y)
            return {"ce": ce, "length": self.strength * z.norm(dim=1).mean()}

    try:
        with Federation(configure(**(TINY | {"method": "shrink", "strength": 0.5})), tiny_source) as federation:
            assert set(federation.next_round()["loss"]) == {"ce", "length"}
    finally:
        del METHODS["shrink"]


def test_every_method_file_is_short():
    from pathlib import Path

    import fedhpro.methods

    for path in Path(fedhpro.methods.__file__).parent.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 120, path.name
