"""Every random number of a run comes from here: a generator is derived from (seed, purpose, round, client, ...)."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def seed_for(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that is the same on every machine and unrelated for every other purpose."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_for(seed, *purpose))


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    return np.random.default_rng(seed_for(seed, *purpose))
