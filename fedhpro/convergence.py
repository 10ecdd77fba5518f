"""The two conditions of the FedHPro paper's convergence theorem (section 4.3, appendix B), as a calculator.

Its use is to see how the quantities of the theorem pull on each other. It is an illustration and not a guarantee:

- The proof reads the assumption E|grad| <= B as though B were a lower bound of the gradient (A17).
- From one round to the next it keeps the change of HPCL alone, and of that only what new features cause: the changes of
  HPAL, of cross-entropy and of the hyper-prototypes S are dropped (A14).
- The constants L1, L2, B and sigma of a neural network cannot be known.

docs/convergence.md says more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """What the theorem takes as given."""

    L1: float  # Lipschitz constant of the gradient of the loss (Assumption B.1)
    L2: float  # Lipschitz constant of the feature extractor in its parameters (Assumption B.4)
    B: float  # bound of the expected norm of a stochastic gradient (Assumption B.3)
    sigma: float  # standard deviation of a stochastic gradient; its square is in the formulas (Assumption B.2)
    num_classes: int  # C

    def __post_init__(self) -> None:
        for name in ("L1", "B"):
            _check(name, getattr(self, name), above=0)
        for name in ("L2", "sigma"):
            _check(name, getattr(self, name), least=0)
        _check("num_classes", self.num_classes, least=1)

    @property
    def floor(self) -> float:
        """L2 B (C - 1): no eps at or below it can be reached, however small the learning rate."""
        return self.L2 * self.B * (self.num_classes - 1)


def learning_rate_limit(constants: Constants, eps: float) -> float:
    """The learning rate has to stay below (2 eps - 2 L2 B (C - 1)) / (L1 (eps + sigma^2)) (A26).

    eps bounds the mean squared gradient norm. At eps = B^2 this is the other condition of the appendix, under which the
    loss falls from round to round (A19).
    """
    _check("eps", eps, above=0)
    if eps <= constants.floor:
        raise ValueError(f"eps={eps:g} is too small: it has to exceed L2 B (C - 1) = {constants.floor:g}")
    return 2 * (eps - constants.floor) / (constants.L1 * (eps + constants.sigma**2))


def rounds_bound(
    constants: Constants, eps: float, lr: float, local_steps: int, initial_loss: float, minimal_loss: float = 0.0
) -> float:
    """The number of rounds has to exceed this (Eq 16), with E = local_steps, L_0 = initial_loss:

    2 / (E lr) * (L_0 - min L) / (2 eps - L1 lr (eps + sigma^2) - 2 L2 B (C - 1)).

    The paper calls E epochs; its proof counts steps of gradient descent.
    """
    _check("lr", lr, above=0)
    _check("local_steps", local_steps, least=1)
    _check("minimal_loss", minimal_loss)
    _check("initial_loss", initial_loss, least=minimal_loss)
    limit = learning_rate_limit(constants, eps)
    slack = 2 * (eps - constants.floor) - constants.L1 * lr * (eps + constants.sigma**2)
    if lr >= limit or slack <= 0:
        raise ValueError(f"lr={lr:g} is too large: with eps={eps:g} it has to stay below {limit:g}")
    return 2 / (local_steps * lr) * (initial_loss - minimal_loss) / slack


def _check(name: str, value: float, above: float = -math.inf, least: float = -math.inf) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{name}={value}: it has to be a finite number")
    if value <= above:
        raise ValueError(f"{name}={value:g}: it has to be above {above:g}")
    if value < least:
        raise ValueError(f"{name}={value:g}: it has to be at least {least:g}")
