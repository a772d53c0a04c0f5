"""Methods that are the same where their parameters say so: exact identities between two classes.

Those of FedDyn, FedPD and FedSLR are in test_feddyn.py.
"""

from functools import partial

import numpy as np
import pytest
import torch

from models import HalfSquaredError
from pfl.algorithms import (
    GPGD,
    LPGD,
    FedACS,
    FedAgg,
    FedAvg,
    FedCLUP,
    FedPD,
    FedProx,
    FedSLR,
    LocalTrain,
)
from tests.algorithms import closed_forms as forms
from tests.algorithms.methods import small_network, small_world
from tests.problems import least_squares

BATCHES = dict(lr=0.2, local_epochs=2, batch_size=2)
FULL = dict(lr=0.2, batch_size=None)
SAMPLED = dict(clients_per_round=2)


@pytest.fixture
def end(fit):
    """The global model [P] and all personalized ones [M, P] (None where there are none)."""

    def end(make, network, data, rounds, **loop):
        algorithm = make(network, loss=HalfSquaredError())
        fit(algorithm, data, rounds, evaluate=(), **loop)
        rows = None
        if algorithm.has_personalized:
            rows = torch.zeros(algorithm.store.num_clients, algorithm.space.size).double()
            for clients in algorithm.iter_clients("train"):
                rows[clients.ids] = algorithm.personalized(clients)
        return algorithm.global_model, rows

    return end


def moved(network, w):
    """Whether training did something to every parameter."""
    return not torch.isclose(torch.nn.utils.parameters_to_vector(network.parameters()), w).any()


# ---- one model for everyone ---------------------------------------------------------------------

PLAIN = {
    "FedProx": partial(FedProx, proximal_weight=0.0, weighting="uniform"),
    "LPGD": partial(LPGD, low_rank_penalty=0.0),
    "GPGD": partial(GPGD, low_rank_penalty=0.0),
}


@pytest.mark.parametrize("name", PLAIN)
def test_without_its_penalty_it_is_fedavg(end, name):
    """On mini-batches of sampled clients, up to rounding: FedAvg alone steps in place."""
    actual, expected = (
        end(partial(make, **BATCHES), small_network(), small_world(), 4, **SAMPLED)[0]
        for make in (PLAIN[name], partial(FedAvg, weighting="uniform"))
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert moved(small_network(), actual)


def test_one_step_of_one_client_is_lpgd_and_gpgd_at_once(end):
    """SVT_{ηλ}(v - η g(v)), whether the client or the server takes it."""
    actual, expected = (
        end(partial(kind, low_rank_penalty=0.7, local_steps=1, **FULL), small_network(), data, 5)[0]
        for kind, data in ((LPGD, small_world(clients=1)), (GPGD, small_world(clients=1)))
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    free = end(partial(FedAvg, local_steps=1, **FULL), small_network(), small_world(clients=1), 5)[
        0
    ]
    assert (actual - free).abs().max() > 0.01


def test_one_step_is_gradient_descent_on_all_samples(end):
    """FedAvg with one full gradient a round sees the pooled samples, as one client alone does."""
    step = dict(local_steps=1, **FULL)
    actual, _ = end(partial(FedAvg, **step), small_network(), small_world(), 6)
    _, expected = end(partial(LocalTrain, **step), small_network(), small_world(clients=1), 6)
    torch.testing.assert_close(actual, expected[0], rtol=0, atol=1e-12)
    assert moved(small_network(), actual)


def test_one_client_of_fedavg_is_alone(end):
    actual, _ = end(partial(FedAvg, **BATCHES), small_network(), small_world(clients=1), 3)
    _, expected = end(partial(LocalTrain, **BATCHES), small_network(), small_world(clients=1), 3)
    torch.testing.assert_close(actual, expected[0], rtol=0, atol=1e-12)


# ---- FedProx in the first round -----------------------------------------------------------------


@pytest.mark.parametrize("eta_g", [0.3, 2.0])
def test_fedslr_s_first_round_is_fedprox_twice_as_far(end, eta_g):
    """γ_i = 0 and λ = 0: Phase I is FedProx with μ = 1/η_g, and mean w_i - η_g mean γ_i is
    w + 2 (mean w_i - w): FedProx whose server takes a step of 2."""
    slr = partial(FedSLR, proximal_step=eta_g, low_rank_penalty=0.0, **BATCHES)
    prox = partial(
        FedProx,
        proximal_weight=1 / eta_g,
        weighting="uniform",
        server_optimizer=partial(torch.optim.SGD, lr=2.0),
        **BATCHES,
    )
    actual, expected = (end(make, small_network(), small_world(), 1)[0] for make in (slr, prox))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    again, other = (end(make, small_network(), small_world(), 2)[0] for make in (slr, prox))
    assert (again - other).abs().max() > 0.01  # from then on γ_i is there


def test_fedclup_s_first_round_is_fedprox(end):
    """Clients begin at the global model, and γ = 1/λ puts the mean in its place."""
    clup, prox = partial(FedCLUP, penalty=0.8), partial(FedProx, proximal_weight=0.8)
    makes = [partial(kind, weighting="uniform", **BATCHES) for kind in (clup, prox)]
    actual, expected = (end(make, small_network(), small_world(), 1)[0] for make in makes)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    again, other = (end(make, small_network(), small_world(), 2)[0] for make in makes)
    assert (again - other).abs().max() > 1e-3  # from then on it is warm-started


# ---- every client alone -------------------------------------------------------------------------

ALONE = {
    "FedCLUP": partial(FedCLUP, penalty=0.0),
    "FedACS": partial(FedACS, quantile=1.0),
    "FedACS, known all": partial(FedACS, quantile=1.0, candidates="all"),
}


@pytest.mark.parametrize("name", ALONE)
def test_without_collaboration_it_is_local_training(end, name):
    actual, expected = (
        end(partial(make, **BATCHES), small_network(), small_world(), 5, **SAMPLED)[1]
        for make in (ALONE[name], LocalTrain)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert moved(small_network(), actual)


def test_fedslr_s_component_alone_is_local_training(end):
    """Where λ keeps w at 0 and μ is 0, Phase II is local training of p_i. Of a matrix without
    biases, which λ does not reach, and with full gradients: both phases draw their own batches."""
    problem = least_squares((4, 6, 5))
    arguments = dict(proximal_step=1.0, low_rank_penalty=1e3, sparse_penalty=0.0, personal_epochs=2)
    slr = partial(FedSLR, **arguments, **FULL)
    local = partial(LocalTrain, local_epochs=2, **FULL)
    w, actual = end(slr, problem.network(0.0), problem, 5, **SAMPLED)
    _, expected = end(local, problem.network(0.0), problem, 5, **SAMPLED)
    assert not w.any()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert expected.any()


# ---- FedAgg and FedAvg --------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1, 3])
def test_fedagg_s_first_round_is_fedavg(end, epochs):
    """No mean-field terms yet: every epoch has the base rate."""
    actual, expected = (
        end(partial(kind, local_epochs=epochs, **FULL), small_network(), small_world(), 1)[0]
        for kind in (FedAgg, FedAvg)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    again, other = (
        end(partial(kind, local_epochs=epochs, **FULL), small_network(), small_world(), 2)[0]
        for kind in (FedAgg, FedAvg)
    )
    assert (again - other).abs().max() > 1e-3


def test_fedagg_with_free_rates_is_fedavg(end):
    """With one epoch the rate is η_base k / (1 + k), k = (1-α)/α |φ1|^2: η_base for α -> 0. Here
    |φ1| > 0.1 (asserted by the size of the step), so α = 1e-14 leaves 1e-12 of a difference."""
    step = dict(local_epochs=1, **FULL)
    agg = partial(FedAgg, rate_penalty=1e-14, **step)
    runs = [
        [
            end(make, small_network(), small_world(), rounds)[0]
            for make in (agg, partial(FedAvg, **step))
        ]
        for rounds in (3, 4)
    ]
    torch.testing.assert_close(*runs[1], rtol=0, atol=1e-11)
    assert (runs[1][0] - runs[0][0]).norm() > 0.2 * 0.1


# ---- FedPD's oracles ----------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [None, 0.4])
def test_with_full_gradients_variance_reduction_is_gradient_descent(end, gamma):
    """x+ = x - (g + λ + (x - x_0)/η) / (1/η + 1/γ): Oracle I with η_1 = 1 / (1/η + 1/γ), as g is
    exact throughout."""
    eta = 0.25
    rate = eta if gamma is None else eta * gamma / (eta + gamma)
    common = dict(proximal_step=eta, local_steps=3, batch_size=None)
    actual, expected = (
        end(make, small_network(), small_world(), 5)[0]
        for make in (
            partial(FedPD, variance_reduction=True, inner_step=gamma, **common),
            partial(FedPD, lr=rate, **common),
        )
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert moved(small_network(), actual)


@pytest.mark.parametrize("schedule", [dict(skip_probability=0.6), dict(communication_period=3)])
def test_identical_clients_need_no_communication(end, schedule):
    """x_{0,i} are then all the same, with or without their mean."""
    q = forms.alike(3)
    start = np.linspace(-1, 1, q.problem.size)
    common = dict(local_steps=2, **FULL)
    actual, expected = (
        end(partial(FedPD, **common, **extra), q.problem.network(start), q.problem, 5)[0]
        for extra in (schedule, {})
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert (actual - torch.from_numpy(start)).abs().max() > 0.1
