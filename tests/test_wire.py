"""The wire: a bad upload is described and never raises; the mean is the weighted one and shares no memory."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhpro import wire


def upload(seed=0):
    """A good upload with every kind of tensor that clients send."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "model/conv.weight": torch.randn(4, 3, 3, 3, generator=rng),
        "model/bn.running_var": torch.rand(4, generator=rng),
        "report/counts": torch.tensor([3, 0, 4, 5, 0]),
        "report/present": torch.tensor([True, False, True]),
        "loss/ce": torch.rand((), generator=rng),
        "samples": torch.tensor(12),
    }


SCHEMA = wire.schema_of(upload())


def without(name):
    return {key: value for key, value in upload().items() if key != name}


def changed(name, value):
    """The upload with one entry of one tensor changed."""
    tensor = upload()[name].clone()
    tensor.view(-1)[-1] = value
    return upload() | {name: tensor}


# problem


def test_good_uploads_have_no_problem():
    assert wire.problem(upload(), SCHEMA) is None
    assert wire.problem(upload(seed=1), SCHEMA) is None
    assert wire.problem(changed("model/bn.running_var", 0.0), SCHEMA) is None
    assert wire.problem(changed("report/counts", 0), SCHEMA, samples=12) is None
    assert wire.problem(changed("model/conv.weight", -wire.LARGEST), SCHEMA) is None
    assert wire.problem(changed("model/conv.weight", 1e-45), SCHEMA) is None  # denormal, and harmless
    assert wire.problem(dict(reversed(upload().items())), SCHEMA) is None
    some = upload() | {"report/counts": torch.tensor([1, 0, 1, 1, 0])}  # of a method that looks at a part
    assert wire.problem(some, SCHEMA, samples=12, counts_all=False) is None


BAD = {
    "missing": (without("loss/ce"), "loss/ce is missing"),
    "two missing": (
        {k: v for k, v in upload().items() if not k.startswith("report")},
        "report/counts is missing, and 1 more",
    ),
    "empty": ({}, "loss/ce is missing, and 5 more"),
    "unknown": (upload() | {"model/extra": torch.zeros(1)}, "'model/extra' is not expected"),
    "two unknown": (upload() | {"x\ny": torch.zeros(1), 3: 4}, "3 is not expected, and 1 more"),
    "array": (upload() | {"loss/ce": np.float32(1)}, "loss/ce is a float32, not a tensor"),
    "none": (upload() | {"samples": None}, "samples is a NoneType, not a tensor"),
    "shape": (
        upload() | {"model/conv.weight": torch.zeros(4, 3, 9)},
        "model/conv.weight has shape [4, 3, 9] instead of [4, 3, 3, 3]",
    ),
    "scalar shape": (upload() | {"samples": torch.tensor([12])}, "samples has shape [1] instead of []"),
    "dtype": (upload() | {"loss/ce": torch.tensor(1.0).double()}, "loss/ce has type float64 instead of float32"),
    "count dtype": (upload() | {"samples": torch.tensor(12.0)}, "samples has type float32 instead of int64"),
    "nan": (changed("model/conv.weight", math.nan), "model/conv.weight has values that are not finite"),
    "inf": (changed("loss/ce", math.inf), "loss/ce has values that are not finite"),
    "minus inf": (changed("model/bn.running_var", -math.inf), "model/bn.running_var has values that are not finite"),
    "negative count": (changed("report/counts", -1), "report/counts has negative values"),
    "negative variance": (changed("model/bn.running_var", -1e-9), "model/bn.running_var has negative values"),
    "negative samples": (changed("samples", -1), "samples has negative values"),
    "no samples": (changed("samples", 0), "it has no samples"),
    "huge": (changed("model/conv.weight", -1.1e12), "model/conv.weight has values beyond 1e+12"),
    "too many samples": (changed("samples", 13), "it says that it has 13 samples, and is known to have 12"),
    "too few samples": (changed("samples", 1), "it says that it has 1 samples, and is known to have 12"),
    "too few counted": (
        upload() | {"report/counts": torch.tensor([3, 0, 4, 4, 0])},
        "report/counts sums up to 11, and the client has 12 samples",
    ),
    "too many counted": (
        changed("report/counts", 1),
        "report/counts sums up to 13, and the client has 12 samples",
    ),
    "counts that wrap around": (
        upload() | {"report/counts": torch.tensor([2**62, 2**62, 2**62, 2**62, 12])},
        "report/counts has more than the 12 samples of the client",
    ),
    "sparse": (
        upload() | {"model/bn.running_var": torch.ones(4).to_sparse()},
        "model/bn.running_var is not a dense tensor in memory",
    ),
    "meta": (upload() | {"loss/ce": torch.zeros((), device="meta")}, "loss/ce is not a dense tensor in memory"),
    "no dict": ([torch.zeros(1)], "it is a list, not named tensors"),
}


@pytest.mark.parametrize("bad,reason", BAD.values(), ids=BAD)
def test_problem_says_what_is_wrong(bad, reason):
    assert wire.problem(bad, SCHEMA, samples=12) == reason


names = st.sampled_from(sorted(SCHEMA))
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
shapes = st.sampled_from([(), (0,), (4,), (5,), (3,), (4, 3, 3, 3)])
fills = st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf])
tensors = st.builds(lambda shape, dtype, fill: torch.full(shape, fill).to(dtype), shapes, dtypes, fills)
anything = tensors | st.none() | st.integers() | st.text() | st.lists(st.floats(), max_size=3)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(names | st.text() | st.integers() | st.none(), anything, max_size=3), st.sets(names, max_size=1))
def test_random_mutations_are_described_and_never_raise(replaced, removed):
    mutated = {name: value for name, value in (upload() | replaced).items() if name not in removed}
    reason = wire.problem(mutated, SCHEMA)
    if reason is None:  # then it really is as expected
        assert wire.schema_of(mutated) == SCHEMA
        assert all(bool(value.isfinite().all()) for value in mutated.values())
        assert int(mutated["samples"]) >= 1
    else:
        assert "\n" not in reason
        assert any(str(name) in reason or repr(name) in reason for name in {*replaced, *removed})


# Mean


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.1, 1e6), min_size=1, max_size=12),
    st.sampled_from([1e-6, 1.0, 1e6]),
    st.integers(0, 2**32 - 1),
)
def test_mean_is_the_weighted_mean(weights, scale, seed):
    rng = torch.Generator().manual_seed(seed)
    values = [
        {"w": torch.randn(3, 2, generator=rng) * scale, "b": torch.randn((), generator=rng), "none": torch.zeros(0, 2)}
        for _ in weights
    ]
    mean, backwards = wire.Mean(), wire.Mean()
    for value, weight in zip(values, weights, strict=True):
        mean.add(value, weight)
    for value, weight in reversed(list(zip(values, weights, strict=True))):
        backwards.add(value, weight)
    for name, result in mean.result().items():
        stacked = np.stack([value[name].double().numpy() for value in values])
        expected = torch.from_numpy(np.asarray(np.average(stacked, axis=0, weights=weights)))
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected.float(), rtol=1e-6, atol=1e-12 * scale)
        torch.testing.assert_close(backwards.result()[name], result, rtol=1e-6, atol=1e-12 * scale)
    assert mean.weight == pytest.approx(sum(weights))


def test_mean_of_many_does_not_drift():
    mean = wire.Mean()
    for _ in range(3000):
        mean.add({"w": torch.tensor([0.1, 1e-8, -3e7])}, 7.0)
    assert torch.equal(mean.result()["w"], torch.tensor([0.1, 1e-8, -3e7]))


def test_mean_of_counts_is_a_float():
    mean = wire.Mean()
    mean.add({"n": torch.tensor([1, 2])}, 1.0)
    mean.add({"n": torch.tensor([4, 2])}, 2.0)
    torch.testing.assert_close(mean.result()["n"], torch.tensor([3.0, 2.0]))


def test_mean_shares_no_memory():
    mean, value = wire.Mean(), torch.ones(3)
    mean.add({"w": value}, 2.0)
    value.fill_(100.0)
    first = mean.result()
    first["w"].fill_(-1.0)
    assert mean.result()["w"].tolist() == [1.0, 1.0, 1.0]


def test_mean_of_nothing_is_empty():
    assert wire.Mean().result() == {}


# the stack


def test_a_stack_has_the_uploads_in_order_and_shares_no_memory():
    stack, value = wire.Stack(3), torch.arange(2.0)
    stack.add({"a": value, "n": torch.tensor(5)})
    value += 10
    stack.add({"a": value, "n": torch.tensor(6)})
    assert stack.count == 2 and stack.result()["a"].tolist() == [[0, 1], [10, 11]]
    assert stack.result()["n"].tolist() == [5, 6] and stack.result()["n"].dtype == torch.int64


# bytes


def test_num_bytes():
    assert wire.num_bytes({}) == 0
    assert wire.num_bytes(upload()) == 4 * 108 + 4 * 4 + 8 * 5 + 1 * 3 + 4 + 8


def test_the_mean_goes_by_names_not_by_order():
    mean = wire.Mean()
    mean.add({"a": torch.ones(2), "b": torch.zeros(2, 1)}, 1)
    mean.add({"b": torch.full((2, 1), 4.0), "a": torch.ones(2)}, 3)
    assert torch.equal(mean.result()["a"], torch.ones(2))
    assert torch.equal(mean.result()["b"], torch.full((2, 1), 3.0))
