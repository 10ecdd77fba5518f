"""Class prototypes of any finished run, for pictures and distances.

A method that keeps prototypes shows its own: hyper-prototypes S, anchors A, or global prototypes P. One that has none
(FedAvg, FedProx, MOON, FedRCL) gets the class means of the clients' training features under its global model. Distances
only mean something between prototypes of one feature space, so the means under the run's own model come along.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import config as configuration
from .client import EVAL_BATCH
from .data.batches import Transform
from .data.clients import Samples
from .data.sources import Source
from .engines.cpu import one_thread
from .equations import class_means
from .errors import RunError
from .evaluation import accuracy
from .federation import Federation
from .methods.base import Tensors
from .models.base import Net
from .runs import RunFolder
from .training import copy_into, model_tensors

KINDS = {"S": "hyper-prototypes", "A": "anchors", "P": "global prototypes"}


@dataclass(frozen=True)
class Probe:
    kind: str  # what `prototypes` are
    prototypes: Tensor  # [C, I, d]; I is 1 for all but hyper-prototypes
    present: Tensor  # [C]: the classes that have any
    means: Tensor  # [C, d]: class means of all clients' training features under the global model
    domains: dict[str, Tensor]  # the same for the test set of each domain


@torch.no_grad()
def features(net: Net, samples: Samples, transform: Transform) -> tuple[Tensor, Tensor]:
    """z and y of every sample, in eval mode, where the net is."""
    net.eval()
    split = samples.to(net.classifier.weight.device)
    return torch.cat([net.features(transform.plain(x)) for x in split.x.split(EVAL_BATCH)]), split.y


def probe(run: str | Path, source: Source | None = None) -> Probe:
    """The prototypes of a run folder whose models were exchanged."""
    federation, tensors = restored(Path(run), source)
    net, transform, C = federation.net, federation.trainer.transform, federation.source.num_classes

    def means_of(parts: Iterable[Samples]) -> tuple[Tensor, Tensor]:
        zs, ys = zip(*(features(net, samples, transform) for samples in parts), strict=True)
        means, counts = class_means(torch.cat(zs), torch.cat(ys), C)
        return means.cpu(), counts.cpu()

    means, counts = means_of(client.train for client in federation.clients)
    domains = {domain.name: means_of([domain.test])[0] for domain in federation.source.domains}
    for key, kind in KINDS.items():
        if f"state/{key}" in tensors and f"extra/{key}" in federation.sent():
            own = tensors[f"state/{key}"]
            present = tensors.get("state/present", torch.ones(C, dtype=torch.bool))
            everywhere = torch.ones(C, dtype=torch.bool)
            return Probe(
                kind, own if own.dim() == 3 else own[:, None], present if key == "P" else everywhere, means, domains
            )
    return Probe("class means under the global model", means[:, None], counts > 0, means, domains)


def local_accuracies(run: str | Path, source: Source | None = None) -> list[float]:
    """Of each client's own model, trained for a round from the final global one, on all test sets together."""
    federation, _ = restored(Path(run), source)
    sent, shown, trainer, found = federation.sent(), federation.shown(), federation.trainer, list[float]()
    tests = [name for name in trainer.tests if name.startswith("server/")]
    if not tests:
        raise RunError(f"{run} has no test sets at the server: evaluation={federation.config.evaluation}")
    for k in range(len(federation.clients)):
        with one_thread():
            upload, _ = trainer.update(federation.round, k, sent, federation.memories.get(k, {}))
            model = {name: value for name, value in upload.items() if name.startswith("model/")}
            matrices = [trainer.evaluate(test, None, shown | model, {})[federation.headline] for test in tests]
        found.append(accuracy(torch.stack(matrices).sum(0)))
    return found


def restored(folder: Path, source: Source | None = None) -> tuple[Federation, Tensors]:
    """The federation after its last round, its net with the global model, and the checkpoint that it comes from."""
    config = configuration.load(folder)
    if config.engine == "cuda" and not torch.cuda.is_available():  # a run of another machine
        config = config.replace(engine="cpu", precision="auto")
    federation = Federation(config, source)
    if not (folder / "model.safetensors").exists():
        raise RunError(f"{folder} has no global model: its models stayed with the clients, or it has no finished round")
    run = RunFolder.open(folder)
    tensors, meta = run.newest_checkpoint()
    if not tensors:
        raise RunError(f"{folder} has no sound checkpoint")
    if meta["round"] < (last := run.records()[-1]["round"]):
        raise RunError(
            f"{folder} has {last} rounds, and its last checkpoint is of round {meta['round']}: resume it first"
        )
    federation.memories = run.memories
    federation.restore(tensors, meta)
    with torch.no_grad():
        copy_into(model_tensors(federation.net), federation.model)
    return federation, tensors
