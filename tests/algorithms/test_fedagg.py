"""FedAgg round by round against NumPy, what is sent, and what must not matter."""

import csv

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from datamodules import DigitsDataModule, Dirichlet
from models import MLP, HalfSquaredError
from pfl import FederatedLoop
from pfl.algorithms import FedAgg
from pfl.callbacks import RoundCheckpoint
from tests.algorithms import reference_agg_acs as reference
from tests.algorithms.reference_agg_acs import rates_by_round
from tests.problems import History, Steps, batches_of_clients, least_squares, quiet

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
def test_every_round_equals_numpy(fit, problem, trace, epochs, damping):
    history, settings = History(), SETTINGS | dict(epochs=epochs, damping=damping)
    algorithm = fedagg(problem.network(START), **settings, **FULL)
    fit(algorithm, problem, 5, callbacks=[history], trace=trace)
    assert_follows(history, algorithm, reference.fedagg(problem, START, trace, **settings))


def test_learning_rate_and_weight_decay(fit, problem):
    """η_base falls from round to round, and local gradients are g + weight_decay w."""
    history, settings = History(), SETTINGS | dict(lr_decay=0.8, weight_decay=0.3)
    algorithm = fedagg(problem.network(START), **settings, **FULL)
    fit(algorithm, problem, 5, callbacks=[history], trace=SAMPLED)
    assert_follows(history, algorithm, reference.fedagg(problem, START, SAMPLED, **settings))


@pytest.mark.parametrize("slip", ["samples", "uniform", "greedy", "open loop", "anchor", "free"])
def test_a_wrong_formula_would_show(problem, slip):
    """The cases above are sharp: each misreading moves the model by more than 0.01."""
    right = reference.fedagg(problem, START, SAMPLED, **SETTINGS)
    wrong = reference.fedagg(problem, START, SAMPLED, slip=slip, **SETTINGS)
    assert max(np.abs(a["w"] - b["w"]).max() for a, b in zip(right, wrong, strict=True)) > 0.01


def test_more_damping_steps_or_other_dynamics_would_show(problem):
    right = reference.fedagg(problem, START, SAMPLED, **SETTINGS)
    for other in (dict(damping=2), dict(dynamics="aggregated")):
        wrong = reference.fedagg(problem, START, SAMPLED, **SETTINGS, **other)
        assert np.abs(right[-1]["w"] - wrong[-1]["w"]).max() > 0.01


def test_rates_differ_between_clients_and_reach_both_bounds(problem):
    """So that feedback and clipping are seen above."""
    history = reference.fedagg(problem, START, SAMPLED, **SETTINGS)
    rates = [own for row in history[1:] for own in row["rates"].values()]
    assert {0.0, 0.6} < {rate for own in rates for rate in own}
    both = history[1]["rates"]
    assert np.ptp([both[i][1] for i in (1, 2, 3)]) > 0.01
    assert both[1][0] == both[2][0] == both[3][0]  # all are at w in epoch 0


@pytest.mark.parametrize("damping", [1, 3])
@pytest.mark.parametrize("trace", [EVERYONE, SAMPLED], ids=["full", "sampled"])
def test_aggregated_dynamics(fit, problem, trace, damping):
    """Everyone moves by φ1; in the first round there is none, and nobody moves."""
    history, settings = History(), SETTINGS | dict(dynamics="aggregated", damping=damping)
    algorithm = fedagg(problem.network(START), **settings, **FULL)
    fit(algorithm, problem, 5, callbacks=[history], trace=trace)
    expected = reference.fedagg(problem, START, trace, **settings)
    np.testing.assert_allclose(history["w"][0], START, rtol=0, atol=1e-15)
    assert_follows(history, algorithm, expected, first=1)
    for row in expected[1:]:  # one open-loop solution
        assert np.ptp([own for own in row["rates"].values()], axis=0).max() < 1e-12


def test_nobody_reports_and_nothing_changes(fit, problem):
    """Rates need gradients, so the first round with clients takes η_base, whenever it is."""
    trace, history = [[], [0, 1], [], [2, 3], [1]], History()
    algorithm = fedagg(problem.network(START), **SETTINGS, **FULL)
    fit(algorithm, problem, 5, callbacks=[history], trace=trace)
    np.testing.assert_array_equal(history["w"][0], START)
    for name in ("w", "gradients", "down", "up"):
        np.testing.assert_array_equal(history[name][2], history[name][1])
    assert_follows(history, algorithm, reference.fedagg(problem, START, trace, **SETTINGS))
    # 8 parameters of 8 bytes: P down at first, later (1 + L) P; L P up.
    np.testing.assert_array_equal(history["down"][1], [64, 64, 0, 0])
    np.testing.assert_array_equal(history["down"][3], [64, 64, 256, 256])
    np.testing.assert_array_equal(history["up"][3], [192] * 4)


@pytest.mark.parametrize("dynamics", ["own", "aggregated"])
@pytest.mark.parametrize("trace", [EVERYONE * 2, SAMPLED * 2], ids=["full", "sampled"])
def test_fixed_point_iterations_equal_numpy(fit, problem, trace, dynamics):
    """Algorithm 1 from one model: both terms are refreshed by the participants."""
    settings = SETTINGS | dict(mean_field="fixed_point", dynamics=dynamics)
    history = History()
    algorithm = fedagg(problem.network(START), tolerance=1e-30, **settings, **FULL)
    fit(algorithm, problem, 10, callbacks=[history], trace=trace)
    expected = reference.fedagg(problem, START, trace, **settings)
    assert len(expected) == 10
    assert_follows(history, algorithm, expected, first=1)
    moved = [row["path"][1:] - START for row in expected]  # as the method keeps it
    np.testing.assert_allclose(history["path"], moved, rtol=0, atol=1e-11)
    np.testing.assert_allclose(history["w"], [START] * 10, rtol=0, atol=1e-15)


# ---- mini-batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("mean_field", ["damped", "fixed_point"])
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_an_epoch_has_one_rate_and_its_gradients_add_up(fit, problem, engine, mean_field):
    """g_{i,l} is the sum over the epoch's mini-batches, each at the model of its step."""
    steps, history = Steps(), History()
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
    fit(algorithm, problem, 4, callbacks=[steps, history], trace=trace)
    per_epoch = [-(-n // 2) for n in SIZES]
    seen = [batches_of_clients(problem, calls) for calls in steps.rounds]

    def batches(t, i, epoch):
        actual = seen[t][i][per_epoch[i] * epoch : per_epoch[i] * (epoch + 1)]
        assert sorted(np.concatenate(actual)) == list(range(SIZES[i]))
        return actual

    expected = reference.fedagg(problem, START, trace, batches=batches, **settings)
    assert_follows(history, algorithm, expected)
    wrong = reference.fedagg(problem, START, trace, batches=batches, slip="batch mean", **settings)
    assert np.abs(expected[-1]["gradients"] - wrong[-1]["gradients"]).max() > 0.1
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
def test_the_ledger_counts_models_and_mean_field_terms(fit, problem, mean_field, down, up, epochs):
    """FA-1: w and φ1 down, L gradients up. FA-0: φ1 and φ2 (with w) down, gradients and models
    up. In the first round the server has only w."""
    history = History()
    settings = SETTINGS | dict(epochs=epochs, mean_field=mean_field)
    algorithm = fedagg(problem.network(START), tolerance=1e-30, **settings, **FULL)
    trace = [[0, 1], [1, 2], [1]]
    fit(algorithm, problem, 3, callbacks=[history], trace=trace)
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


# ---- what must not matter -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    """Five clients of very unequal sizes."""
    return DigitsDataModule(num_clients=5, partition=Dirichlet(0.2), seed=1)


def trained(
    root,
    digits,
    rounds,
    ckpt_path=None,
    seed=0,
    precision="64-true",
    loop=None,
    callbacks=(),
    **kwargs,
):
    """A small network after some rounds of 3 of the 5 clients."""
    torch.manual_seed(seed)
    algorithm = FedAgg(MLP(64, (6,)), lr=0.02, local_epochs=2, batch_size=64, **kwargs)
    trainer = quiet(
        root,
        rounds,
        RoundCheckpoint(every_seconds=0),
        *callbacks,
        precision=precision,
        limit_val_batches=0,
    )
    data = FederatedLoop(digits, clients_per_round=3, **(loop or {}))
    trainer.fit(algorithm, datamodule=data, ckpt_path=ckpt_path)
    return algorithm


VARIANTS = {
    "FA-1": {},
    "FA-3": dict(damping_steps=3),
    "FA-0": dict(mean_field="fixed_point", tolerance=1e-3),
    "aggregated": dict(dynamics="aggregated"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_engines_and_chunks_agree(tmp_path, digits, variant):
    """Each client's rates and the model, against one client at a time by the plain loop."""
    options = VARIANTS[variant]
    first = trained(
        tmp_path, digits, 3, engine="sequential", loop=dict(clients_at_once=1), **options
    )
    expected = rates_by_round(first)
    for engine, at_once in (("sequential", 2), ("vmap", None)):
        loop = dict(clients_at_once=at_once)
        other = trained(tmp_path, digits, 3, engine=engine, loop=loop, **options)
        for name in ("global_model", "gradients"):
            values = getattr(first, name)
            error = (getattr(other, name) - values).norm() / values.norm()
            assert error < 1e-10, (name, engine, at_once)
        actual = rates_by_round(other)
        assert {t: list(rates) for t, rates in actual.items()} == {
            t: list(rates) for t, rates in expected.items()
        }
        for t, rates in expected.items():
            for i, own in rates.items():
                np.testing.assert_allclose(actual[t][i], own, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "variant, precision", [*((name, "32-true") for name in VARIANTS), ("FA-1", "64-true")]
)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, digits, variant, precision):
    options = VARIANTS[variant] | dict(precision=precision)
    expected = trained(tmp_path / "straight", digits, 4, **options)
    trained(tmp_path / "parts", digits, 2, **options)
    last = tmp_path / "parts" / "run" / "checkpoints" / "last.ckpt"
    resumed = trained(tmp_path / "parts", digits, 4, ckpt_path=last, seed=1, **options)
    for name, value in expected.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    for name in ("rates.csv", "metrics.csv"):
        one, other = (tmp_path / part / "run" / name for part in ("parts", "straight"))
        assert one.read_bytes() == other.read_bytes(), name
    assert len(expected.trainer.recorder.rows) == 4


def test_a_resumed_run_has_its_terms(tmp_path, digits):
    """The comparison above would see a run that begins again without φ1."""

    class Forget(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                pl_module.gradients.zero_()

    models = [
        trained(tmp_path, digits, 4, callbacks=callbacks).global_model
        for callbacks in ((), (Forget(),))
    ]
    assert (models[0] - models[1]).abs().max() > 1e-4
