"""LG-FedAvg against NumPy, and against FedPer, of which it is the exchange of the parts."""

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Dirichlet
from models import HalfSquaredError
from pfl.algorithms import FedPer, LGFedAvg
from tests.algorithms import two_layers

FULL = dict(batch_size=None, loss=HalfSquaredError())
TRACE = [[0, 1, 2], [0, 2], [], [2], [0, 1]]  # client 3 never takes part
BODY = two_layers.BODY


def slow(data, w, *, lr, lr_decay, weight_decay, steps, uniform):
    """The head and all bodies after each round: bodies stay, heads are averaged."""
    bodies, head, history = np.tile(w[:BODY], (data.num_clients, 1)), w[BODY:].copy(), []
    for t, cohort in enumerate(TRACE):
        total, weights = np.zeros_like(head), 0.0
        for i in cohort:
            v = np.concatenate([bodies[i], head])
            for _ in range(steps):
                g = two_layers.gradient(data, i, v) + weight_decay * v
                v = v - lr * lr_decay**t * g
            bodies[i] = v[:BODY]
            weight = 1.0 if uniform else data.sizes[i]
            total, weights = total + weight * v[BODY:], weights + weight
        head = total / weights if cohort else head
        history.append((head.copy(), bodies.copy()))
    return history


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_rounds_equal_the_numpy_loop(watch, weighting):
    data, w = two_layers.problem((7, 4, 5, 3)), two_layers.start()
    settings = dict(lr=0.2, lr_decay=0.9, weight_decay=0.1)
    method = LGFedAvg(data.network(w), local_epochs=3, weighting=weighting, **settings, **FULL)
    history = watch(method, data, len(TRACE), trace=TRACE)
    expected = slow(data, w, steps=3, uniform=weighting == "uniform", **settings)
    for row, (head, bodies) in zip(history.rounds, expected, strict=True):
        np.testing.assert_allclose(row["w"][BODY:], head, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row["head"], bodies, rtol=0, atol=1e-12)
        assert np.array_equal(row["w"][:BODY], w[:BODY])  # the initial body, for whoever comes late
    head, bodies = expected[-1]
    for clients in method.iter_clients():
        models = np.hstack([bodies[clients.ids], np.tile(head, (len(clients), 1))])
        np.testing.assert_allclose(method.personalized(clients), models, rtol=0, atol=1e-12)
        assert torch.equal(method.newcomer(clients), method.personalized(clients))


def test_it_is_fedper_with_the_parts_exchanged(watch):
    data, w, results = two_layers.problem((7, 4, 5, 3)), two_layers.start(), []
    for kind, extra in ((LGFedAvg, {}), (FedPer, {"personal": "body"})):
        method = kind(data.network(w), lr=0.2, local_steps=2, **extra, **FULL)
        history = watch(method, data, len(TRACE), trace=TRACE)
        results.append(history)
    for name in ("w", "head", "down", "up"):
        assert np.array_equal(results[0][name], results[1][name])


def normalized():
    """A body with running statistics."""
    layers = (nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 10))
    return nn.Sequential(*layers)


def test_statistics_stay_with_their_bodies(fit):
    """Those of the server are the initial ones, and so are those of a client that never trained.
    The 6 * 10 + 10 values of the head are sent, 8 bytes each."""
    torch.manual_seed(0)
    method = LGFedAvg(normalized(), lr=0.05, batch_size=40)
    fit(method, DigitsDataModule(4, Dirichlet(1.0)), 2, trace=[[0, 1, 3], [1]], evaluate=())
    for counts in (method.progress.ledger.downlink, method.progress.ledger.uplink):
        assert counts.tolist() == [8 * 70, 2 * 8 * 70, 0, 8 * 70]
    initial = method.oracle.buffers.read(normalized(), method.global_model)
    rows = method.client_rows("buffers", np.arange(4))
    assert torch.equal(method.oracle.buffers.read(method.network, initial), initial)
    assert torch.equal(rows[2], initial)
    assert len(rows.unique(dim=0)) == 4
