"""Runs warn of nothing: pytest turns every warning into an error, but some come when it is late."""

import gc
import warnings

import pytest
import torch

from models import HalfSquaredError
from pfl import FederatedLoop
from pfl.algorithms import FedAvg
from pfl.clients.store import ClientStore
from tests.problems import quiet, scalar_problem


def test_data_without_held_out_samples_train_without_a_warning(tmp_path):
    problem = scalar_problem([1.0, 2.0])
    algorithm = FedAvg(problem.network(), loss=HalfSquaredError())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = quiet(tmp_path, 1, enable_checkpointing=False)
        trainer.fit(algorithm, datamodule=FederatedLoop(problem.datamodule))


@pytest.mark.parametrize("memory", [None, 0], ids=["in memory", "in a file"])
def test_a_store_that_is_dropped_leaves_no_warning(tmp_path, memory):
    with warnings.catch_warnings(record=True):
        gc.collect()  # what other tests left is not counted here
    store = ClientStore(2, directory=str(tmp_path), memory=memory)
    store.declare("w", torch.zeros(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del store
        gc.collect()
    assert not [str(warning.message) for warning in caught]
    assert not list(tmp_path.iterdir())
