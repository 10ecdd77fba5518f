"""One local step of a client from the same state, on the CPU and on the GPU in float32: how far the uploads differ.

python benchmarks/parity.py [METHOD]        needs a GPU
"""

from __future__ import annotations

import sys

import torch

from fedhpro.config import configure
from fedhpro.federation import Federation


def main() -> None:
    method = sys.argv[1] if len(sys.argv) > 1 else "fedavg"
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU on this machine")
    torch.backends.cudnn.allow_tf32 = False
    uploads = []
    for engine in ("cpu", "cuda"):
        federation = Federation(configure(method=method, engine=engine, local_steps=1, workers=0, rounds=1))
        uploads.append(federation.trainer.update(1, 0, federation.sent(), {})[0])
    for name, value in uploads[0].items():
        difference = (value.double() - uploads[1][name].double()).abs().max()
        print(f"{name:48} largest difference {difference:.1e}   largest value {value.double().abs().max():.1e}")


if __name__ == "__main__":
    main()
