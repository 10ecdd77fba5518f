"""GoogLeNet with BatchNorm and without the auxiliary heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import STEMS, ConvNorm, Net, Spec, global_average

EPS = 1e-3


def reduced(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """A 3x3 convolution made cheap by a 1x1 one in front."""
    reduce = ConvNorm(inputs, hidden, 1, eps=EPS)
    return nn.Sequential(reduce, nn.ReLU(inplace=True), ConvNorm(hidden, outputs, 3, eps=EPS))


class Inception(nn.Module):
    """Four branches side by side, concatenated before the ReLU: it acts on each value alone, so the order is free.

    The third branch has a 3x3 convolution where the paper has 5x5, as in the widely used torchvision weights.
    """

    def __init__(self, inputs: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, pool = widths
        pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), ConvNorm(inputs, pool, 1, eps=EPS))
        threes = reduced(inputs, reduce3, three), reduced(inputs, reduce5, five)
        self.branches = nn.ModuleList([ConvNorm(inputs, one, 1, eps=EPS), *threes, pooled])
        self.outputs = one + three + five + pool

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


# Per resolution: the kernel of the max-pool in front, and the widths in each inception's branches.
STAGES = (
    (3, ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64))),
    (
        3,
        (
            (192, 96, 208, 16, 48, 64),
            (160, 112, 224, 24, 64, 64),
            (128, 128, 256, 24, 64, 64),
            (112, 144, 288, 32, 64, 64),
            (256, 160, 320, 32, 128, 128),
        ),
    ),
    (2, ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128))),
)


class GoogLeNet(Net):
    """Five depths, each before its ReLU: the stem, the 3x3 convolution after it, the ends of inception 3 to 5."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, natural=1024, dropout=0.2)
        kernel, stride = STEMS[spec.stem]
        self.stem = ConvNorm(spec.channels, 64, kernel, stride, eps=EPS)
        self.max_pool = nn.MaxPool2d(3, stride=2, ceil_mode=True) if spec.stem == "7x7" else nn.Identity()
        self.second = reduced(64, 64, 192)
        self.blocks = nn.ModuleList()  # one sequence per resolution, its max-pool first
        inputs = 192
        for pool_kernel, inceptions in STAGES:
            blocks = nn.Sequential(nn.MaxPool2d(pool_kernel, stride=2, ceil_mode=True))
            for position, widths in enumerate(inceptions):
                if position > 0:
                    blocks.append(nn.ReLU(inplace=True))
                inception = Inception(inputs, widths)
                blocks.append(inception)
                inputs = inception.outputs
            self.blocks.append(blocks)

    def trunk(self, x: Tensor, with_depths: bool = True) -> tuple[list[Tensor], Tensor]:
        depths: list[Tensor] = [self.stem(x)]
        depths.append(self.second(self.max_pool(F.relu(depths[-1]))))
        for blocks in self.blocks:
            depths.append(blocks(F.relu(depths[-1])))
        return depths, global_average(F.relu(depths[-1]))
