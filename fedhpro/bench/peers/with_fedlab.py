"""The workload on FedLab: its StandalonePipeline with the serial trainer and the synchronous server of FedAvg."""

from __future__ import annotations

import workload

asked = workload.arguments()
workload.import_torchvision()

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from torch.utils.data import DataLoader, TensorDataset

watch = workload.Stopwatch(asked.started)


class Samples(FedDataset):
    def __init__(self) -> None:
        self.num = workload.CLIENTS
        self.clients = [TensorDataset(*workload.samples(k)) for k in range(self.num)]

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader:
        return DataLoader(self.clients[id], batch_size, shuffle=True)


class Pipeline(StandalonePipeline):
    def evaluate(self) -> None:
        watch.lap()


torch.manual_seed(0)
net = torch.nn.Sequential(workload.encoder(asked.model), workload.head())
trainer = SGDSerialClientTrainer(net, workload.CLIENTS)
trainer.setup_dataset(Samples())
trainer.setup_optim(workload.EPOCHS, workload.BATCH, workload.LR)
# its own set-up has no momentum
trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), workload.LR, momentum=workload.MOMENTUM)
Pipeline(SyncServerHandler(net, asked.rounds, 1.0), trainer).main()
watch.report()
