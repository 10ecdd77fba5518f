"""MobileNetV2: inverted residuals around depthwise convolutions, with linear (unactivated) outputs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .base import STEMS, ConvNorm, Net, Spec, global_average

# The published table: expansion, output channels, number of blocks, stride of the first block; one row of groups
# for each resolution the network works at after its stem.
STAGES = (
    ((1, 16, 1, 1), (6, 24, 2, 2)),
    ((6, 32, 3, 2),),
    ((6, 64, 4, 2), (6, 96, 3, 1)),
    ((6, 160, 3, 2), (6, 320, 1, 1)),
)
STEM_FILTERS, LAST_FILTERS = 32, 1280


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        expand = [ConvNorm(inputs, hidden, 1), nn.ReLU6(inplace=True)] if expansion > 1 else []
        depthwise = [ConvNorm(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6(inplace=True)]
        self.body = nn.Sequential(*expand, *depthwise, ConvNorm(hidden, outputs, 1))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class MobileNetV2(Net):
    """The published stem is 3x3 with stride 2 (stems "7x7" and "3x3/2"); "3x3" gives it stride 1, for 32x32.

    Five depths: the stem, the ends of the next three resolutions, whose blocks are linear, and the last 1x1
    convolution; the first and last are taken before their ReLU6.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, natural=LAST_FILTERS, dropout=0.2)
        self.stem = ConvNorm(spec.channels, STEM_FILTERS, 3, stride=STEMS[spec.stem][1])
        self.blocks = nn.ModuleList()  # one sequence of blocks per resolution
        inputs = STEM_FILTERS
        for groups in STAGES:
            blocks = nn.Sequential()
            for expansion, outputs, repeats, first_stride in groups:
                for position in range(repeats):
                    stride = first_stride if position == 0 else 1
                    blocks.append(InvertedResidual(inputs, outputs, stride, expansion))
                    inputs = outputs
            self.blocks.append(blocks)
        self.last = ConvNorm(inputs, LAST_FILTERS, 1)

    def trunk(self, x: Tensor, with_depths: bool = True) -> tuple[list[Tensor], Tensor]:
        depths: list[Tensor] = [self.stem(x)]
        x = F.relu6(depths[0])
        for blocks in self.blocks:
            x = blocks(x)
            depths.append(x)
        depths[-1] = self.last(x)
        return depths, global_average(F.relu6(depths[-1]))
