"""The workload of the peers on fedhpro: workers, checks of uploads and accounting are what they are in any run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from torch import Tensor

from ..config import configure
from ..data.sources import Domain, Source, Split
from ..federation import Federation
from ..models import MODELS, Net, Spec
from ..models.cnn import CNN
from .peers import workload


class SmallCNN(CNN):
    """The network that the peers train, of our own layers."""

    filters = (16, 32)
    units = workload.DIM


class Same(Net):
    """The very modules that the peers train."""

    def __init__(self, spec: Spec, model: str) -> None:
        super().__init__(spec, natural=workload.DIM)
        self.encoder = workload.encoder(model)

    def trunk(self, x: Tensor, with_depths: bool = True) -> tuple[list[Tensor], Tensor]:
        return [], self.encoder(x)


NETS: dict[str, Callable[[Spec], Net]] = {
    "bench-cnn": SmallCNN,
    "bench-cnn-torch": functools.partial(Same, model="cnn"),
    "bench-tiny": functools.partial(Same, model="tiny"),
}


@contextlib.contextmanager
def federation(method: str, model: str, workers: int) -> Iterator[Federation]:
    """Ready for rounds without evaluation. FedProto's models stay with the clients, as in the peer that has it."""
    MODELS.update(NETS)
    try:
        config = configure(
            method=method,
            model=f"bench-{model}",
            exchange="prototypes" if method == "fedproto" else "auto",
            rounds=10**6,
            evaluate_every=10**6,
            local_epochs=workload.EPOCHS,
            batch_size=workload.BATCH,
            lr=workload.LR,
            momentum=workload.MOMENTUM,
            weight_decay=0.0,
            workers=workers,
        )
        with Federation(config, source()) as ready:
            yield ready
    finally:
        for name in NETS:
            del MODELS[name]


def source() -> Source:
    """A domain for each client, so that each has the samples that it has with the peers."""
    splits = [Split(*workload.samples(k)) for k in range(workload.CLIENTS)]
    nothing = Split(splits[0].x[:0], splits[0].y[:0])
    domains = [Domain(f"client {k}", split, nothing, nothing, False, "noise") for k, split in enumerate(splits)]
    allocation = {domain.name: (1, workload.SAMPLES) for domain in domains}
    return Source("noise", tuple(domains), tuple(map(str, range(workload.CLASSES))), allocation, (0.5,), (0.25,))


def main() -> None:
    asked = workload.arguments(("cnn", "cnn-torch", "tiny"))
    watch = workload.Stopwatch(asked.started)
    with federation(asked.method, asked.model, asked.processes) as ready:
        for _ in range(asked.rounds):
            record = ready.next_round()
            watch.lap()
            assert not record["refused"], record["refused"]
    watch.report()


if __name__ == "__main__":
    main()
