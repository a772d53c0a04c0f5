"""FedSpa against NumPy: masked steps, masks of constant size, bytes, and the limit in a mask."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from models import HalfSquaredError
from pfl import FederatedLoop
from pfl.algorithms import FedAvg, FedSpa
from pfl.algorithms.partial.fedspa import bits_of, packed, spread
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.methods import normalized_network, small_network, small_world
from tests.problems import History, least_squares, quiet, scalar_problem
from tests.refusal import refused

FULL = dict(batch_size=None, loss=HalfSquaredError())
START = np.linspace(-1, 1, 8)  # [o, d] = [2, 3] weights, and 2 biases
TRACE = [[0, 1, 2], [0, 2], [], [1, 2], [0, 1, 2]]
DENSITY, RATE = 0.7, 0.6  # int(0.7 * 8) = 5 values: 2 biases and 3 of 6 weights


@pytest.fixture
def problem():
    return least_squares((7, 4, 5), bias=True)


def fedspa(problem, **kwargs):
    arguments = dict(density=DENSITY, pruning_rate=RATE, pruning_rounds=4, lr=0.2, **FULL)
    return FedSpa(problem.network(START), **{**arguments, **kwargs})


def slow(problem, mask, trace, *, steps, lr, lr_decay=1.0, weight_decay=0.0):
    """Algorithm and masks in plain loops: w and the masks [M, P] after every round."""
    w, masks = START.copy(), {i: mask.copy() for i in range(problem.num_clients)}
    for number, cohort in enumerate(trace):
        rate = RATE / 2 * (1 + math.cos(math.pi * min(1, number / 4)))
        eta, updates = lr * lr_decay**number, []
        for i in cohort:
            m = masks[i]
            v = w * m
            for _ in range(steps):
                v = v - eta * m * (problem.gradient(i, v) + weight_decay * v)
            updates.append(w * m - v)
            gradient = problem.gradient(i, v)
            weights = [j for j in range(6) if m[j]]  # the biases stay
            leaving = sorted(weights, key=lambda j: abs(v[j]))[: math.ceil(rate * len(weights))]
            new = m.copy()
            new[leaving] = 0
            outside = [j for j in range(6) if not new[j]]
            new[sorted(outside, key=lambda j: -abs(gradient[j]))[: len(leaving)]] = 1
            masks[i] = new
        if updates:
            w = w - np.mean(updates, 0)
        yield w.copy(), np.array([masks[i] for i in range(problem.num_clients)])


@pytest.mark.parametrize(
    "settings",
    [
        {"local_steps": 1},
        {"local_steps": 3, "lr_decay": 0.8},
        {"local_epochs": 2, "weight_decay": 0.3},
    ],
    ids=str,
)
def test_rounds_equal_the_numpy_loop(watch, problem, settings):
    algorithm = fedspa(problem, **settings)
    history = watch(algorithm, problem, len(TRACE), trace=TRACE)
    first = algorithm.initial_mask().numpy()
    steps = settings.get("local_steps", settings.get("local_epochs"))
    rates = {k: v for k, v in settings.items() if k in ("lr_decay", "weight_decay")}
    masks = []
    for row, (w, mask) in zip(
        history.rounds, slow(problem, first, TRACE, steps=steps, lr=0.2, **rates), strict=True
    ):
        np.testing.assert_allclose(row["w"], w, rtol=0, atol=1e-12)
        masks.append(bits_of(torch.from_numpy(row["mask"]), 8).numpy())
        np.testing.assert_array_equal(masks[-1], mask)
        assert (masks[-1].sum(1) == 5).all() and (masks[-1][:, 6:] == 1).all()
    assert any((mask != first).any() for mask in masks), "no mask has changed"
    for clients in algorithm.iter_clients():
        expected = row["w"] * masks[-1][clients.ids]
        np.testing.assert_array_equal(algorithm.personalized(clients).numpy(), expected)


def test_a_client_without_samples_keeps_its_mask(watch, problem):
    """All other masks change in the same round. U_i is 0 where nothing is trained."""
    sparse = fedspa(problem)
    data = reference.with_an_idle_client(problem)
    history = watch(sparse, data, 1, trace=[[0, 1, 2, 3]])
    first = sparse.initial_mask().numpy()
    masks = bits_of(torch.from_numpy(history["mask"][0]), 8).numpy()
    assert (masks != first).any(1).tolist() == [True, True, True, False]
    (w, _) = next(slow(problem, first, [[0, 1, 2]], steps=1, lr=0.2))
    np.testing.assert_allclose(history["w"][0] - START, 3 / 4 * (w - START), rtol=0, atol=1e-12)


def test_the_density_is_exact_in_every_layer_after_every_round(tmp_path):
    """Mini-batches, BatchNorm: the counts of `spread`, all through."""
    history = History()
    method = FedSpa(
        normalized_network(), density=0.6, loss=HalfSquaredError(), batch_size=2, local_epochs=2
    )
    trainer = quiet(tmp_path, 3, history, precision="64-true")
    trainer.fit(method, datamodule=FederatedLoop(small_world()))
    for row in history.rounds:
        masks = bits_of(torch.from_numpy(row["mask"]), method.space.size)
        assert (masks.sum(1) == int(0.6 * method.space.size)).all()
        for layer, count in zip(method.prunable, method.counts, strict=True):
            assert (masks[:, layer.span].sum(1) == count).all()


def test_one_mask_and_every_value_in_it_is_fedavg(fit, problem):
    """Density 1: w * m = w, and U_i = w - v_i."""
    sparse = FedSpa(problem.network(START), density=1.0, **FULL)
    dense = FedAvg(problem.network(START), weighting="uniform", **FULL)
    for method in (sparse, dense):
        fit(method, problem, 3, trace=TRACE[:3])
    torch.testing.assert_close(sparse.global_model, dense.global_model, rtol=0, atol=1e-12)


def test_the_limit_in_a_mask_that_stays(fit, problem):
    """pruning_rate 0. With one step w_p - η mean_i m_p grad_p f_i = w_p: in the mask the mean
    gradient at w * m is 0; outside of it w is what it was."""
    algorithm = fedspa(problem, pruning_rate=0.0, local_steps=1)
    fit(algorithm, problem, 400)
    w, mask = algorithm.global_model.numpy(), algorithm.initial_mask().numpy()
    mean = np.mean([problem.gradient(i, w * mask) for i in range(3)], axis=0)
    np.testing.assert_allclose(mask * mean, 0, atol=1e-10)
    assert (w[mask == 0] == START[mask == 0]).all() and (mask == 0).any()


def test_gradients_are_counted_with_those_of_the_masks(fit):
    """5 samples in batches of 2: 3 steps over 5 samples, and one batch of 2 for the mask."""
    problem = least_squares((5,), bias=True)
    algorithm = fedspa(problem, batch_size=2, local_epochs=1)
    fit(algorithm, problem, 1)
    assert algorithm.row["train/samples"] == 5 + 2


@pytest.mark.parametrize(
    ("shapes", "total", "even", "expected"),
    [
        ([(8, 64), (10, 8)], 296, True, [256, 40]),  # half of 512 and of 80
        ([(8, 64), (10, 8)], 296, False, [237, 59]),  # 296 * 72 / 90 = 236.8, 296 * 18 / 90 = 59.2
        ([(2, 2), (40, 40)], 404, False, [4, 400]),  # 404 * 4 / 84 > 4: full; the rest
        ([(3, 1), (3, 1)], 5, True, [3, 2]),  # 2.5 each: the first gets one more
        ([(16, 3, 3, 3), (5, 16)], 256, False, [176, 80]),  # 256 * 21 / 46 > 80: full; the rest
    ],
)
def test_values_are_spread_over_the_layers(shapes, total, even, expected):
    assert spread(shapes, total, even=even) == expected


def test_masks_are_packed_without_loss():
    """13 values are 2 numbers, whole and below 256: exact even in bfloat16."""
    mask = (torch.rand(50, 13) < 0.5).float()
    numbers = packed(mask)
    assert numbers.shape == (50, 2)
    assert torch.equal(numbers.bfloat16().float(), numbers)
    assert torch.equal(bits_of(numbers.bfloat16(), 13).float(), mask)


def test_the_only_weight_stays(fit):
    """Nothing can take the place of a value where all are in the mask."""
    problem = scalar_problem([1.0, 2.0])
    algorithm = FedSpa(problem.network(0.5), density=1.0, pruning_rounds=2, **FULL)
    fit(algorithm, problem, 2)
    assert algorithm.client_rows("mask", np.arange(2)).tolist() == [[1.0], [1.0]]


def test_a_network_without_matrices_is_refused():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.scale

    with refused("model.density: 0.5"):
        FedSpa(Scale())
    assert FedSpa(small_network(), density=0.5).values == 13


def test_bytes_are_the_values_in_the_mask_and_a_bit_for_each_weight(watch, problem):
    """5 float64 values each way, and 6 bits, which are a byte."""
    history = watch(fedspa(problem), problem, 2, trace=[[0, 1], [1]])
    assert history["down"].tolist() == [[40, 40, 0], [40, 80, 0]]
    assert history["up"].tolist() == [[41, 41, 0], [41, 82, 0]]
