"""ResNets: basic blocks for 10, 18 and 34 layers, bottlenecks for 50 and 101.

Where FedRCL asks for the depths, a stage's last sum is kept before its ReLU; elsewhere sum and ReLU are one operation.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .base import STEMS, ConvNorm, Net, Spec, global_average

MIN_WIDTH = 16


class Residual(nn.Module):
    """A body and its shortcut, a 1x1 projection where the shape changes."""

    def __init__(self, body: list[ConvNorm], inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        same_shape = stride == 1 and inputs == outputs
        self.body = nn.ModuleDict({str(2 * i): layer for i, layer in enumerate(body)})  # between them, ReLUs
        self.shortcut = nn.Identity() if same_shape else ConvNorm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        *inner, last = self.body.values()
        y = x
        for layer in inner:
            y = layer(y, relu=True)
        return last(y, add=self.shortcut(x), relu=relu)


class Basic(Residual):
    expansion = 1

    def __init__(self, inputs: int, filters: int, stride: int) -> None:
        body = [ConvNorm(inputs, filters, 3, stride), ConvNorm(filters, filters, 3)]
        super().__init__(body, inputs, filters, stride)


class Bottleneck(Residual):
    expansion = 4

    def __init__(self, inputs: int, filters: int, stride: int) -> None:
        outputs = filters * self.expansion
        body = [ConvNorm(inputs, filters, 1), ConvNorm(filters, filters, 3, stride), ConvNorm(filters, outputs, 1)]
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

    def trunk(self, x: Tensor, with_depths: bool = True) -> tuple[list[Tensor], Tensor]:
        depths: list[Tensor] = []

        def activated(layer: nn.Module, x: Tensor) -> Tensor:
            if not with_depths:
                return layer(x, relu=True)
            depths.append(layer(x))
            return F.relu(depths[-1])

        x = self.max_pool(activated(self.stem, x))
        for blocks in self.blocks:
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks[:-1]:
                x = block(x, relu=True)
            x = activated(blocks[-1], x)
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
