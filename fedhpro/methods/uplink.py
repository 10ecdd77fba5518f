"""The class gradients of Eq 5 on their way to the server, for the methods that match gradients.

The gradient of cross-entropy at z is W^T (softmax - onehot). So the mean residuals [C, C] say as much as the gradients
[C, d] to a server that has the client's classifier, which travels anyway: a smaller message where there are fewer
classes than features, and the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .. import equations as eq
from .base import Method, Net, Tensors

Features = Callable[..., tuple[Tensor, Tensor]]  # Client.features


@dataclass(frozen=True)
class ReportsGradients(Method):
    uplink: Literal["gradients", "probabilities", "off"] = "gradients"  # Eq 5: [C, d]; [C, C], decoded; no, with M=0

    def class_gradients(self, z: Tensor, y: Tensor, net: Net) -> Tensors:
        h = net.classifier.weight.detach(), net.classifier.bias.detach()
        if self.uplink == "probabilities":
            residuals, counts = eq.class_residuals(z, y, *h)
            return {"residuals": residuals, "counts": counts}
        gradients, counts = eq.class_gradients(z, y, *h)
        return {"gradients": gradients, "counts": counts}

    def decode(self, report: Tensors, classifier: Tensors) -> Tensors:
        if "residuals" not in report:
            return report
        return report | {"gradients": report["residuals"] @ classifier["classifier.weight"]}
