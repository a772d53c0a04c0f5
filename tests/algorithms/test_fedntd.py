"""FedNTD against plain PyTorch, and FedAvg where nothing is distilled."""

import torch

from pfl.algorithms import FedAvg, FedNTD
from tests.algorithms.class_world import (
    BODY,
    CLASSES,
    ENGINES,
    LOCAL,
    assert_rounds,
    assert_same_end,
    averaged,
    entropy,
    network,
    scores,
    z_of,
)

DISTILLATION, TEMPERATURE = 3.0, 0.4


def not_true(w, x, label):
    """q of one sample by a model w: a softmax of the scores of the other classes."""
    own = scores(z_of(w, x), w[BODY:]) / TEMPERATURE
    return torch.softmax(torch.stack([own[k] for k in range(CLASSES) if k != label]), 0)


def distilled_loss(v, x, y, i, w):
    away = 0.0
    for sample, label in zip(x, y.tolist(), strict=True):
        p, q = not_true(w, sample, label), not_true(v, sample, label)
        away = away + (p * torch.log(p / q)).sum()
    return entropy(v, x, y) + DISTILLATION * away / len(x)


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    arguments = dict(distillation=DISTILLATION, temperature=TEMPERATURE, batch_size=None)
    method = FedNTD(network(), engine=engine, **arguments, **LOCAL)
    assert_rounds(watch, method, averaged(distilled_loss), "w")


def test_without_distillation_it_is_fedavg(fit):
    """Bit for bit, with mini-batches."""
    settings = LOCAL | dict(batch_size=2)
    methods = FedNTD(network(), distillation=0.0, **settings), FedAvg(network(), **settings)
    assert_same_end(fit, *methods)


def test_the_first_step_is_that_of_fedavg(fit):
    """At w_i = w the divergence has its minimum, 0, and no slope."""
    settings = LOCAL | dict(local_steps=1, batch_size=None)
    methods = FedNTD(network(), distillation=9.0, **settings), FedAvg(network(), **settings)
    assert_same_end(fit, *methods, [[0, 1, 2]], atol=1e-14)
