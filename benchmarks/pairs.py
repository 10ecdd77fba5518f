"""A hundred classes: two digits of digits-lite side by side, by domain (docs/plus-elsewhere.md).

    python benchmarks/pairs.py OUT.jsonl --seeds 5 6 7 --parallel 2
    python benchmarks/pairs.py OUT.jsonl --digits 5                     25 classes: pairs of the digits 0 to 4

Twenty clients as in digits-lite, with five times as many samples: 150 to 500, one to five of each of a hundred classes.
What is written is as in rare.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from rare import KEYS, PARTS, main

from fedhpro import data
from fedhpro.data.sources import Source, Split

SIZES = {"validation": 800, "test": 2000}
ROWS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "plus": {"method": "fedhpro-plus", "paced": False},
    "plus-paced": {"method": "fedhpro-plus", "paced": True},
    "plus-unaligned": {"method": "fedhpro-plus", "aligned": False},
    "fedhpro": {"method": "fedhpro"},
    "fedhpro-M0": {"method": "fedhpro", "M": 0},
    "fedrcl": {"method": "fedrcl"},
    "fedsa": {"method": "fedsa"},
}


def pairs(digits: int = 10) -> Source:
    source, rng = data.load("digits-lite"), torch.Generator().manual_seed(0)
    sizes = {name: (clients, 5 * samples) for name, (clients, samples) in source.allocation.items()}

    def paired(whole: Split, count: int) -> Split:
        split = Split(whole.x[whole.y < digits], whole.y[whole.y < digits])
        left, right = (torch.randint(len(split), (count,), generator=rng) for _ in range(2))
        narrow = F.avg_pool2d(split.x.float(), (1, 2)).round().to(torch.uint8)
        return Split(torch.cat([narrow[left], narrow[right]], dim=3), digits * split.y[left] + split.y[right])

    domains = [
        dataclasses.replace(
            domain,
            **{
                part: paired(getattr(domain, part), SIZES.get(part, sizes[domain.name][0] * sizes[domain.name][1]))
                for part in PARTS
            },
        )
        for domain in source.domains
    ]
    names = tuple(f"{left}{right}" for left in range(digits) for right in range(digits))
    return dataclasses.replace(source, name="pairs", domains=tuple(domains), classes=names, allocation=sizes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--digits", type=int, default=10)
    own, others = parser.parse_known_args()
    make = functools.partial(pairs, own.digits)
    main(make, str(__doc__), ROWS, KEYS | {"rounds": 25, "evaluate_every": 5}, others)
