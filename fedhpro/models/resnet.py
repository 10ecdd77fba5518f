"""ResNets: basic blocks for 10, 18 and 34 layers, bottlenecks for 50 and 101.

A block returns its sum before the ReLU, which the trunk applies: the value FedRCL needs costs nothing extra.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .base import STEMS, ConvNorm, Net, Spec, global_average

MIN_WIDTH = 16


class Residual(nn.Module):
    """A body and its shortcut, a 1x1 projection where the shape changes."""

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        same_shape = stride == 1 and inputs == outputs
        self.body = body
        self.shortcut = nn.Identity() if same_shape else ConvNorm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.shortcut(x)


class Basic(Residual):
    expansion = 1

    def __init__(self, inputs: int, filters: int, stride: int) -> None:
        body = nn.Sequential(
            ConvNorm(inputs, filters, 3, stride),
            nn.ReLU(inplace=True),
            ConvNorm(filters, filters, 3),
        )
        super().__init__(body, inputs, filters, stride)


class Bottleneck(Residual):
    expansion = 4

    def __init__(self, inputs: int, filters: int, stride: int) -> None:
        outputs = filters * self.expansion
        body = nn.Sequential(
            ConvNorm(inputs, filters, 1),
            nn.ReLU(inplace=True),
            ConvNorm(filters, filters, 3, stride),
            nn.ReLU(inplace=True),
            ConvNorm(filters, outputs, 1),
        )
        super().__init__(body, inputs, outputs, stride)


class ResNet(Net):
    def __init__(self, spec: Spec, block: type[Basic | Bottleneck], depths: tuple[int, int, int, int]) -> None:
        width = 64 if spec.width is None else spec.width
        if width < MIN_WIDTH:
            raise ValueError(f"a ResNet needs a width of at least {MIN_WIDTH} base filters, not {width}")
        super().__init__(spec, natural=8 * width * block.expansion)
        self.stem = ConvNorm(spec.channels, width, *STEMS[spec.stem])
        self.max_pool = nn.MaxPool2d(3, stride=2, padding=1) if spec.stem == "7x7" else nn.Identity()
        self.blocks = nn.ModuleList()  # one list of blocks per stage
        inputs = width
        for stage, depth in enumerate(depths):
            filters = width * 2**stage
            blocks = nn.ModuleList()
            for position in range(depth):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(block(inputs, filters, stride))
                inputs = filters * block.expansion
            self.blocks.append(blocks)

    def trunk(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        before_relu: Tensor = self.stem(x)
        depths = [before_relu]
        x = self.max_pool(F.relu(before_relu))
        for blocks in self.blocks:
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks:
                before_relu = block(x)
                x = F.relu(before_relu)
            depths.append(before_relu)
        return depths, global_average(x)


def resnet10(spec: Spec) -> Net:
    return ResNet(spec, Basic, (1, 1, 1, 1))


def resnet18(spec: Spec) -> Net:
    return ResNet(spec, Basic, (2, 2, 2, 2))


def resnet34(spec: Spec) -> Net:
    return ResNet(spec, Basic, (3, 4, 6, 3))


def resnet50(spec: Spec) -> Net:
    return ResNet(spec, Bottleneck, (3, 4, 6, 3))


def resnet101(spec: Spec) -> Net:
    return ResNet(spec, Bottleneck, (3, 4, 23, 3))
