"""FedLC against plain PyTorch, and FedAvg where nothing is calibrated."""

import torch

from pfl.algorithms import FedAvg, FedLC
from tests.algorithms.class_world import (
    CLASSES,
    ENGINES,
    LABELS,
    LOCAL,
    SIZE,
    assert_rounds,
    assert_same_end,
    averaged,
    network,
    start,
    world,
    z_of,
)

CALIBRATION = 0.6


def calibrated_loss(v, x, y, labels, tau):
    """The mean of log sum_c exp((s_c - s_y) - (m_c - m_y)), with the margins of the labels."""
    a, c = v[-CLASSES * 4 : -CLASSES].view(CLASSES, 3), v[-CLASSES:]
    total = 0.0
    for z, label in zip(z_of(v, x), y.tolist(), strict=True):
        terms = 0.0
        for other in range(CLASSES):
            ahead = (a[other] - a[label]) @ z + c[other] - c[label]
            margin = [tau / max(labels.count(k), 1e-8) ** 0.25 for k in (other, label)]
            terms = terms + torch.exp(ahead - margin[0] + margin[1])
        total = total + torch.log(terms)
    return total / len(y)


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    method = FedLC(network(), calibration=CALIBRATION, batch_size=None, engine=engine, **LOCAL)
    slow = averaged(lambda v, x, y, i, w: calibrated_loss(v, x, y, LABELS[i], CALIBRATION))
    assert_rounds(watch, method, slow, "w")


def test_without_calibration_it_is_fedavg(fit):
    """Bit for bit, with mini-batches."""
    settings = LOCAL | dict(batch_size=2)
    methods = FedLC(network(), calibration=0.0, **settings), FedAvg(network(), **settings)
    assert_same_end(fit, *methods)


def test_scores_of_absent_classes_are_left_alone(fit):
    """The client of class 1 alone: its loss is log(1 + exp(-100 τ) ...), and nothing moves."""
    method = FedLC(network(), calibration=1.0, batch_size=None, **LOCAL | dict(weight_decay=0.0))
    fit(method, world(), 1, trace=[[2]])
    torch.testing.assert_close(method.global_model, start(), rtol=0, atol=1e-13)
    assert len(method.global_model) == SIZE
