"""The examples with which claims of FedPD's, FedSLR's and FedACS's papers are measured."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from datamodules import LeastSquares
from models import HalfSquaredError, LinearRegression
from pfl.algorithms import SCAFFOLD, FedAvg, FedPD
from tests.algorithms import reference

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("steps", [2, 7])
@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD, FedPD])
def test_a_round_reaches_one_more_coordinate_of_the_chain(watch, method, steps):
    """Where x_{j-1} = 0, Ψ(±x_{j-1}) and Ψ'(±x_{j-1}) are 0, so that no gradient moves x_j. The
    agent that moves x_{j-1} lacks term j: it cannot go on in the same round. (FedPD's first step
    only takes over what the others found.)"""
    chain = example("chain")
    settings = dict(batch_size=None, local_steps=steps, lr=0.02, loss=chain.Value())
    history = watch(method(chain.Chain(5).double(), **settings), chain.Agents(2), 6)
    assert np.count_nonzero(history["w"], axis=1).tolist() == [1, 2, 3, 4, 5, 5]


def test_the_mean_of_the_agents_is_the_chain():
    """With x = 1 everywhere: -Ψ(1) Φ(1) for each of the five terms, and Ψ(-1) = 0."""
    chain = example("chain")
    network = chain.Chain(5).double()
    torch.nn.init.ones_(network.x)
    values = network(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    assert values.shape == (2, 1)
    expected = -5 * (1 - np.exp(-1)) * 3 * np.pi  # Φ(1) = 4 π/4 + 2π
    assert values.mean().item() == pytest.approx(expected, rel=1e-12)


def test_the_last_rounds_of_falling_fedpd_communicate_most(fit):
    """Round r of T communicates with the probability r/T: of 200 rounds 100.5, and 75.25 of the
    last 100, with the deviations (T/6)^1/2 = 5.8 and (T/12)^1/2 = 4.1. A fair coin has 50 there."""
    network, problem = LinearRegression(in_features=2).double(), LeastSquares(2, 2, features=2)
    settings = dict(loss=HalfSquaredError(), batch_size=None, skip_probability=0.5)
    algorithm = fit(example("falling").FallingFedPD(network, **settings), problem, 200)
    talks = [algorithm.communicates(k) for k in range(200)]
    assert talks[-1]
    assert abs(sum(talks) - 100.5) < 4.5 * 5.8 and abs(sum(talks[100:]) - 75.25) < 4.5 * 4.1


def test_the_distance_from_low_rank_optimality():
    """f = |W - A|²/2 has the minimum SVT_λ(A) with λ |W|_*. At λ + δ each of its singular values
    is δ away, and what A has outside, at most λ, is allowed; at λ - δ the outside adds its own."""
    distance = example("low_rank_sparse").distance
    a, penalty, delta = np.random.default_rng(0).normal(size=(6, 6)), 2.0, 0.3
    w = reference.svt(a, penalty)
    values = np.linalg.svd(a)[1]
    rank, below = int((values > penalty).sum()), values[values <= penalty]
    assert 0 < rank < 6
    expected = {
        penalty: 0.0,
        penalty + delta: rank * delta**2,
        penalty - delta: rank * delta**2
        + (below - penalty + delta).clip(min=0) @ (below - penalty + delta).clip(min=0),
    }
    for value, gap in expected.items():
        found = distance(torch.from_numpy(w), torch.from_numpy(w - a), value)
        assert found == (pytest.approx(gap, abs=1e-12), rank)


@pytest.mark.parametrize(("rank", "expected"), [(2, [4, 3, 0, 0]), (3, [4, 3.5, 3, 0])])
def test_the_planted_parts(rank, expected):
    """True models are of low rank plus what `sparse` says; noiseless targets are theirs. Another
    seed draws other parts."""
    kind = example("low_rank_sparse").LowRankSparse
    problem, other = (kind(3, noise=0.0, samples=20, rank=rank, seed=seed) for seed in (0, 1))
    assert (problem.sparse(0) != other.sparse(0)).any()
    for client, model in enumerate(problem.true_models.view(3, 12, 12).numpy()):
        common = model - problem.sparse(client)
        values = np.linalg.svd(common)[1][:4]
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)
        inputs, targets = problem.draw(client)
        np.testing.assert_allclose(targets, inputs @ model.T, rtol=0, atol=1e-12)
        eigenvalues = np.linalg.eigvalsh(inputs.T @ inputs / 20)
        np.testing.assert_allclose(eigenvalues[[0, -1]], [0.25, 1], rtol=0, atol=1e-12)


def test_the_attention_step_interpolates():
    """α = 0 leaves every model where it is, α = 1 is FedACS's own mixture; 0.25 is a quarter of the
    way."""
    kind = example("attention_step").AttentionStep
    models = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 3)))
    mixed = {}
    for step in (0.0, 0.25, 1.0):
        method = kind(LinearRegression(3), attention_step=step, quantile=None)
        mixed[step] = (method.mixing_weights(models, 0) @ models).numpy()
    np.testing.assert_allclose(mixed[0.0], models, rtol=0, atol=1e-12)
    unit = models.numpy() / np.linalg.norm(models, axis=1, keepdims=True)
    weights = (unit @ unit.T).clip(min=0)
    expected = weights / weights.sum(1, keepdims=True) @ models.numpy()
    np.testing.assert_allclose(mixed[1.0], expected, rtol=0, atol=1e-10)
    quarter = models.numpy() + 0.25 * (expected - models.numpy())
    np.testing.assert_allclose(mixed[0.25], quarter, rtol=0, atol=1e-10)


def test_the_attention_gap(fit):
    """The mean of |X'(Xw - y)/n + 2 (w - sum_j a_ij w_j)|² over the clients' last models."""
    module, data, last = example("attention_step"), LeastSquares(4, features=3), {}
    settings = dict(attention_step=0.5, quantile=None, lr=0.1, local_steps=1, batch_size=None)
    method = module.AttentionStep(LinearRegression(3).double(), loss=HalfSquaredError(), **settings)

    class Last(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            last.update(pl_module.row)

    fit(method, data, 3, callbacks=[module.AttentionGap(2.0), Last()])
    w = method.store.read("w", np.arange(4)).numpy()
    unit = w / np.linalg.norm(w, axis=1, keepdims=True)
    weights = (unit @ unit.T).clip(min=0)
    slopes = []
    for client in range(4):
        x, y = data.draw(client)
        slopes.append(x.T @ (x @ w[client] - y) / len(y))
    total = np.array(slopes) + 2 * (w - weights / weights.sum(1, keepdims=True) @ w)
    expected = np.square(total).sum(1).mean()
    assert last["train/personalized/attention_gap"] == pytest.approx(expected, rel=1e-8)
