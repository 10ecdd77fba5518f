"""What every model shares: the split into features f and a linear classifier h, and a few small layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Kernel and stride of the first convolution; only "7x7" (the ImageNet stem) is followed by a max-pool.
STEMS: dict[str, tuple[int, int]] = {"3x3": (3, 1), "3x3/2": (3, 2), "7x7": (7, 2)}


@dataclass(frozen=True)
class Spec:
    """What a model is built from. A family ignores the fields that do not concern it (text has no channels)."""

    num_classes: int
    width: int | None = None  # base filters of a ResNet, embedding size of the textcnn; None: the family's default
    dim: int | None = None  # feature width asked for; None: whatever the backbone yields
    pool_to: int | None = None  # average the backbone's feature vector down to this many values
    stem: str = "3x3"
    channels: int = 3
    image_size: int = 32
    vocab: int | None = None

    def __post_init__(self) -> None:
        if self.stem not in STEMS:
            raise ValueError(f"unknown stem {self.stem!r}: choose one of {', '.join(STEMS)}")


class Dropout(nn.Module):
    """Dropout whose masks come from `generator`, so that a training loop can seed them; None: the global RNG.

    The mask is drawn on the generator's device: a CPU generator gives the same masks to a model on a GPU.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generator: torch.Generator | None = None
        self.keep: Callable[[Tensor], Tensor] | None = None  # masks for a captured step, which cannot draw them

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.keep is not None:
            return x * self.keep(x) / (1 - self.p)
        device = x.device if self.generator is None else self.generator.device
        keep = torch.rand(x.shape, generator=self.generator, device=device) >= self.p
        return x * keep.to(x.device) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class ConvNorm(nn.Sequential):
    """Convolution and BatchNorm; where asked for, a sum and a ReLU behind them. The GPU engine fuses what follows the
    convolution.
    """

    fused: Callable[[nn.BatchNorm2d, Tensor, Tensor | None, bool], Tensor] | None = None

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, eps: float = 1e-5
    ) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        super().__init__(conv, nn.BatchNorm2d(outputs, eps=eps))

    def forward(self, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
        conv, norm = self
        assert isinstance(norm, nn.BatchNorm2d)
        x = conv(x)
        if self.fused is not None:
            return self.fused(norm, x, add, relu)
        x = norm(x) if add is None else norm(x) + add
        return F.relu_(x) if relu else x


def global_average(x: Tensor) -> Tensor:
    """Mean of each channel's map; what is a vector already stays as it is."""
    return x.mean((2, 3)) if x.dim() == 4 else x


class Net(nn.Module):
    """A split model: `features` is f, `classify` is h. A family only has to say what its `trunk` computes."""

    precision: torch.dtype | None = None  # where given, the trunk computes in it; its features are float32 all the same
    no_stages = ""  # why it has no depths to contrast at, where it has none
    prior: Tensor | None = None  # where losses are balanced: logarithms of the class frequencies of who trains it [C]

    def __init__(self, spec: Spec, natural: int, dropout: float = 0.0) -> None:
        super().__init__()
        pooled = spec.pool_to or natural
        self.dim = spec.dim or pooled
        self.num_classes = spec.num_classes
        self.pool = nn.Identity() if pooled == natural else nn.AdaptiveAvgPool1d(pooled)
        self.project = nn.Identity() if self.dim == pooled else nn.Linear(pooled, self.dim)
        self.dropout = Dropout(dropout)
        self.classifier = nn.Linear(self.dim, spec.num_classes)
        self.instead: nn.Module | None = None  # of the classifier, where a trained model is used (nearest.py)

    def trunk(self, x: Tensor, with_depths: bool = True) -> tuple[list[Tensor], Tensor]:
        """One pass of the backbone: outputs at five depths, each before its last ReLU, and the feature vector.
        Without `with_depths` a family may leave them out.
        """
        raise NotImplementedError

    def run_trunk(self, x: Tensor, with_depths: bool) -> tuple[list[Tensor], Tensor]:
        if x.is_cuda:  # where convolutions are fastest on channels_last
            x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        else:
            # Images permuted from NHWC carry channels_last strides, on which a convolution's backward can corrupt the
            # heap on CPU. The view renews the strides of one-channel images, which contiguous() lets pass.
            x = x.contiguous().view(x.shape)
        if self.precision is None:
            depths, vector = self.trunk(x, with_depths)
            return depths, self.project(self.pool(vector))
        with torch.autocast(x.device.type, self.precision, cache_enabled=False):  # a cache would outlive a capture
            depths, vector = self.trunk(x, with_depths)
            return depths, self.project(self.pool(vector)).float()

    def stages_and_features(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """`stages` and `features` from a single pass."""
        if self.no_stages:
            raise NotImplementedError(self.no_stages)
        depths, z = self.run_trunk(x, with_depths=True)
        return [global_average(depth).to(z.dtype) for depth in depths], z

    def stages(self, x: Tensor) -> list[Tensor]:
        """Globally averaged outputs of the stem and the four stages, each taken before its last ReLU."""
        return self.stages_and_features(x)[0]

    def features(self, x: Tensor) -> Tensor:
        """The feature vectors z [n, dim], before dropout."""
        return self.run_trunk(x, with_depths=False)[1]

    def classify(self, z: Tensor) -> Tensor:
        """Logits [n, num_classes] of feature vectors."""
        return self.balanced(self.classifier(self.dropout(z)))

    def balanced(self, logits: Tensor) -> Tensor:
        """In training, where losses are balanced: the logits of this client's samples, for the model's own logits."""
        return logits + self.prior if self.training and self.prior is not None else logits

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x)) if self.instead is None else self.instead(self.features(x))
