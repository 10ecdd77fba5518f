"""The calculator of the convergence theorem: goldens by hand, how the quantities pull, limits, errors."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhpro.convergence import Constants, learning_rate_limit, rounds_bound

HAND = Constants(L1=10.0, L2=0.01, B=2.0, sigma=1.0, num_classes=11)  # L2 B (C - 1) = 0.2
RUN = {"eps": 1.0, "lr": 0.05, "local_steps": 10, "initial_loss": 3.0, "minimal_loss": 1.0}


def test_learning_rate_limit_by_hand():
    assert HAND.floor == pytest.approx(0.2)
    assert learning_rate_limit(HAND, eps=1.0) == pytest.approx(0.08)  # (2 - 0.4) / (10 * 2)
    assert learning_rate_limit(HAND, eps=3.0) == pytest.approx(0.14)  # (6 - 0.4) / (10 * 4)


def test_at_eps_B_squared_the_limit_is_that_of_a_falling_loss():
    printed = (2 * 2.0**2 - 2 * 0.01 * 2.0 * 10) / (10.0 * (1.0**2 + 2.0**2))  # A19
    assert learning_rate_limit(HAND, eps=HAND.B**2) == pytest.approx(printed)


def test_rounds_bound_by_hand():
    assert rounds_bound(HAND, **RUN) == pytest.approx(40 / 3)  # 2 / 0.5 * 2 / (2 - 1 - 0.4)
    without_classes = replace(HAND, num_classes=1)
    assert rounds_bound(without_classes, **RUN) == pytest.approx(8.0)  # 2 / 0.5 * 2 / (2 - 1)
    assert rounds_bound(HAND, **RUN | {"initial_loss": 1.0}) == 0


def test_minimal_loss_is_0_unless_given():
    keys = {name: value for name, value in RUN.items() if name != "minimal_loss"}
    assert rounds_bound(HAND, **keys) == rounds_bound(HAND, **keys, minimal_loss=0.0)


@given(st.floats(0.7, 50), st.floats(1.01, 10))
def test_a_smaller_eps_takes_more_rounds_and_a_smaller_learning_rate(eps, factor):
    assert learning_rate_limit(HAND, eps) < learning_rate_limit(HAND, eps * factor)
    keys = RUN | {"lr": 0.01}
    assert rounds_bound(HAND, **keys | {"eps": eps}) > rounds_bound(HAND, **keys | {"eps": eps * factor})


@given(st.integers(1, 1000), st.integers(2, 10))
def test_more_local_steps_take_fewer_rounds_in_proportion(steps, factor):
    few, many = (rounds_bound(HAND, **RUN | {"local_steps": n}) for n in (steps, steps * factor))
    assert few == pytest.approx(many * factor)


@pytest.mark.parametrize("harder", [{"L1": 12.0}, {"L2": 0.02}, {"B": 3.0}, {"sigma": 1.1}, {"num_classes": 12}])
def test_larger_constants_take_more_rounds_and_a_smaller_learning_rate(harder):
    worse = replace(HAND, **harder)
    assert learning_rate_limit(worse, 1.0) < learning_rate_limit(HAND, 1.0)
    assert rounds_bound(worse, **RUN) > rounds_bound(HAND, **RUN)


def test_the_bound_grows_without_end_towards_the_learning_rate_limit_and_towards_0():
    bounds = [rounds_bound(HAND, **RUN | {"lr": 0.08 * (1 - gap)}) for gap in (0.1, 1e-3, 1e-6)]
    assert bounds == sorted(bounds) and bounds[-1] > 1e6
    assert rounds_bound(HAND, **RUN | {"lr": 1e-9}) > 1e8


def test_half_the_limit_is_the_best_learning_rate():
    best = learning_rate_limit(HAND, 1.0) / 2
    at_best = rounds_bound(HAND, **RUN | {"lr": best})
    assert all(rounds_bound(HAND, **RUN | {"lr": best * f}) > at_best for f in (0.5, 0.9, 1.1, 1.5))


@pytest.mark.parametrize("eps", [0.2, 0.1])
def test_an_eps_that_no_learning_rate_reaches_is_named(eps):
    message = rf"^eps={eps} is too small: it has to exceed L2 B \(C - 1\) = 0.2$"
    with pytest.raises(ValueError, match=message):
        learning_rate_limit(HAND, eps)
    with pytest.raises(ValueError, match=message):
        rounds_bound(HAND, **RUN | {"eps": eps})


@pytest.mark.parametrize("lr", [0.08, 1.0])
def test_a_learning_rate_at_or_above_the_limit_is_named(lr):
    with pytest.raises(ValueError, match=rf"^lr={lr:g} is too large: with eps=1 it has to stay below 0.08$"):
        rounds_bound(HAND, **RUN | {"lr": lr})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"L1": 0.0}, "L1=0: it has to be above 0"),
        ({"B": -1.0}, "B=-1: it has to be above 0"),
        ({"L2": -0.1}, "L2=-0.1: it has to be at least 0"),
        ({"sigma": -1.0}, "sigma=-1: it has to be at least 0"),
        ({"num_classes": 0}, "num_classes=0: it has to be at least 1"),
        ({"B": math.inf}, "B=inf: it has to be a finite number"),
    ],
)
def test_constants_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        replace(HAND, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 0.0}, "eps=0: it has to be above 0"),
        ({"eps": math.nan}, "eps=nan: it has to be a finite number"),
        ({"lr": 0.0}, "lr=0: it has to be above 0"),
        ({"local_steps": 0}, "local_steps=0: it has to be at least 1"),
        ({"initial_loss": 0.5}, "initial_loss=0.5: it has to be at least 1"),
        ({"minimal_loss": -math.inf}, "minimal_loss=-inf: it has to be a finite number"),
    ],
)
def test_arguments_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        rounds_bound(HAND, **RUN | change)


def test_constants_may_be_0_where_the_theorem_allows_it():
    noiseless = Constants(L1=1.0, L2=0.0, B=1.0, sigma=0.0, num_classes=2)
    assert learning_rate_limit(noiseless, eps=1e-6) == pytest.approx(2.0)
