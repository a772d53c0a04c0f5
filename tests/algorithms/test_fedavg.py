"""FedAvg and the server optimizers, against NumPy and closed forms."""

from functools import partial

import numpy as np
import pytest
import torch

from models import HalfSquaredError
from pfl.algorithms import FedAvg
from pfl.errors import Diverged
from tests.algorithms import reference
from tests.problems import Steps, least_squares, scalar_problem

SIZES = (7, 2, 5, 3)
FULL = dict(batch_size=None, loss=HalfSquaredError())
START = np.linspace(-1.0, 1.0, 8)  # 3 x 2 weights and 2 biases


@pytest.fixture(scope="module")
def problem():
    return least_squares(SIZES, bias=True)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize(
    "trace",
    [[[0, 1, 2, 3]], [[0, 1, 2, 3]] * 4, [[1], [0, 3], [], [1, 2, 3]]],
    ids=["one round", "full", "partial"],
)
def test_rounds_equal_the_numpy_loop(watch, problem, trace, weighting):
    algorithm = FedAvg(problem.network(START), lr=0.2, local_steps=3, weighting=weighting, **FULL)
    history = watch(algorithm, problem, len(trace), trace=trace)
    expected = reference.fedavg(problem, START, trace, lr=0.2, steps=3, weighting=weighting)
    np.testing.assert_allclose(history["w"], expected, rtol=0, atol=1e-12)


def test_learning_rate_and_weight_decay(watch, problem):
    algorithm = FedAvg(
        problem.network(START), lr=0.3, lr_decay=0.5, weight_decay=0.4, local_epochs=2, **FULL
    )
    history = watch(algorithm, problem, 3)
    # A full gradient is one step an epoch.
    settings = dict(lr=0.3, lr_decay=0.5, weight_decay=0.4, steps=2)
    expected = reference.fedavg(problem, START, [range(4)] * 3, **settings)
    np.testing.assert_allclose(history["w"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sampling", ["uniform", "bernoulli", "weighted"])
def test_a_sampled_cohort_is_averaged_over_itself(watch, problem, sampling):
    """Clients that were sent something took part, and no others count in the mean."""
    algorithm = FedAvg(problem.network(START), lr=0.2, local_steps=2, **FULL)
    history = watch(algorithm, problem, 6, clients_per_round=2, sampling=sampling)
    trace = history.participants()
    if sampling != "bernoulli":
        assert [len(cohort) for cohort in trace] == [2] * 6
    assert len({tuple(cohort) for cohort in trace}) > 1
    expected = reference.fedavg(problem, START, trace, lr=0.2, steps=2)
    np.testing.assert_allclose(history["w"], expected, rtol=0, atol=1e-12)
    # 8 parameters of 8 bytes, both ways.
    times = np.bincount(np.concatenate(trace), minlength=4)
    np.testing.assert_array_equal(history["down"][-1], 64 * times)
    np.testing.assert_array_equal(history["up"][-1], 64 * times)


# ---- mini-batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_an_epoch_takes_every_sample_once(watch, problem, engine):
    steps = Steps()
    arguments = dict(lr=0.1, local_epochs=2, batch_size=3, loss=HalfSquaredError(), engine=engine)
    algorithm = FedAvg(problem.network(START), **arguments)
    history = watch(algorithm, problem, 2, callbacks=[steps])
    w, orders = START, set()
    for t, clients in enumerate(steps.batches(problem)):
        total = np.zeros_like(w)
        for i, batches in enumerate(clients):
            # 7 samples: 3, 3, 1 in each epoch; 2: 2; 5: 3, 2; 3: 3.
            sizes = [[3, 3, 1], [2], [3, 2], [3]][i]
            assert [len(batch) for batch in batches] == sizes * 2
            for epoch in (batches[: len(sizes)], batches[len(sizes) :]):
                order = np.concatenate(epoch)
                assert sorted(order) == list(range(SIZES[i]))
                if i == 0:
                    orders.add(tuple(order))
            v = w
            for batch in batches:
                v = v - 0.1 * problem.gradient(i, v, batch)
            total += SIZES[i] / sum(SIZES) * v
        w = total
        np.testing.assert_allclose(history["w"][t], w, rtol=0, atol=1e-12)
    assert len(orders) == 4  # every epoch of every round has an order of its own


def test_local_steps_run_over_as_many_epochs_as_they_take(fit, problem):
    steps = Steps()
    algorithm = FedAvg(
        problem.network(START), lr=0.1, local_steps=4, batch_size=3, loss=HalfSquaredError()
    )
    fit(algorithm, problem, 1, callbacks=[steps])
    seen = steps.batches(problem)[0]
    sizes = [[len(batch) for batch in batches] for batches in seen]
    assert sizes == [[3, 3, 1, 3], [2, 2, 2, 2], [3, 2, 3, 2], [3, 3, 3, 3]]
    assert sorted(np.concatenate(seen[0][:3])) == list(range(7))


# ---- closed forms -------------------------------------------------------------------------------


def test_local_steps_contract(fit):
    """f(w) = a/2 (w - A)^2: K steps leave (1 - η a)^K of the distance to A."""
    problem = scalar_problem([2.0], curvatures=[1.5])
    algorithm = FedAvg(problem.network(-1.0), lr=0.1, local_steps=5, **FULL)
    fit(algorithm, problem, 3)
    # 3 rounds of 5 steps: A + (1 - 0.15)^15 (w - A).
    expected = 2.0 + 0.85**15 * (-1.0 - 2.0)
    assert float(algorithm.global_model) == pytest.approx(expected, abs=1e-12)


def test_the_limit_is_biased_towards_curved_clients(fit):
    """w = sum n_i (A_i + (1 - η a_i)^K (w - A_i)) has the fixed point
    sum n_i c_i A_i / sum n_i c_i with c_i = 1 - (1 - η a_i)^K; the optimum has a_i for c_i."""
    optima, a, copies = np.array([0.0, 1.0, 3.0]), np.array([4.0, 1.0, 0.5]), np.array([1, 2, 1])
    problem = scalar_problem(optima, a, copies)
    algorithm = FedAvg(problem.network(5.0), lr=0.2, local_steps=4, **FULL)
    fit(algorithm, problem, 40)
    c = copies * (1 - (1 - 0.2 * a) ** 4)
    limit = (c * optima).sum() / c.sum()
    optimum = (copies * a * optima).sum() / (copies * a).sum()
    assert abs(limit - optimum) > 0.3
    assert float(algorithm.global_model) == pytest.approx(limit, abs=1e-9)


# ---- server optimizers --------------------------------------------------------------------------


def test_server_sgd_interpolates(watch, problem):
    arguments = dict(lr=0.2, local_steps=3, server_optimizer=partial(torch.optim.SGD, lr=0.5))
    algorithm = FedAvg(problem.network(START), **arguments, **FULL)
    history = watch(algorithm, problem, 3)
    expected = reference.fedavg(
        problem, START, [range(4)] * 3, lr=0.2, steps=3, server=lambda w, mean: 0.5 * w + 0.5 * mean
    )
    np.testing.assert_allclose(history["w"], expected, rtol=0, atol=1e-12)


def test_server_adam_is_fedadam_with_bias_correction(watch, problem):
    """FedAdam: m = β1 m + (1 - β1) Δ; v = β2 v + (1 - β2) Δ^2; w += η m / (sqrt v + τ),
    Δ = mean w_i - w. Adam divides m by 1 - β1^t and v by 1 - β2^t, which is FedAdam with
    η_t = η sqrt(1 - β2^t) / (1 - β1^t), τ_t = τ sqrt(1 - β2^t) and v = 0 at the beginning."""
    rate, b1, b2, tau = 0.05, 0.8, 0.95, 1e-2
    algorithm = FedAvg(
        problem.network(START),
        lr=0.2,
        local_steps=2,
        server_optimizer=partial(torch.optim.Adam, lr=rate, betas=(b1, b2), eps=tau),
        **FULL,
    )
    history = watch(algorithm, problem, 4)
    state = {"t": 0, "m": np.zeros(8), "v": np.zeros(8)}

    def fedadam(w, mean):
        state["t"] += 1
        change = mean - w
        state["m"] = b1 * state["m"] + (1 - b1) * change
        state["v"] = b2 * state["v"] + (1 - b2) * change**2
        root = np.sqrt(1 - b2 ** state["t"])
        rate_t = rate * root / (1 - b1 ** state["t"])
        return w + rate_t * state["m"] / (np.sqrt(state["v"]) + tau * root)

    expected = reference.fedavg(problem, START, [range(4)] * 4, lr=0.2, steps=2, server=fedadam)
    np.testing.assert_allclose(history["w"], expected, rtol=0, atol=1e-12)


def test_a_run_whose_models_are_not_finite_has_diverged(fit, problem):
    algorithm = FedAvg(problem.network(START), lr=1e30, local_steps=20, **FULL)
    with pytest.raises(Diverged, match=r"model\.lr: 1e\+30"):
        fit(algorithm, problem, 2)
