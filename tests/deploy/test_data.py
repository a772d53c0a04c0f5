"""The facts that the server has about samples that lie with the parties."""

import numpy as np
import pytest

from datamodules import DigitsDataModule, Dirichlet
from pfl.deploy.data import OwnSamples, RemoteData
from pfl.report.partition import client_columns
from tests.refusal import refused


def digits(clients):
    return DigitsDataModule(num_clients=clients, partition=Dirichlet(0.3))


def test_sizes_and_shapes_travel_and_label_counts_do_not():
    data, facts = digits(3), {}
    for client in range(3):
        own = OwnSamples(digits(3), client, 3, seed=0)
        own.setup()
        assert (
            own.client_sizes.tolist()
            == np.where(np.arange(3) == client, data.client_sizes, 0).tolist()
        )
        facts[client] = own.facts(sizes=client > 0)
    remote = RemoteData(3)
    remote.connect(lambda: facts)
    remote.setup()
    assert remote.client_sizes.tolist() == [1, *data.client_sizes[1:]]
    assert (remote.num_classes, remote.has_labels, remote.input_shape) == (10, True, (1, 8, 8))
    columns = {"client", "train_samples", "val_samples", "test_samples"}
    assert {*client_columns(remote)} == columns


def test_a_party_with_one_client_has_all_its_samples():
    own = OwnSamples(digits(1), 1, 3, seed=0)
    own.setup()
    assert own.partition.train[1].tolist() == digits(1).partition.train[0].tolist()


@pytest.mark.parametrize("clients", [2, 4])
def test_a_party_with_other_numbers_of_clients_is_refused(clients):
    with refused(f"data.num_clients: {clients}; it must be 1 or 3"):
        OwnSamples(digits(clients), 0, 3, seed=0).setup()


def test_a_server_has_no_samples():
    with refused("data: RemoteData has no samples"):
        RemoteData(3).setup()
