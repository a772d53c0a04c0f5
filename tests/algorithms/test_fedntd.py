"""FedNTD against plain PyTorch, and FedAvg where nothing is distilled."""

import numpy as np
import torch

from pfl.algorithms import FedAvg, FedNTD
from tests.algorithms.class_world import (
    BODY,
    CLASSES,
    ENGINES,
    FEATURES,
    LOCAL,
    TRACE,
    averaged,
    entropy,
    network,
    world,
    z_of,
)
from tests.problems import History

DISTILLATION, TEMPERATURE = 3.0, 0.4


def not_true(w, x, label):
    """q of one sample by a model w: a softmax of the scores of the other classes."""
    a, c = w[BODY:-CLASSES].view(CLASSES, FEATURES), w[-CLASSES:]
    scores = (a @ z_of(w, x[None])[0] + c) / TEMPERATURE
    others = [scores[k] for k in range(CLASSES) if k != label]
    return torch.softmax(torch.stack(others), 0)


def distilled_loss(v, x, y, i, w):
    away = 0.0
    for sample, label in zip(x, y.tolist(), strict=True):
        p, q = not_true(w, sample, label), not_true(v, sample, label)
        away = away + (p * torch.log(p / q)).sum()
    return entropy(v, x, y) + DISTILLATION * away / len(x)


@ENGINES
def test_rounds_equal_plain_pytorch(fit, engine):
    history = History()
    arguments = dict(distillation=DISTILLATION, temperature=TEMPERATURE, batch_size=None)
    method = FedNTD(network(), engine=engine, **arguments, **LOCAL)
    fit(method, world(), len(TRACE), callbacks=[history], trace=TRACE)
    np.testing.assert_allclose(history["w"], averaged(distilled_loss), rtol=0, atol=1e-12)


def test_without_distillation_it_is_fedavg(fit):
    """Bit for bit, with mini-batches."""
    settings = LOCAL | dict(batch_size=2)
    methods = FedNTD(network(), distillation=0.0, **settings), FedAvg(network(), **settings)
    for method in methods:
        fit(method, world(), 5, trace=TRACE[:5])
    assert torch.equal(methods[0].global_model, methods[1].global_model)


def test_the_first_step_is_that_of_fedavg(fit):
    """At w_i = w the divergence has its minimum, 0, and no slope."""
    settings = LOCAL | dict(local_steps=1, batch_size=None)
    methods = FedNTD(network(), distillation=9.0, **settings), FedAvg(network(), **settings)
    for method in methods:
        fit(method, world(), 1, trace=[[0, 1, 2]])
    both = [method.global_model for method in methods]
    torch.testing.assert_close(*both, rtol=0, atol=1e-14)
