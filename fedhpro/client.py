"""What a client sees in a round: its net, its data, what it received and remembers, and its own generator."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .data.batches import Transform, epoch
from .data.sources import Split
from .equations import count_classes
from .methods.base import Tensors
from .models.base import Net

EVAL_BATCH = 256


class LocalClient:
    """The Client that methods see (methods/base.py), on one machine."""

    def __init__(
        self, net: Net, data: Split, transform: Transform, received: Tensors, memory: Tensors, rng: torch.Generator
    ) -> None:
        self.net = net
        self.data = data
        self.transform = transform
        self.received = received
        self.memory = memory
        self.rng = rng
        self.counts = count_classes(data.y, net.num_classes)

    @torch.no_grad()
    def features(self, limit: int | None = None, augment: bool = False) -> tuple[Tensor, Tensor]:
        """z and y in eval mode, without gradients; with a limit, at most so many random samples of each class."""
        self.net.eval()
        rows = torch.arange(len(self.data)) if limit is None else self._some_of_each_class(limit)
        rows = rows.to(self.data.y.device)
        z = []
        for part in rows.split(EVAL_BATCH):
            x = (
                self.transform.batch(self.data.x, part, self.rng)
                if augment
                else self.transform.plain(self.data.x.index_select(0, part))
            )
            z.append(self.net.features(x))
        return torch.cat(z), self.data.y.index_select(0, rows)

    def batches(self, batch_size: int, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of augmented batches."""
        for rows in epoch(len(self.data), batch_size, rng):
            rows = rows.to(self.data.y.device)
            yield self.transform.batch(self.data.x, rows, rng), self.data.y.index_select(0, rows)

    def _some_of_each_class(self, limit: int) -> Tensor:
        order = torch.randperm(len(self.data), generator=self.rng)
        y = self.data.y.cpu()[order]
        rank = torch.zeros_like(y)
        for c in range(self.net.num_classes):
            rank[y == c] = torch.arange(int((y == c).sum()))
        return order[rank < limit].sort().values
