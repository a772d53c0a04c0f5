"""LocalTrain against each client's own optimum, and against the LocalBaseline callback."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Dirichlet
from models import MLP, HalfSquaredError, LoRA, SmallCNN
from pfl.algorithms import (
    FML,
    GPFL,
    FedAvg,
    FedCP,
    FedExLoRA,
    FedKD,
    FedMRL,
    FLoRA,
    LocalTrain,
)
from pfl.callbacks import LocalBaseline
from pfl.clients.rates import WarmUp
from tests.problems import least_squares, matrix_problem


def test_every_client_reaches_its_own_optimum(watch):
    problem = least_squares((12, 9, 15), d=2, seed=4)
    algorithm = LocalTrain(
        problem.network(0.5), lr=0.4, local_steps=150, batch_size=None, loss=HalfSquaredError()
    )
    history = watch(algorithm, problem, 3)
    models = algorithm.store.read("w", np.arange(3)).numpy()
    for i in range(3):
        optimum = np.linalg.lstsq(problem.features[i], problem.targets[i], rcond=None)[0]
        np.testing.assert_allclose(models[i].reshape(2, 2), optimum.T, rtol=0, atol=1e-8)
    # Nothing is sent, and the network keeps the common beginning.
    assert not history["down"].any() and not history["up"].any()
    np.testing.assert_array_equal(algorithm.global_model, 0.5)
    # The solution that `Optimality` measures from is that of λ = 0, where nothing couples the w_i.
    assert algorithm.personalization_penalty == 0


def test_clients_continue_from_their_last_model_and_keep_it_between_rounds(fit):
    """f_i = |w - A_i|^2 / 2: after T visits of K steps (1 - η)^{K T} of the distance is left; a
    client that never took part still has the common beginning."""
    optima = np.random.default_rng(0).normal(size=(3, 2, 2))
    problem = matrix_problem(optima)
    algorithm = LocalTrain(
        problem.network(1.0), lr=0.1, local_steps=2, batch_size=None, loss=HalfSquaredError()
    )
    fit(algorithm, problem, 3, trace=[[0], [0, 1], [0]])
    models = algorithm.store.read("w", np.arange(3)).numpy()
    for i, visits in enumerate((3, 1, 0)):
        expected = optima[i] + 0.9 ** (2 * visits) * (1.0 - optima[i])
        np.testing.assert_allclose(models[i].reshape(2, 2), expected, rtol=0, atol=1e-12)


def test_it_equals_the_train_alone_callback(fit):
    """Same network, loop and local settings: exactly the same scores of every client.

    Its convolutions train one client after another where other networks train a chunk at once.
    """
    digits = DigitsDataModule(num_clients=8, partition=Dirichlet(0.3))
    settings = dict(lr=0.2, lr_decay=0.9, weight_decay=1e-3, local_epochs=2, batch_size=16)
    loop = dict(clients_per_round=3, clients_at_once=2, precision="32-true")

    def network():
        torch.manual_seed(0)
        return SmallCNN(width=4)

    alone = LocalBaseline()
    fit(FedAvg(network(), **settings), digits, 4, callbacks=[alone], evaluate=(), **loop)
    algorithm = LocalTrain(network(), **settings)
    fit(algorithm, digits, 4, **loop)
    scores = algorithm.evaluation.scores["test", "personalized"]
    np.testing.assert_array_equal(scores["count"], digits.partition.test.sizes)
    np.testing.assert_array_equal(scores["accuracy"], alone.scores["accuracy"])
    np.testing.assert_array_equal(scores["loss"], alone.scores["loss"])
    # There is no global model to score, and training did something.
    assert ("test", "global") not in algorithm.evaluation.scores
    assert scores["accuracy"].mean() > 0.3


PLAIN = dict(lr=0.2, lr_decay=0.9, weight_decay=1e-3, local_epochs=2, batch_size=16)
AIDED = dict(clip=0.5, local_patience=1, schedule=WarmUp(steps=3), accumulate=2)
MOMENTUM = dict(optimizer=partial(torch.optim.SGD, momentum=0.5))
ADDED = {
    "FedCP": (FedCP, {}, MOMENTUM),
    "GPFL": (GPFL, {}, MOMENTUM),
    "FML": (FML, {"messenger": MLP(64, (3,))}, AIDED),
    "FedKD": (FedKD, {"messenger": MLP(64, (3,))}, AIDED),
    "FedMRL": (FedMRL, {"messenger": MLP(64, (3,))}, AIDED | MOMENTUM),
}


@pytest.mark.parametrize(("kind", "own", "more"), ADDED.values(), ids=ADDED)
def test_layers_that_a_method_adds_are_no_part_of_the_baseline(fit, kind, own, more):
    """Each client trains the network that was given, alone, as LocalTrain does; BatchNorm too."""
    digits = DigitsDataModule(num_clients=6, partition=Dirichlet(0.5))
    loop = dict(clients_per_round=3, stragglers=0.3, precision="32-true")

    def network():
        torch.manual_seed(0)
        middle = (nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4), nn.Flatten(), nn.ReLU())
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *middle, nn.Linear(8, 10))

    alone = LocalBaseline()
    fit(kind(network(), **own, **PLAIN, **more), digits, 3, callbacks=[alone], evaluate=(), **loop)
    trained = fit(LocalTrain(network(), **PLAIN, **more), digits, 3, **loop)
    for name, values in trained.evaluation.scores["test", "personalized"].items():
        np.testing.assert_allclose(alone.scores[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", [FLoRA, FedExLoRA])
def test_dense_updates_of_the_server_stay_0_in_the_baseline(fit, kind):
    """The factors and the head are trained, clipped by their own norm, as LocalTrain does."""
    digits = DigitsDataModule(num_clients=6, partition=Dirichlet(0.5))
    loop = dict(clients_per_round=3, precision="32-true")
    settings = dict(trainable=LoRA(rank=2), clip=0.5, **PLAIN)

    def network():
        torch.manual_seed(0)
        return MLP(64, (8,))

    alone = LocalBaseline()
    fit(kind(network(), **settings), digits, 3, callbacks=[alone], evaluate=(), **loop)
    trained = fit(LocalTrain(network(), **settings), digits, 3, **loop)
    for name, values in trained.evaluation.scores["test", "personalized"].items():
        np.testing.assert_allclose(alone.scores[name], values, rtol=1e-5, err_msg=name)
