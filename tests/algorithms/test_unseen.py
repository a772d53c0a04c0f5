"""Clients that never train: for every method as if they did not exist."""

import numpy as np
import pytest
import torch

from datamodules import LeastSquares, SharedTest
from models import HalfSquaredError, LinearRegression
from pfl.algorithms import FedAvg, FedCLUP
from pfl.callbacks import Optimality
from tests.algorithms.methods import BATCHES, EVERY_METHOD, METHODS, SIZES, everything, small_world
from tests.algorithms.test_participation import EVERYONE, FULL, SEVERAL
from tests.problems import owned
from tests.refusal import refused


def world_of(ids, classes):
    """`small_world` without the samples of other clients; ids follow each other from 0."""
    whole = small_world(classes=classes)
    whole.setup()
    samples = np.concatenate([whole.partition.train[i] for i in ids])
    inputs, targets = whole.samples.inputs[samples], whole.samples.targets[samples]
    return owned(
        np.repeat(np.arange(len(ids)), [SIZES[i] for i in ids]),
        inputs,
        targets,
        inputs[:3],
        targets[:3],
        protocol=SharedTest(validation=0.0),
    )


@EVERY_METHOD
def test_unseen_clients_are_as_if_they_did_not_exist(train_small, method):
    # A client's draws depend on its id, which the others keep where the last one is unseen.
    assert_absent(train_small, method, [3] if method.draws else [1], FULL)


@pytest.mark.parametrize("name", SEVERAL)
def test_unseen_clients_do_not_change_the_order_of_samples(train_small, name):
    """It depends on the clients' ids, which are the same where the last client is unseen."""
    assert_absent(train_small, METHODS[name], [3], BATCHES)


def assert_absent(train_small, method, unseen, settings):
    """A run with unseen clients is, bit for bit, a run on the data of the others alone."""
    ids = np.setdiff1d(EVERYONE, unseen)
    loop = {} if method.everyone else {"clients_per_round": 2}
    actual = everything(train_small(method, 2, settings=settings, unseen=unseen, **loop))
    expected = everything(
        train_small(method, 2, settings=settings, data=world_of(ids, method.classes), **loop)
    )
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        mine = actual[name]
        if name.startswith("seen "):
            value = torch.from_numpy(ids)[value]
        elif name.startswith(("client ", "ledger ")):
            rest, mine = mine[unseen], mine[ids]
            assert not name.startswith("ledger ") or not rest.any()
        np.testing.assert_array_equal(mine, value, err_msg=name)
    for name in actual:
        if name.startswith("client "):  # the rows of the initial value
            assert all(torch.equal(row, actual[name][unseen][0]) for row in actual[name][unseen])


def test_rules_over_all_clients_leave_unseen_clients_out(train_small):
    """λ of Corollary 1, ρ^2 / (n μ R^2) where n R^2 > 1, and of the authors' code, with n the mean
    number of samples of the clients that train: 7 / 3 for 1, 4 and 2 samples."""
    method = METHODS["FedCLUP"]
    assert method.kind is FedCLUP

    def penalty(rule, **kwargs):
        algorithm = train_small(method, 2, settings=FULL, arguments=rule, **kwargs)
        return algorithm.personalization_penalty

    constants = dict(smoothness=3.0, strong_convexity=2.0, heterogeneity=1.0, noise=0.5)
    corollary = {"penalty": "corollary1", **constants}
    assert penalty(corollary, unseen=[0]) == pytest.approx(0.25 / (7 / 3 * 2))
    code = {"penalty": 0.5, "penalty_schedule": "authors_code"}
    actual = penalty(code, unseen=[0])
    assert actual == penalty(code, data=world_of([1, 2, 3], classes=False)) != penalty(code)


def test_a_method_sees_the_clients_that_train(train_small):
    keeping = {"memory_efficient": False}
    algorithm = train_small(METHODS["FedSLR"], 1, arguments=keeping, unseen=[2])
    assert algorithm.num_clients == 3
    assert algorithm.population.tolist() == [0, 1, 3]
    assert algorithm.client_sizes.tolist() == list(SIZES)  # by id
    assert [i for chunk in algorithm.iter_clients() for i in chunk.ids.tolist()] == [0, 3, 1]
    assert torch.allclose(
        algorithm.kept_mean("gamma"), algorithm.client_rows("gamma", algorithm.population).mean(0)
    )


def test_the_solution_for_all_clients_is_refused_where_some_never_train(fit):
    data = LeastSquares(4, 12, 3)
    method = FedAvg(LinearRegression(3), batch_size=None, loss=HalfSquaredError())
    with refused("loop.unseen: 2 clients", "Optimality", "all clients"):
        fit(method, data, 1, callbacks=[Optimality()], unseen=[0, 3])
