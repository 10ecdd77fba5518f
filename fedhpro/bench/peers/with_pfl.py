"""The workload on pfl: its FederatedAveraging on its SimulatedBackend; several processes under torchrun."""

from __future__ import annotations

import asyncio
import os

import torch
import workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

asked = workload.arguments()
watch = workload.Stopwatch(asked.started)


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(workload.encoder(asked.model), workload.head())

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        self.train(not eval)
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict[str, object]:
        return {}


class Laps(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
        watch.lap()
        return False, Metrics()


torch.manual_seed(0)
asyncio.set_event_loop(asyncio.new_event_loop())
users = {k: Dataset(workload.samples(k), user_id=str(k)) for k in range(workload.CLIENTS)}
data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
net = Net()
model = PyTorchModel(
    net,
    local_optimizer_create=lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=workload.MOMENTUM),
    central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
)
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=asked.rounds,
        evaluation_frequency=10**6,
        train_cohort_size=workload.CLIENTS,
        val_cohort_size=0,
    ),
    SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
    model,
    NNTrainHyperParams(
        local_batch_size=workload.BATCH, local_num_epochs=workload.EPOCHS, local_learning_rate=workload.LR
    ),
    NNEvalHyperParams(local_batch_size=None),
    callbacks=[Laps()],
)
if os.environ.get("LOCAL_RANK", "0") == "0":
    watch.report()
