"""FedPer against NumPy, and against FedAvg and LocalTrain, of which it is one in each part."""

import numpy as np
import torch

from datamodules import DigitsDataModule, Dirichlet
from models import MLP, HalfSquaredError
from pfl.algorithms import FedAvg, FedPer, LocalTrain
from tests.algorithms import two_layers
from tests.problems import matrix_problem

FULL = dict(batch_size=None, loss=HalfSquaredError())


def test_rounds_equal_the_numpy_loop(watch):
    data, w = two_layers.problem((7, 4, 5, 3)), two_layers.start()
    trace = [[0, 1, 2], [0, 2], [], [2], [0, 1]]
    settings = dict(lr=0.2, lr_decay=0.9, weight_decay=0.1)
    algorithm = FedPer(data.network(w), local_epochs=3, **settings, **FULL)
    history = watch(algorithm, data, len(trace), trace=trace)
    expected = two_layers.rounds(data, w, trace, [(slice(None), 3)], **settings)
    for row, (body, heads) in zip(history.rounds, expected, strict=True):
        np.testing.assert_allclose(row["w"][: two_layers.BODY], body, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row["head"], heads, rtol=0, atol=1e-12)


def test_with_objectives_that_separate_it_is_fedavg_and_local_training(fit):
    """Where f_i is a sum over the parameters, the shared ones follow FedAvg and the personal ones
    train alone."""
    rng = np.random.default_rng(0)
    optima, biases = list(rng.normal(size=(3, 2, 3))), list(rng.normal(size=(3, 2)))
    problem = matrix_problem(optima, [1.0, 2.0, 0.5], [1, 3, 2], biases)
    methods = {}
    for kind, extra in ((FedPer, {"personal": ["bias"]}), (FedAvg, {}), (LocalTrain, {})):
        method = kind(problem.network(0.2), lr=0.3, local_steps=3, **extra, **FULL)
        methods[kind] = fit(method, problem, 4, trace=[[0, 1], [2], [1, 2], [0, 2]])
    heads = methods[FedPer].client_rows("head", np.arange(3))
    alone = methods[LocalTrain].client_rows("w", np.arange(3))
    torch.testing.assert_close(
        methods[FedPer].global_model[:6], methods[FedAvg].global_model[:6], rtol=0, atol=1e-12
    )
    torch.testing.assert_close(heads, alone[:, 6:], rtol=0, atol=1e-12)


def test_in_its_first_round_it_is_fedavg(fit):
    """All heads begin at the initial one: the clients' models are FedAvg's, and so is the body."""
    data, methods = DigitsDataModule(4, Dirichlet(1.0)), []
    for kind in (FedPer, FedAvg):
        torch.manual_seed(0)
        methods.append(fit(kind(MLP(64, (8,)), lr=0.1), data, 1, evaluate=()))
    body = ~methods[0].personal_part
    one, other = (method.global_model[body] for method in methods)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert methods[0].row["train/loss"] == methods[1].row["train/loss"]
