"""FedDBE against plain PyTorch, its limit, and refusals."""

import numpy as np
import pytest
import torch
from torch import nn

from pfl.algorithms import FedAvg, FedDBE
from tests.algorithms.class_world import (
    BODY,
    ENGINES,
    FEATURES,
    LOCAL,
    SIZE,
    TRACE,
    assert_rounds,
    assert_same_end,
    mean_model,
    network,
    rate,
    samples,
    scores,
    start,
    world,
    z_of,
)
from tests.refusal import refused

PENALTY, MOMENTUM, DECAY = 3.0, 0.7, LOCAL["weight_decay"]
ARGUMENTS = dict(penalty=PENALTY, momentum=MOMENTUM, batch_size=None) | LOCAL


def slow():
    """w, all m_i and r after each round; autograd of the features plus m_i, and of the penalty."""
    w, memories, common, history = start(), torch.zeros(4, FEATURES).double(), None, []
    for t, cohort in enumerate(TRACE):
        models, means = [], []
        for i in cohort:
            x, y = samples()[i]
            v, m, running = w, memories[i], torch.zeros(FEATURES).double()
            for _ in range(LOCAL["local_steps"]):
                v, m = v.clone().requires_grad_(), m.clone().requires_grad_()
                z = z_of(v, x)
                running = (1 - MOMENTUM) * running.detach() + MOMENTUM * z.mean(0)
                loss = nn.functional.cross_entropy(scores(z + m, v[BODY:]), y)
                if common is not None:
                    loss = loss + PENALTY / 2 * ((running - common) ** 2).mean()
                g, g_m = torch.autograd.grad(loss, [v, m])
                v = v.detach() - rate(t) * (g + DECAY * v.detach())
                if common is not None:
                    m = m.detach() - rate(t) * (g_m + DECAY * m.detach())
                m = m.detach()
            models.append(v)
            means.append(running.detach())
            memories[i] = m
        w = mean_model(cohort, models, w)
        common = mean_model(cohort, means, None) if common is None else common
        history.append((w.numpy(), memories.clone().numpy(), np.array([1, *common])))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    method = FedDBE(network(), engine=engine, **ARGUMENTS)
    assert_rounds(watch, method, slow(), "w", "memory", "mean")
    # Personalized: the scores of features to which the memory is added.
    w, memories, _ = map(torch.from_numpy, slow()[-1])
    (clients,) = method.iter_clients("train")
    for i, model in zip(clients.ids, method.personalized(clients), strict=True):
        z = z_of(w, samples()[i][0])
        expected, actual = scores(z + memories[i], w[BODY:]), scores(z, model[BODY:])
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_the_first_round_is_fedavg(fit):
    settings = LOCAL | dict(batch_size=2, engine="sequential", weight_decay=0.0)
    methods = FedDBE(network(), **settings), FedAvg(network(), **settings)
    assert_same_end(fit, *methods, [[0, 1, 3]], atol=1e-14)


def test_padding_is_not_in_the_mean_of_the_features(watch):
    """The mean r after one round of single epochs: the last batches are of unequal size."""
    settings = dict(lr=1e-300, batch_size=4, local_epochs=1, momentum=1.0)
    history = watch(FedDBE(network(), **settings), world(), 1, trace=[[1, 3]])
    each = [z_of(start(), samples()[i][0]).mean(0) for i in (1, 3)]
    expected = (3 * each[0] + 2 * each[1]) / 5
    np.testing.assert_allclose(history["mean"][0], [1, *expected], rtol=0, atol=1e-12)


def test_the_ledger_books_the_mean_once_it_is_known(watch):
    """8 bytes a number; the first two clients send it, the others of later rounds receive it."""
    history = watch(FedDBE(network(), batch_size=None), world(), 3, trace=[[2, 3], [], [0, 2]])
    up, down = ([SIZE, 0, 2 * SIZE + FEATURES, SIZE + n] for n in (FEATURES, 0))
    down[0] += FEATURES
    assert np.array_equal(history["up"][-1], 8 * np.array(up))
    assert np.array_equal(history["down"][-1], 8 * np.array(down))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_clients_without_samples_give_no_mean(watch, weighting):
    method = FedDBE(network(), weighting=weighting, **LOCAL)
    history = watch(method, world(5), 2, trace=[[4], [0, 4]])
    assert not history["mean"][0].any()
    assert history["mean"][1][0] == 1
    assert not history["memory"][1].any()


def test_a_head_without_a_bias_is_refused():
    with refused("model.network: the head '1' needs a weight and a bias that are trained; FedDBE"):
        FedDBE(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False)))
