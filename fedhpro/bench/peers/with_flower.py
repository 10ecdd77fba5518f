"""The workload on Flower's simulation: its FedAvg strategy and ClientApps in Ray actors, one thread and core each."""

from __future__ import annotations

import torch
import workload
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


def make_net(model: str) -> torch.nn.Sequential:
    return torch.nn.Sequential(workload.encoder(model), workload.head())


client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    net = make_net(str(message.content["config"]["model"]))
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    x, y = workload.samples(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(net.parameters(), workload.LR, momentum=workload.MOMENTUM)
    for _ in range(workload.EPOCHS):
        for rows in torch.randperm(len(y)).split(workload.BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})})
    return Message(content=content, reply_to=message)


class Checked(FedAvg):
    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        replies = list(replies)
        for failed in (reply for reply in replies if reply.has_error()):
            raise RuntimeError(failed.error.reason)
        return super().aggregate_train(server_round, replies)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    def end_of_round(number: int, arrays: ArrayRecord) -> None:
        if number > 0:
            watch.lap()

    torch.manual_seed(0)
    Checked(fraction_evaluate=0.0, min_available_nodes=workload.CLIENTS).start(
        grid,
        ArrayRecord(make_net(asked.model).state_dict()),
        asked.rounds,
        train_config=ConfigRecord({"model": asked.model}),
        evaluate_fn=end_of_round,
    )


if __name__ == "__main__":
    asked = workload.arguments()
    watch = workload.Stopwatch(asked.started)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": asked.processes}}
    # of the imported module, not of this script: what actors can import is not pickled for every message
    from with_flower import client_app as importable

    run_simulation(server_app, importable, workload.CLIENTS, backend_config=resources)
    watch.report()
