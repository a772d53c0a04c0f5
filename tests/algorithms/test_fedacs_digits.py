"""FedACS on handwritten digits: from which quantile on it is local training."""

import numpy as np
import pytest
import torch

from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl.algorithms import FedACS, LocalTrain
from tests.algorithms.reference_agg_acs import table


@pytest.fixture(scope="module")
def digits():
    """Six clients of unequal sizes."""
    return DigitsDataModule(num_clients=6, partition=Dirichlet(0.4), seed=3)


def network(seed=0):
    torch.manual_seed(seed)
    return MLP(64, (8,))


def test_a_high_quantile_is_local_training(fit, digits):
    """p = 1 - 1/n: the threshold lies above every cosine but the diagonal's."""
    settings = dict(lr=0.1, batch_size=16, local_epochs=2)
    algorithm, alone = (
        FedACS(network(), quantile=1 - 1 / 6, **settings),
        LocalTrain(network(), **settings),
    )
    for method in (algorithm, alone):
        fit(method, digits, 3, evaluate=())
    models = [method.store.read("w", np.arange(6)) for method in (algorithm, alone)]
    torch.testing.assert_close(models[0], models[1], rtol=0, atol=1e-13)
    assert all(row["collaborators"] == 0 for row in algorithm.trainer.recorder.rows)
    assert all(i == j for weights in table(algorithm).values() for i, j in weights)


def test_just_below_somebody_collaborates(fit, digits):
    """The largest pair is chosen once p (n² - 1) < n² - n - 2: here p < 28 / 35."""
    for quantile, some in ((0.79, True), (0.81, False)):
        algorithm = FedACS(network(), quantile=quantile, lr=0.1, batch_size=None)
        fit(algorithm, digits, 3, evaluate=())
        later = [row["collaborators"] for row in algorithm.trainer.recorder.rows[1:]]
        assert all((value > 0) == some for value in later)
