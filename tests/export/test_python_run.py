"""A run that Python has built: its models are plain networks, and `export` says what it lacks."""

import csv

import torch
from torch.nn.functional import cross_entropy

from datamodules import DigitsDataModule, Dirichlet, Normalize
from models import MLP
from pfl import FederatedLoop
from pfl.algorithms import FedPer
from pfl.export import export
from pfl.method.exported import client_network
from tests.problems import quiet
from tests.refusal import refused


def test_a_clients_network_has_the_losses_of_the_run(tmp_path):
    data = DigitsDataModule(4, Dirichlet(1.0), transforms=[Normalize()])
    method = FedPer(MLP(64, (8,)), lr=0.1)
    trainer = quiet(tmp_path, 2)
    trainer.fit(method, datamodule=FederatedLoop(data))
    with (trainer.run_dir / "clients.csv").open() as file:
        losses = [float(row["test/personalized/loss"]) for row in csv.DictReader(file)]
    for client, loss in enumerate(losses):
        network = client_network(method, client)
        batches = list(data.client(client).test_dataloader())
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        with torch.no_grad():
            found = cross_entropy(network(inputs), targets).item()
        assert abs(found - loss) < 1e-5
    assert len(set(losses)) == 4
    for client in (4, -1):
        with refused(f"client_network: {client}; it must be a client's number from 0 to 3"):
            client_network(method, client)
    checkpoint = str(trainer.run_dir / "checkpoints" / "last.ckpt")
    with refused("config.yaml is missing", "a run that Python has built has none"):
        export(checkpoint, str(tmp_path / "out"), [0])
