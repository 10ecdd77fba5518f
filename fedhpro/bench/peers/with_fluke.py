"""The workload on fluke: its CentralizedFL, its clients and servers, its FastDataLoader."""

from __future__ import annotations

import workload

asked = workload.arguments()
workload.import_torchvision()

from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.algorithms.fedproto import FedProto
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.nets import EncoderHeadNet
from fluke.utils import FederationObserver
from torch.nn import CrossEntropyLoss

watch = workload.Stopwatch(asked.started)


class Laps(FederationObserver):
    def end_round(self, round: int) -> None:
        watch.lap()

    def finished(self, round: int) -> None:
        pass


def net() -> EncoderHeadNet:
    return EncoderHeadNet(workload.encoder(asked.model), workload.head())


class WithOwnModels(FedProto):
    """Clients of FedProto keep models: one for each, not one for all."""

    def init_clients(self, train, test, config):  # type: ignore[no-untyped-def]
        clients = super().init_clients(train, test, config)
        for client in clients:
            client.model = net()
        return clients

    def finalize(self) -> None:
        """Its last local training is not part of any round."""


FlukeENV().set_seed(0)
FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
loaders = [
    FastDataLoader(*workload.samples(k), num_labels=workload.CLASSES, batch_size=workload.BATCH, shuffle=True)
    for k in range(workload.CLIENTS)
]
data = DataSplitter(DummyDataContainer(loaders, [None] * workload.CLIENTS, None, workload.CLASSES))
client = {
    "batch_size": workload.BATCH,
    "local_epochs": workload.EPOCHS,
    "loss": CrossEntropyLoss,
    "optimizer": {"name": "SGD", "lr": workload.LR, "momentum": workload.MOMENTUM},
    "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
}
server: dict[str, object] = {"weighted": True}
if asked.method == "fedproto":
    own = {"model": net(), "n_protos": workload.CLASSES, "lam": 1.0}
    server["n_protos"] = workload.CLASSES
    federation = WithOwnModels(workload.CLIENTS, data, DDict(client=client | own, server=server, model=net()))
else:
    federation = CentralizedFL(workload.CLIENTS, data, DDict(client=client, server=server, model=net()))
federation.set_callbacks(Laps())
federation.run(asked.rounds, 1.0)
watch.report()
