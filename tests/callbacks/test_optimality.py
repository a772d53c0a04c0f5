"""The optimality gap and the errors of a run, against NumPy on problems with known solutions."""

import copy
import math
from itertools import pairwise

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from datamodules import (
    AgentLogistic,
    HeterogeneousLogistic,
    LeastSquares,
    Partitioner,
    SplitOwn,
    TensorDataModule,
)
from models import (
    HalfSquaredError,
    LinearRegression,
    LogisticRegression,
    PenalizedCrossEntropy,
    PenalizedLogisticRegression,
)
from pfl.algorithms import FedAvg, LocalTrain
from pfl.callbacks import Optimality
from tests.commands import table
from tests.optimality import ERRORS, is_ours
from tests.problems import History, least_squares, run
from tests.refusal import refused

FULL = dict(batch_size=None, local_steps=2, lr=0.3, loss=HalfSquaredError())


class Rows(pl.Callback):
    """The rows of `metrics.csv`, and the logged metrics of each round."""

    def __init__(self):
        self.rows, self.logged = [], []

    def on_train_epoch_end(self, trainer, pl_module):
        self.rows.append(dict(pl_module.row))
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def measured(algorithm, data, rounds, root, every=1, **kwargs):
    """Returns the numbers of `Optimality` in each round, and the models of each round."""
    rows, history = Rows(), History()
    callbacks = [Optimality(every), rows, history]
    run(algorithm, data, rounds, root=root, callbacks=callbacks, **kwargs)
    numbers = [{k: v for k, v in row.items() if is_ours(k)} for row in rows.rows]
    for row, logged in zip(numbers, rows.logged, strict=True):
        for name, value in row.items():
            assert logged[name] == pytest.approx(value, rel=1e-6), name
    return numbers, history


def gradients(dm, w):
    """Returns the gradients of all f_i at one model, [M, P], for `LeastSquares`."""
    x, y = dm.train_arrays()
    return np.einsum("mnd,mn->md", x, x @ w - y) / x.shape[1]


def distances(models, others):
    return float(np.linalg.norm(models - others, axis=1).mean())


# ---- least squares, where everything is known ---------------------------------------------------


@pytest.mark.parametrize("clients_at_once", [None, 2])
def test_a_method_with_one_model(tmp_path, clients_at_once):
    dm = LeastSquares(5, 12, 3, heterogeneity=2.0)
    algorithm = FedAvg(LinearRegression(3).double(), **FULL)
    # Everyone is measured, whoever takes part.
    loop = {"clients_per_round": 2, "clients_at_once": clients_at_once}
    numbers, history = measured(algorithm, dm, 4, tmp_path, **loop)
    truth = dm.true_models.numpy()
    solution, solutions = (a.numpy() for a in dm.solve(math.inf))
    for row, w in zip(numbers, history["w"], strict=True):
        everyone = np.tile(w, (5, 1))
        expected = {
            "train/global/gap": np.square(gradients(dm, w).mean(0)).sum(),
            "train/global/optimization_error": np.linalg.norm(w - solution),
            "train/personalized/optimization_error": distances(everyone, solutions),
            "train/global/total_error": np.linalg.norm(w - truth.mean(0)),
            "train/personalized/total_error": distances(everyone, truth),
            "train/global/statistical_error": np.linalg.norm(solution - truth.mean(0)),
            "train/personalized/statistical_error": distances(solutions, truth),
        }
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-10), name


def test_a_method_without_a_global_model(tmp_path):
    dm = LeastSquares(5, 12, 3, heterogeneity=2.0)
    algorithm = LocalTrain(LinearRegression(3).double(), **FULL)
    rows, models = Rows(), History()
    run(algorithm, dm, 3, root=tmp_path, callbacks=[Optimality(), rows, models])
    truth, alone = dm.true_models.numpy(), dm.solve(0.0)[1].numpy()
    for row, own in zip(rows.rows, models["w_i"], strict=True):
        expected = {
            "train/personalized/optimization_error": distances(own, alone),
            "train/personalized/total_error": distances(own, truth),
            "train/personalized/statistical_error": distances(alone, truth),
        }
        assert {k for k in row if is_ours(k)} == expected.keys()
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-10), name


def test_errors_fall_at_the_rate_of_gradient_descent(tmp_path):
    """One gradient step a round is gradient descent on mean f_i."""
    dm = LeastSquares(4, 12, 3, condition=3.0)
    settings = {**FULL, "local_steps": 1, "lr": 1.0}
    numbers, _ = measured(FedAvg(LinearRegression(3).double(), **settings), dm, 60, tmp_path)
    errors = [row["train/global/optimization_error"] for row in numbers]
    # Every eigenvalue of the mean Hessian is in [1/3, 1], so a round leaves 2/3 of the error.
    assert all(new <= 2 / 3 * old + 1e-14 for old, new in pairwise(errors))
    # And the gradient is at most as long as the error.
    gaps = [row["train/global/gap"] for row in numbers]
    assert all(gap <= error**2 + 1e-28 for gap, error in zip(gaps, errors, strict=True))
    for kind in ("global", "personalized"):
        name = f"train/{kind}/statistical_error"
        assert {row[name] for row in numbers} == {numbers[0][name]}
        assert numbers[-1][f"train/{kind}/total_error"] == pytest.approx(numbers[0][name], rel=1e-8)


class Tied(FedAvg):
    """FedAvg that claims to solve a problem whose λ grows: 1, 1, 2, 2, 3, ..."""

    @property
    def personalization_penalty(self):
        return float((self.rounds + 1) // 2)


def test_the_solution_follows_the_penalty(tmp_path, monkeypatch):
    dm, solve, calls = LeastSquares(4, 12, 3), LeastSquares.solve, []
    monkeypatch.setattr(
        LeastSquares, "solve", lambda self, penalty: calls.append(penalty) or solve(self, penalty)
    )
    numbers, history = measured(Tied(LinearRegression(3).double(), **FULL), dm, 4, tmp_path)
    assert calls == [1.0, 2.0]
    for row, w, penalty in zip(numbers, history["w"], (1.0, 1.0, 2.0, 2.0), strict=True):
        solution, own = (a.numpy() for a in solve(dm, penalty))
        error = row["train/global/optimization_error"]
        assert error == pytest.approx(np.linalg.norm(w - solution), rel=1e-10)
        error = row["train/personalized/optimization_error"]
        assert error == pytest.approx(distances(np.tile(w, (4, 1)), own), rel=1e-10)


class Other(FedAvg):
    """FedAvg that solves none of the coupled problems."""

    personalization_penalty = None


def test_a_method_of_another_problem_has_no_optimization_error(tmp_path):
    numbers, _ = measured(
        Other(LinearRegression(3).double(), **FULL), LeastSquares(4, 12, 3), 1, tmp_path
    )
    assert {name.rpartition("/")[2] for name in numbers[0]} == {"gap", "total_error"}


# ---- less is known ------------------------------------------------------------------------------


def test_a_problem_without_known_answers_has_a_gap(tmp_path):
    """Uniform over clients, though their sizes differ."""
    problem = least_squares((7, 2, 5, 3), bias=True)
    start = np.linspace(-1.0, 1.0, 8)
    numbers, history = measured(FedAvg(problem.network(start), **FULL), problem, 3, tmp_path)
    for row, w in zip(numbers, history["w"], strict=True):
        mean = np.mean([problem.gradient(i, w) for i in range(4)], 0)
        assert row == {"train/global/gap": pytest.approx(np.square(mean).sum(), rel=1e-10)}


class InPairs(Partitioner):
    """Two samples for each of the first clients."""

    def owners(self, targets, num_clients, rng):
        return np.arange(len(targets)) // 2

    def describe(self):
        return "in pairs"


def test_clients_without_samples_have_no_objective(tmp_path):
    x = torch.eye(3, dtype=torch.float64).repeat_interleave(2, 0)
    protocol = SplitOwn(test=0.0, validation=0.0)
    dm = TensorDataModule(x, x.sum(1), num_clients=5, partition=InPairs(), protocol=protocol)
    assert dm.client_sizes.tolist() == [2, 2, 2, 0, 0]
    network = LinearRegression(3).double()
    nn.init.zeros_(network.head.weight)
    settings = {**FULL, "lr": 1e-300}  # so the model stays at 0
    numbers, _ = measured(FedAvg(network, **settings), dm, 1, tmp_path)
    # Gradients at 0 are minus the three unit vectors: their mean has length 3^-1/2.
    assert numbers[0] == {"train/global/gap": pytest.approx(1 / 3)}


def test_separable_clients_have_no_solution_alone(tmp_path):
    dm = HeterogeneousLogistic(4, 30, 3)
    settings = dict(batch_size=None, lr=0.3)
    network = LogisticRegression(3, 2, bias=False).double()
    numbers, _ = measured(LocalTrain(copy.deepcopy(network), **settings), dm, 1, tmp_path / "alone")
    assert numbers[0].keys() == {"train/personalized/total_error"}
    numbers, _ = measured(FedAvg(network, **settings), dm, 1, tmp_path / "together")
    assert {f"train/global/{name}" for name in (*ERRORS, "gap")} < numbers[0].keys()


def test_models_are_compared_as_far_as_they_are_identified(tmp_path):
    """One vector added to all rows of the initial softmax model changes no number."""
    dm = HeterogeneousLogistic(4, 30, 3)
    network = LogisticRegression(3, 2, bias=False).double()
    shifted = LogisticRegression(3, 2, bias=False).double()
    shift = torch.tensor([3.0, -1.0, 2.0])
    shifted.load_state_dict({"head.weight": network.head.weight.detach() + shift})
    settings = dict(batch_size=None, lr=0.3)
    one, two = (
        measured(FedAvg(n, **settings), dm, 2, tmp_path / str(k))[0]
        for k, n in enumerate((network, shifted))
    )
    for row, other in zip(one, two, strict=True):
        assert row == {name: pytest.approx(value, rel=1e-9) for name, value in other.items()}


def test_agents_have_a_gap_of_the_penalized_objective(tmp_path):
    dm = AgentLogistic(3, 20, 4, "strong")
    settings = {"batch_size": None, "lr": 0.5, "loss": PenalizedCrossEntropy()}
    algorithm = FedAvg(PenalizedLogisticRegression(4).double(), **settings)
    numbers, history = measured(algorithm, dm, 2, tmp_path)
    x, y = dm.train_arrays()
    for row, w in zip(numbers, history["w"], strict=True):
        b = 2 * y - 1
        slopes = -b / (1 + np.exp(b * (x @ w)))
        gradient = np.einsum("mnd,mn->d", x, slopes) / y.size
        gradient += 0.1 * 2 * w / (1 + w**2) ** 2
        assert row["train/global/gap"] == pytest.approx(np.square(gradient).sum(), rel=1e-10)
        expected = distances(np.tile(w, (3, 1)), dm.true_models.numpy())
        assert row["train/personalized/total_error"] == pytest.approx(expected, rel=1e-10)
        assert "train/global/optimization_error" not in row


# ---- which rounds are measured, and side effects ------------------------------------------------


def test_rounds_in_between_are_left_out(tmp_path):
    dm = LeastSquares(3, 12, 3)
    numbers, _ = measured(FedAvg(LinearRegression(3).double(), **FULL), dm, 5, tmp_path, every=3)
    assert [bool(row) for row in numbers] == [False, False, True, False, True]
    rows = table(next(tmp_path.rglob("metrics.csv")))
    for row, expected in zip(rows, numbers, strict=True):
        written = {name: float(row[name]) for name in row if is_ours(name) and row[name]}
        assert written == expected


class Stop(pl.Callback):
    """In the third round."""

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.current_epoch == 2


def test_the_last_round_of_a_run_that_stops_early_is_measured(tmp_path):
    rows, algorithm = Rows(), FedAvg(LinearRegression(3).double(), **FULL)
    callbacks = [Stop(), Optimality(every=2), rows]
    run(algorithm, LeastSquares(3, 12, 3), 9, root=tmp_path, callbacks=callbacks)
    assert [any(map(is_ours, row)) for row in rows.rows] == [False, True, True]


def test_the_interval_is_at_least_one_round():
    with refused("every: 0", "at least 1"):
        Optimality(0)


def test_measuring_changes_nothing(tmp_path):
    """Neither running statistics nor the order of samples change."""

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    problem, results = least_squares((15, 10, 5), o=1), []
    for callbacks in ([], [Optimality()]):
        algorithm = FedAvg(network(), batch_size=5, lr=0.1, local_epochs=2)
        folder = tmp_path / str(len(callbacks))
        run(algorithm, problem, 3, root=folder, callbacks=callbacks)
        results.append((algorithm.state_dict(), algorithm.progress.samples))
    (plain, seen), (watched, seen_watched) = results
    assert seen == seen_watched
    assert plain.keys() == watched.keys()
    assert any("running_mean" in name for name in plain)
    for name, value in plain.items():
        assert torch.equal(watched[name], value), name


def test_a_network_of_another_size_is_refused(tmp_path):
    with refused("LinearRegression has 4 parameters", "LeastSquares have 3"):
        algorithm = FedAvg(LinearRegression(3, bias=True), **FULL)
        run(algorithm, LeastSquares(3, 12, 3), 1, root=tmp_path, callbacks=[Optimality()])
