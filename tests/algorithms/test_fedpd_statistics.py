"""FedPD with BatchNorm: the statistics of a client move with its own steps."""

import numpy as np
import torch
from torch import nn

from models import HalfSquaredError
from pfl.algorithms import FedPD
from pfl.engines.sequential import SequentialEngine
from tests.algorithms.methods import normalized_network, small_world
from tests.problems import least_squares

SETTINGS = dict(batch_size=None, loss=HalfSquaredError(), buffers="local")


def statistics(algorithm):
    return algorithm.store.read("buffers", np.arange(algorithm.store.num_clients))


def test_oracle_two_moves_them_by_the_new_model(fit):
    """One step in the first round, in which the full gradient is taken as well: the statistics are
    those of one pass of the samples through the network with x_i, the end of the step."""
    data = small_world()
    algorithm = FedPD(
        normalized_network(), variance_reduction=True, proximal_step=0.2, local_steps=1, **SETTINGS
    )
    fit(algorithm, data, 1, evaluate=())
    for i, x in enumerate(algorithm.store.read("x", np.arange(4))):
        network = normalized_network().train()
        nn.utils.vector_to_parameters(x, network.parameters())
        network(data.samples.gather(torch.from_numpy(data.partition.train[i]))[0])
        expected = torch.cat([b.reshape(-1).double() for b in network.buffers()])
        torch.testing.assert_close(statistics(algorithm)[i], expected, rtol=0, atol=1e-12)


def test_a_client_continues_with_statistics_of_its_own(fit):
    """Two rounds of one step: 0.1 and then 0.9 * 0.1 of the mean of the client's own inputs."""
    problem, settings = least_squares((6, 9)), SETTINGS | dict(buffers="average")
    width = problem.features[0].shape[1]
    network = nn.Sequential(nn.BatchNorm1d(width), problem.network()).double()
    method = FedPD(network, proximal_step=0.5, lr=0.1, local_steps=1, **settings)
    expected = [0.19 * x.mean(0) for x in problem.features]
    actual = statistics(fit(method, problem, 2))[:, :width]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def test_they_stop_with_their_client_whatever_the_others_of_its_group_do(fit, monkeypatch):
    """With a tolerance, clients stop after different numbers of steps, counted by BatchNorm. On a
    GPU such networks train in groups."""
    monkeypatch.setattr(SequentialEngine, "group_size", lambda self, clients, threads: clients)

    def trained(at_once):
        arguments = dict(residual_tolerance=0.1, proximal_step=0.5, lr=0.1, local_steps=20)
        algorithm = FedPD(normalized_network(), **arguments, **SETTINGS)
        return statistics(fit(algorithm, small_world(), 2, evaluate=(), clients_at_once=at_once))

    together, alone = trained(4), trained(1)
    assert len(set(alone[:, -1].tolist())) > 1
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
