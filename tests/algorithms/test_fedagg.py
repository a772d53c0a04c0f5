"""FedAgg round by round against NumPy, what is sent, and what must not matter."""

import csv

import numpy as np
import pytest

from models import HalfSquaredError
from pfl.algorithms import FedAgg
from tests.algorithms import reference_agg_acs as reference
from tests.algorithms.reference_agg_acs import rates_by_round
from tests.problems import Steps, least_squares

FULL = dict(batch_size=None, loss=HalfSquaredError())
SIZES = (7, 2, 5, 3)
EVERYONE = [[0, 1, 2, 3]] * 5
SAMPLED = [[0, 1], [1, 2, 3], [2], [0, 3], [1, 2]]


@pytest.fixture(scope="module")
def problem():
    """Clients of unequal sizes and Hessians; 3 x 2 weights and 2 biases."""
    return least_squares(SIZES, bias=True)


START = np.linspace(-1.0, 1.0, 8)
SETTINGS = dict(lr=0.2, epochs=3, penalty=0.1, max_rate=0.6)


def fedagg(network, *, lr, epochs, penalty, damping=1, **kwargs):
    """The method, with the reference's names."""
    return FedAgg(
        network, lr=lr, local_epochs=epochs, rate_penalty=penalty, damping_steps=damping, **kwargs
    )


def assert_follows(history, algorithm, expected, atol=1e-11, first=0):
    """Models, φ1 and rates (from round `first` on) of all rounds."""
    np.testing.assert_allclose(history["w"], [row["w"] for row in expected], rtol=0, atol=atol)
    for t, row in enumerate(expected):
        if row["gradients"] is not None:
            actual = history["gradients"][t]
            np.testing.assert_allclose(actual, row["gradients"], rtol=0, atol=atol)
    actual = rates_by_round(algorithm)
    assert [t for t, row in enumerate(expected) if row["rates"]] == list(actual)
    for t, rates in actual.items():
        assert list(rates) == sorted(expected[t]["rates"])
        for i, own in rates.items() if t >= first else ():
            np.testing.assert_allclose(own, expected[t]["rates"][i], rtol=0, atol=atol)


@pytest.mark.parametrize("trace", [EVERYONE, SAMPLED], ids=["full", "sampled"])
@pytest.mark.parametrize("epochs, damping", [(1, 1), (2, 1), (3, 1), (1, 3), (3, 2), (3, 4)])
def test_every_round_equals_numpy(watch, problem, trace, epochs, damping):
    settings = SETTINGS | dict(epochs=epochs, damping=damping)
    algorithm = fedagg(problem.network(START), **settings, **FULL)
    history = watch(algorithm, problem, 5, trace=trace)
    assert_follows(history, algorithm, reference.fedagg(problem, START, trace, **settings))


def test_learning_rate_and_weight_decay(watch, problem):
    """η_base falls from round to round, and local gradients are g + weight_decay w."""
    settings = SETTINGS | dict(lr_decay=0.8, weight_decay=0.3)
    algorithm = fedagg(problem.network(START), **settings, **FULL)
    history = watch(algorithm, problem, 5, trace=SAMPLED)
    assert_follows(history, algorithm, reference.fedagg(problem, START, SAMPLED, **settings))


@pytest.mark.parametrize("damping", [1, 3])
@pytest.mark.parametrize("trace", [EVERYONE, SAMPLED], ids=["full", "sampled"])
def test_aggregated_dynamics(watch, problem, trace, damping):
    """Everyone moves by φ1; in the first round there is none, and nobody moves."""
    settings = SETTINGS | dict(dynamics="aggregated", damping=damping)
    algorithm = fedagg(problem.network(START), **settings, **FULL)
    history = watch(algorithm, problem, 5, trace=trace)
    expected = reference.fedagg(problem, START, trace, **settings)
    np.testing.assert_allclose(history["w"][0], START, rtol=0, atol=1e-15)
    assert_follows(history, algorithm, expected, first=1)
    for row in expected[1:]:  # one open-loop solution
        assert np.ptp([own for own in row["rates"].values()], axis=0).max() < 1e-12


@pytest.mark.parametrize("dynamics", ["own", "aggregated"])
@pytest.mark.parametrize("trace", [EVERYONE * 2, SAMPLED * 2], ids=["full", "sampled"])
def test_fixed_point_iterations_equal_numpy(watch, problem, trace, dynamics):
    """Algorithm 1 from one model: both terms are refreshed by the participants."""
    settings = SETTINGS | dict(mean_field="fixed_point", dynamics=dynamics)
    algorithm = fedagg(problem.network(START), tolerance=1e-30, **settings, **FULL)
    history = watch(algorithm, problem, 10, trace=trace)
    expected = reference.fedagg(problem, START, trace, **settings)
    assert len(expected) == 10
    assert_follows(history, algorithm, expected, first=1)
    moved = [row["path"][1:] - START for row in expected]  # as the method keeps it
    np.testing.assert_allclose(history["path"], moved, rtol=0, atol=1e-11)
    np.testing.assert_allclose(history["w"], [START] * 10, rtol=0, atol=1e-15)


# ---- mini-batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("mean_field", ["damped", "fixed_point"])
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_an_epoch_has_one_rate_and_its_gradients_add_up(watch, problem, engine, mean_field):
    """g_{i,l} is the sum over the epoch's mini-batches, each at the model of its step."""
    steps = Steps()
    settings = SETTINGS | dict(lr=0.1, mean_field=mean_field)
    algorithm = fedagg(
        problem.network(START),
        batch_size=2,
        loss=HalfSquaredError(),
        engine=engine,
        **({"tolerance": 1e-30} if mean_field == "fixed_point" else {}),
        **settings,
    )
    trace = [[0, 1, 2, 3], [0, 2, 3], [1, 2], [0, 1, 2, 3]]
    history = watch(algorithm, problem, 4, callbacks=[steps], trace=trace)
    per_epoch = [-(-n // 2) for n in SIZES]
    seen = steps.batches(problem)

    def batches(t, i, epoch):
        actual = seen[t][i][per_epoch[i] * epoch : per_epoch[i] * (epoch + 1)]
        assert sorted(np.concatenate(actual)) == list(range(SIZES[i]))
        return actual

    expected = reference.fedagg(problem, START, trace, batches=batches, **settings)
    assert_follows(history, algorithm, expected)
    # Every epoch of a client has an order of its own, and every sample is counted.
    orders = {tuple(np.concatenate(batches(0, 0, epoch)).tolist()) for epoch in range(3)}
    assert len(orders) == 3
    rows = algorithm.trainer.recorder.rows
    total = np.cumsum([3 * sum(SIZES[i] for i in cohort) for cohort in trace])
    np.testing.assert_array_equal([row["train/samples"] for row in rows], total)


# ---- what is sent, and what is written ----------------------------------------------------------


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(
    "mean_field, down, up",
    [
        ("damped", lambda n: 1 + n, lambda n: n),
        ("fixed_point", lambda n: 2 * n + 1, lambda n: 2 * n),
    ],
)
def test_the_ledger_counts_models_and_mean_field_terms(
    watch, problem, mean_field, down, up, epochs
):
    """FA-1: w and φ1 down, L gradients up. FA-0: φ1 and φ2 (with w) down, gradients and models
    up. In the first round the server has only w."""
    settings = SETTINGS | dict(epochs=epochs, mean_field=mean_field)
    algorithm = fedagg(problem.network(START), tolerance=1e-30, **settings, **FULL)
    trace = [[0, 1], [1, 2], [1]]
    history = watch(algorithm, problem, 3, trace=trace)
    n = epochs
    np.testing.assert_array_equal(
        history["down"][-1] / 64, [1, 1 + 2 * down(n), down(n), 0], err_msg="down"
    )
    visits = np.array([1, 3, 1, 0])
    np.testing.assert_array_equal(history["up"][-1] / 64, visits * up(n), err_msg="up")
    row = algorithm.trainer.recorder.rows[-1]
    assert row["comm/uplink_bytes"] == history["up"][-1].sum()
    assert row["comm/downlink_bytes"] == history["down"][-1].sum()


def test_the_mean_rates_are_in_the_metrics(fit, problem):
    algorithm = fedagg(problem.network(START), **SETTINGS, **FULL)
    fit(algorithm, problem, 5, trace=SAMPLED)
    rates = rates_by_round(algorithm)
    with (algorithm.trainer.run_dir / "metrics.csv").open(newline="") as file:
        for t, row in enumerate(csv.DictReader(file)):
            for epoch in range(3):
                mean = np.mean([own[epoch] for own in rates[t].values()])
                assert float(row[f"rate/{epoch}"]) == pytest.approx(mean, abs=1e-12)
    assert all(own == [0.2] * 3 for own in rates[0].values())  # η_base, as it is
    # One model for everyone, no client state.
    assert algorithm.has_global and not algorithm.has_personalized
    assert algorithm.store.names == []
