"""What the tests share: one torch thread, a private cache, and a federation small enough to run in a second."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from fedhpro import cli
from fedhpro.data.sources import Domain, Source, Split

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, and tests send it

# keys of a run that takes about a second
TINY = {
    "method": "fedhpro",  # of all methods the one with most to send, to keep and to aggregate
    "rounds": 2,
    "local_epochs": 1,
    "batch_size": 8,
    "workers": 0,
    "width": 16,
    "model": "resnet10",
    "stem": "3x3/2",
    "seed": 0,
}


def call(capsys, *arguments):
    """Exit code, stdout and stderr of a command."""
    try:
        cli.main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def synthetic_split(n: int, classes: int, seed: int, brightness: int = 0, size: int = 16) -> Split:
    """Noise with a bright square whose place tells the class: learnable in a few steps."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 80, (n, 3, size, size), generator=rng)
    y = torch.arange(n) % classes
    for i in range(n):
        row, column = divmod(int(y[i]), 2)
        x[i, :, 5 * row : 5 * row + 5, 8 * column : 8 * column + 6] += 120
    return Split((x + brightness).to(torch.uint8), y)


@pytest.fixture(scope="session")
def tiny_source() -> Source:
    return tiny()


def tiny(train: int = 60) -> Source:
    """Two domains, four classes, 16x16 images."""
    domains = tuple(
        Domain(
            name,
            synthetic_split(train, 4, seed),
            synthetic_split(16, 4, seed + 1, bright),
            synthetic_split(40, 4, seed + 2, bright),
            real=False,
            about="squares",
        )
        for name, seed, bright in (("dark", 1, 0), ("light", 11, 40))
    )
    return Source("tiny", domains, ("a", "b", "c", "d"), {"dark": (2, 12), "light": (1, 20)}, crop=1)


@pytest.fixture
def processes(tmp_path):
    """Programs of a test that are stopped with it, also where it fails."""
    from loopback import Processes

    running = Processes(tmp_path)
    yield running
    running.close()
