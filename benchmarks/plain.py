"""FedAvg on CIFAR-10-LT as a plain loop of torch: nothing of fedhpro but the partition. A check on what runs show.

    FEDHPRO_DATA=FOLDER python benchmarks/plain.py --rho 100 --epochs 5 --rounds 8

FOLDER has cifar10.npz (x_train, y_train, x_test, y_test). Of the first 2,000 test images it prints the accuracy after
each round, and how often each class was predicted.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhpro.data import partition
from fedhpro.randomness import numpy_generator

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def images(pixels: np.ndarray) -> Tensor:
    x = torch.tensor(pixels).permute(0, 3, 1, 2).float() / 255
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def network() -> nn.Module:
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10))


def trained(net: nn.Module, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, 0.9, weight_decay=1e-5)
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rho", type=float, default=100)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    data = np.load(Path(os.environ["FEDHPRO_DATA"]) / "cifar10.npz", allow_pickle=False)
    labels = data["y_train"].astype(np.int64)
    kept = partition.long_tail(labels, options.rho, numpy_generator(0, "long-tail"))
    parts = partition.dirichlet(labels[kept], 10, options.alpha, numpy_generator(0, "partition"))
    for part in parts:
        print("samples of each class:", np.bincount(labels[kept][part], minlength=10).tolist())
    x, y = images(data["x_train"][kept]), torch.tensor(labels[kept])
    test, truth = images(data["x_test"][:2000]), torch.tensor(data["y_test"][:2000].astype(np.int64))
    model = network()
    for number in range(1, options.rounds + 1):
        nets = [trained(model, x[part], y[part], options.epochs).state_dict() for part in parts]
        shares = [len(part) / len(kept) for part in parts]
        model.load_state_dict(
            {name: sum(share * net[name] for share, net in zip(shares, nets, strict=True)) for name in nets[0]}
        )
        with torch.no_grad():
            guess = model(test).argmax(1)
        accuracy = 100 * (guess == truth).float().mean().item()
        print(f"round {number}: {accuracy:.1f} %, predicted {torch.bincount(guess, minlength=10).tolist()}", flush=True)


if __name__ == "__main__":
    main()
