import copy

import pytest
import torch
from torch import nn

from fedhpro.sgd import SGD


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 0.0), (0.9, 1e-2), (0.0, 1e-2)])
def test_the_numbers_are_those_of_torch(momentum: float, weight_decay: float) -> None:
    torch.manual_seed(0)
    ours = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(2, 2)])  # the last one has no part in the loss
    start, theirs = copy.deepcopy(ours), copy.deepcopy(ours)
    optimizers = (
        SGD(ours.parameters(), 0.1, momentum, weight_decay),
        torch.optim.SGD(theirs.parameters(), 0.1, momentum, weight_decay=weight_decay, fused=True),
    )
    for _ in range(4):
        x = torch.randn(8, 5)
        for nets, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            nets[1](nets[0](x).relu()).square().mean().backward()
            optimizer.step()
    before = [p.detach().clone() for p in start.parameters()]
    after = list(ours.parameters())
    assert all(torch.equal(mine, torchs) for mine, torchs in zip(after, theirs.parameters(), strict=True))
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False] * 4 + [True] * 2
