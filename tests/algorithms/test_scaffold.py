"""SCAFFOLD against a slow NumPy loop, its fixed points, and FedAvg where both are the same."""

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from pfl.algorithms import SCAFFOLD, FedAvg
from tests.algorithms.reference_clup_pd import assert_rounds, with_an_idle_client
from tests.algorithms.traced import (
    ALL,
    BATCH_COUNTS,
    BATCHES,
    FULL,
    LOSS,
    RATES,
    SIZES,
    START,
    TRACE,
    full,
)
from tests.problems import History, Steps, scalar_problem

OPTIONS = pytest.mark.parametrize("option", ["I", "II"])


# ---- a second implementation --------------------------------------------------------------------


def scaffold(problem, x, batches, option, lr, lr_decay=1.0, weight_decay=0.0, server_lr=1.0):
    """Algorithm 1, client by client and step by step; x, c and all c_i after each round.

    `batches[t][i]` has the samples of each local step that client i takes in round t: everyone of
    the cohort is a key, and a client without samples has no steps.
    """
    n = problem.num_clients
    c, c_i, history = np.zeros_like(x), np.zeros((n, len(x))), []
    for t, cohort in enumerate(batches):
        rate = lr * lr_decay**t
        changes_x, changes_c = {}, {}
        for i, steps in cohort.items():
            y, new = x.copy(), c_i[i]
            for samples in steps:
                g = problem.gradient(i, y, samples) + weight_decay * y
                y = y - rate * (g + c - c_i[i])
            if steps and option == "I":
                new = problem.gradient(i, x) + weight_decay * x
            elif steps:
                new = c_i[i] - c + (x - y) / (len(steps) * rate)
            changes_x[i], changes_c[i] = y - x, new - c_i[i]
            c_i[i] = new
        x = x + server_lr * np.mean(list(changes_x.values()), axis=0)
        c = c + sum(changes_c.values()) / n
        history.append({"w": x, "c": c, "c_i": c_i.copy()})
    return history


def assert_same(history, expected):
    assert_rounds(history.rounds, expected, "w", "c", "c_i", atol=1e-12)


@pytest.mark.parametrize("server_lr", [1.0, 0.6])
@OPTIONS
def test_rounds_equal_the_numpy_loop(follow, problem, option, server_lr):
    """Partial participation, unequal clients, decayed rate; a rate of the server."""
    arguments = dict(option=option, server_lr=server_lr, local_steps=4)
    history = follow(SCAFFOLD, **arguments, **FULL)
    assert_same(history, scaffold(problem, START, full(4), option, server_lr=server_lr, **RATES))


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
@OPTIONS
def test_mini_batches_and_unequal_numbers_of_local_steps(follow, problem, option, engine):
    """Two epochs of batches of two: clients take 8, 2, 6 and 4 steps. Option I makes another pass,
    whose order cannot matter."""
    steps = Steps()
    history = follow(SCAFFOLD, callbacks=[steps], option=option, engine=engine, **BATCHES)
    batches = []
    for cohort, seen in zip(TRACE, steps.batches(problem), strict=True):
        batches.append({i: seen[i][: BATCH_COUNTS[i]] for i in cohort})
        for i in cohort:
            one_pass = seen[i][BATCH_COUNTS[i] :]
            every_sample = list(range(SIZES[i])) if option == "I" else []
            assert sorted(np.concatenate([[], *one_pass]).tolist()) == every_sample
    assert_same(history, scaffold(problem, START, batches, option, **RATES))


# ---- where it ends ------------------------------------------------------------------------------

OPTIMA, CURVATURES = np.array([0.0, 1.0, 4.0]), np.array([4.0, 1.0, 0.5])
STEPS = np.array([6, 2, 4])
MINIMUM = (CURVATURES * OPTIMA).sum() / CURVATURES.sum()
QUADRATIC = dict(lr=0.1, batch_size=2, local_epochs=2, loss=LOSS)


@pytest.fixture
def quadratic():
    """f_i(w) = a_i/2 (w - A_i)^2. All samples of a client are alike, up to the sign of input and
    target, so that every mini-batch has the full gradient; two epochs of batches of two are STEPS
    local steps."""
    problem = scalar_problem(OPTIMA, CURVATURES, STEPS // 2)
    assert (problem.sizes == STEPS).all()
    return problem


@OPTIONS
def test_the_limit_is_the_minimum_for_any_numbers_of_local_steps(watch, quadratic, option):
    """At a fixed point c_i+ = c_i and mean (y_i - x) = 0, and c = mean c_i.

    Let r_i = a_i (x - A_i) - c_i + c, the first direction. K_i steps along the directions
    r_i, (1 - η a_i) r_i, ... lead to y_i - x = -s_i r_i, s_i = (1 - (1 - η a_i)^K_i) / a_i > 0.
    Option II: c_i+ = c_i says s_i r_i / (K_i η) = c for every i, so y_i - x = -K_i η c, whose mean
    is 0 only for c = 0; then r_i = 0. Option I: c_i = f_i'(x), so r_i = c for every i, and
    mean (y_i - x) = -c mean s_i is 0 only for c = 0. Either way c = 0 and c_i = f_i'(x), so that
    mean f_i'(x) = 0: x = sum a_i A_i / sum a_i, the minimum of mean f_i, whatever K_i is."""
    history = watch(SCAFFOLD(quadratic.network(5.0), option=option, **QUADRATIC), quadratic, 150)
    last = history.rounds[-1]
    assert last["w"].item() == pytest.approx(MINIMUM, abs=1e-9)
    assert last["c"].item() == pytest.approx(0.0, abs=1e-9)
    np.testing.assert_allclose(last["c_i"][:, 0], CURVATURES * (MINIMUM - OPTIMA), atol=1e-9)


def test_fedavg_ends_elsewhere(fit, quadratic):
    """Its move is the same with c_i = c = 0: the fixed point has sum s_i a_i (x - A_i) = 0, the
    mean of the A_i with weights 1 - (1 - η a_i)^K_i."""
    algorithm = FedAvg(quadratic.network(5.0), weighting="uniform", **QUADRATIC)
    fit(algorithm, quadratic, 150)
    weights = 1 - (1 - 0.1 * CURVATURES) ** STEPS
    limit = (weights * OPTIMA).sum() / weights.sum()
    assert algorithm.global_model.item() == pytest.approx(limit, abs=1e-9)
    assert abs(limit - MINIMUM) > 0.1


class Known(Callback):
    """Gives every client the gradient at the minimum as its c_i, before the first round."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            rows = torch.from_numpy(CURVATURES * (MINIMUM - OPTIMA))[:, None]
            pl_module.store.write("c_i", np.arange(3), rows)


@OPTIONS
def test_clients_that_know_their_control_variates_stay_at_the_minimum(fit, quadratic, option):
    """There, with c_i = f_i'(x) and c = mean c_i = 0, all local directions are 0."""
    for callbacks, stays in (([Known()], True), ([], False)):
        algorithm = SCAFFOLD(quadratic.network(MINIMUM), option=option, **QUADRATIC)
        fit(algorithm, quadratic, 1, callbacks=callbacks)
        assert (abs(algorithm.global_model.item() - MINIMUM) < 1e-12) == stays


# ---- identities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", [[ALL] * 6, TRACE], ids=["everyone", "some"])
@OPTIONS
@pytest.mark.parametrize("state_dtype", [None, "bfloat16"])
def test_c_is_the_mean_of_all_control_variates(watch, problem, option, trace, state_dtype):
    """Both start at 0, and c changes by the mean, over all clients, of the changes of the c_i:
    those who are not there do not change. In 16 bits these are the changes of what is stored."""
    algorithm = SCAFFOLD(
        problem.network(START), option=option, batch_size=2, server_lr=0.6, loss=LOSS, **RATES
    )
    history = watch(algorithm, problem, 6, trace=trace, state_dtype=state_dtype)
    np.testing.assert_allclose(history["c"], history["c_i"].mean(1), rtol=0, atol=1e-13)
    assert np.abs(history["c"]).min(1).max() > 1e-3


@OPTIONS
def test_the_first_round_is_that_of_fedavg(fit, problem, option):
    """All control variates are 0, whoever takes part and however many steps they take."""
    w = [
        fit(algorithm, problem, 1, trace=[[0, 1, 3]]).global_model
        for algorithm in (
            SCAFFOLD(problem.network(START), option=option, **BATCHES),
            FedAvg(problem.network(START), weighting="uniform", **BATCHES),
        )
    ]
    torch.testing.assert_close(*w, rtol=0, atol=1e-14)


@OPTIONS
def test_one_full_step_of_everyone_is_fedavg_in_every_round(fit, problem, option):
    """mean y_i = x - η (mean g_i(x) - mean c_i + c) = x - η mean g_i(x), since mean c_i = c. The
    options are the same, too: (x - y_i) / η = g_i(x) - c_i + c makes c_i+ = g_i(x)."""
    history, plain = History(), History()
    fit(SCAFFOLD(problem.network(START), option=option, **FULL), problem, 5, callbacks=[history])
    average = FedAvg(problem.network(START), weighting="uniform", **FULL)
    fit(average, problem, 5, callbacks=[plain])
    np.testing.assert_allclose(history["w"], plain["w"], rtol=0, atol=1e-13)
    received = [START, *history["w"][:-1]]
    for x, rows in zip(received, history["c_i"], strict=True):
        expected = [problem.gradient(i, x) + RATES["weight_decay"] * x for i in ALL]
        np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-12)


# ---- clients without samples, statistics, counts, arguments -------------------------------------


@OPTIONS
def test_a_client_without_samples_keeps_its_control_variate(watch, problem, option):
    """It counts in |S| with y_i = x, and in N."""
    trace = [[0, 2, 4], [*ALL, 4], [1, 4]]
    algorithm = SCAFFOLD(problem.network(START), option=option, local_steps=3, **FULL)
    history = watch(algorithm, with_an_idle_client(problem), 3, trace=trace)
    problem.num_clients = len(SIZES) + 1
    batches = [{i: [None] * 3 if i != 4 else [] for i in cohort} for cohort in trace]
    assert_same(history, scaffold(problem, START, batches, option, **RATES))
    assert not history["c_i"][:, 4].any()


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_the_pass_of_option_one_leaves_running_statistics_alone(fit, problem, buffers):
    """After the first round the options have the same model, and so the same statistics."""
    states = []
    for option in ("I", "II"):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        algorithm = SCAFFOLD(network, option=option, batch_size=None, buffers=buffers, loss=LOSS)
        fit(algorithm, problem, 1, trace=[[0, 2]])
        if buffers == "local":
            states.append({"buffers": algorithm.client_rows("buffers", np.array(ALL))})
        else:
            states.append(network.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)
