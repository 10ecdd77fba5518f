"""How mixed the labels of a client are, by which clients of fedhpro-plus vote."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mixture(counts: Tensor) -> Tensor:
    """How mixed a client's labels are, from 0 (one class) to 1: the effective number of its classes beyond one, over
    that of as many labels drawn evenly. A few samples cannot show all of many classes, and are not blamed for it.
    """
    n, C = counts.sum().double(), len(counts)
    held = torch.arange(int(n) + 1, device=n.device, dtype=torch.float64)  # of one class, if labels are drawn evenly
    ways = torch.lgamma(n + 1) - torch.lgamma(held + 1) - torch.lgamma(n - held + 1)
    chance = (ways + torch.xlogy(n - held, 1 - 1 / C) - held * math.log(C)).exp()  # binomial
    drawn_evenly = n.log() - C / n * (chance * torch.xlogy(held, held)).sum()  # its expected entropy, log C for many
    entropy = torch.special.entr(counts / n).sum()
    return (entropy.expm1() / drawn_evenly.expm1().clamp_min(1e-9)).clamp_max(1)
