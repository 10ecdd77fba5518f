"""What central noise costs in accuracy on digits-lite (20 clients), by protocol and noise multiplier (docs/privacy.md).

    python benchmarks/privacy.py [--rounds 10] [--seeds 0,1] > benchmarks/results/privacy.json

Norms are clipped at the median of what clients send without noise, measured first, in the first round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import fedhpro
from fedhpro import privacy
from fedhpro.config import configure
from fedhpro.federation import Federation
from fedhpro.training import section

PROTOCOLS = {
    "fedavg, models": {"method": "fedavg"},
    "fedproto, prototypes": {"method": "fedproto", "exchange": "prototypes"},
    "fedhpro, classifiers": {"method": "fedhpro", "exchange": "classifier"},
}
NOISE = (None, 0.1, 1.0, 4.0)


def norms(keys: dict[str, object]) -> dict[str, float]:
    """The median norms of a client's change of the model and of its report."""
    found: dict[str, list[float]] = {"clip": [], "clip_report": []}
    with Federation(configure(**keys, workers=0)) as federation:
        sent = federation.sent()
        for k in range(len(federation.clients)):
            upload, _ = federation.trainer.update(1, k, sent, {})
            change = {n: v - sent[f"model/{n}"] for n, v in section(upload, "model").items()}
            report = {n: v for n, v in section(upload, "report").items() if v.is_floating_point()}
            for name, group in (("clip", change), ("clip_report", report)):
                found[name].append(sum(float(value.square().sum()) for value in group.values()) ** 0.5)
    return {name: round(statistics.median(values), 4) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", default="0,1")
    options = parser.parse_args()
    rows = []
    for name, protocol in PROTOCOLS.items():
        bounds = norms(dict(protocol))
        used = {key: value for key, value in bounds.items() if value}
        for noise in NOISE:
            keys = protocol | {"rounds": options.rounds, "weights": "equal", "evaluate_every": options.rounds}
            if noise is not None:
                keys |= used | {"privacy": "central", "noise": noise}
            scores = []
            for seed in options.seeds.split(","):
                with tempfile.TemporaryDirectory() as folder:
                    done = fedhpro.run(keys, seed=int(seed), out=str(Path(folder, "run")))
                scores.append(round(done.accuracy["AVG"], 2))
            spent = privacy.Privacy("central", 1, 1, noise, 1e-5, None, 0).epsilon(options.rounds) if noise else None
            row = {"protocol": name, "norms": bounds, "noise": noise, "epsilon": spent, "accuracy": scores}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    print(json.dumps({"rounds": options.rounds, "seeds": options.seeds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
