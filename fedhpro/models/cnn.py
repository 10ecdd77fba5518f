"""The small CNN of the federated learning literature: two 5x5 convolutions and one hidden layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .base import Net, Spec


class CNN(Net):
    """Five depths: each convolution, its max-pool and the hidden layer.

    The ReLU comes after the max-pool, with which it commutes: the same function on a quarter of the values, and
    the pooled maps are there before it.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, natural=512)
        side = ((spec.image_size - 4) // 2 - 4) // 2  # unpadded 5x5 convolutions cost 4 pixels, max-pools halve
        if side < 1:
            raise ValueError(f"the cnn needs images at least 16 pixels wide, not {spec.image_size}")
        self.conv1 = nn.Conv2d(spec.channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.hidden = nn.Linear(64 * side * side, 512)

    def trunk(self, x: Tensor, with_depths: bool = True) -> tuple[list[Tensor], Tensor]:
        conv1: Tensor = self.conv1(x)
        pool1 = F.max_pool2d(conv1, 2)
        conv2: Tensor = self.conv2(F.relu(pool1))
        pool2 = F.max_pool2d(conv2, 2)
        hidden: Tensor = self.hidden(F.relu(pool2).flatten(1))
        return [conv1, pool1, conv2, pool2, hidden], F.relu(hidden)
