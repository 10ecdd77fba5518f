"""The small CNN of the federated learning literature: two 5x5 convolutions and one hidden layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Net, Spec


class CNN(Net):
    """Five depths: each convolution, its max-pool and the hidden layer.

    The ReLU comes after the max-pool, with which it commutes: the same function on a quarter of the values, and
    the pooled maps are there before it.
    """

    filters = (32, 64)
    units = 512  # of the hidden layer

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, natural=self.units)
        side = ((spec.image_size - 4) // 2 - 4) // 2  # unpadded 5x5 convolutions cost 4 pixels, max-pools halve
        if side < 1:
            raise ValueError(f"the cnn needs images at least 16 pixels wide, not {spec.image_size}")
        first, second = self.filters
        self.conv1 = nn.Conv2d(spec.channels, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.hidden = nn.Linear(second * side * side, self.units)

    def trunk(self, x: Tensor, with_depths: bool = True) -> tuple[list[Tensor], Tensor]:
        conv1: Tensor = self.conv1(x)
        pool1 = halve(conv1)
        conv2: Tensor = self.conv2(F.relu(pool1))
        pool2 = halve(conv2)
        hidden: Tensor = self.hidden(F.relu(pool2).flatten(1))
        return [conv1, pool1, conv2, pool2, hidden], F.relu(hidden)


def halve(x: Tensor) -> Tensor:
    """2x2 max-pool. On a CPU oneDNN takes a fifth of the time for it and its gradient: the same bits, but for NaN,
    which it passes over (a model that diverged has it in its weights as well).
    """
    fast = x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if fast and not (torch.jit.is_tracing() or torch.compiler.is_compiling()):  # exports have the plain operator
        return F.max_pool2d(x.to_mkldnn(), 2, 2).to_dense()
    return F.max_pool2d(x, 2)
