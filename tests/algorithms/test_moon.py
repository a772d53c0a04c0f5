"""MOON against plain PyTorch, and its limits."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from pfl.algorithms import MOON, FedAvg
from tests.algorithms.class_world import (
    ENGINES,
    LABELS,
    LOCAL,
    TRACE,
    descend,
    entropy,
    mean_model,
    network,
    rate,
    samples,
    start,
    world,
    z_of,
)
from tests.problems import History

CONTRAST, TEMPERATURE = 2.0, 0.4


def cosines(a, b):
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


def slow():
    """w and all p_i after each round; the contrast as the cross entropy of two scores."""
    w, previous, history = start(), [start() for _ in LABELS], []
    for t, cohort in enumerate(TRACE):
        models = []
        for i in cohort:
            x, y = samples()[i]

            def loss(v, x=x, y=y, w=w, p=previous[i]):
                pair = [cosines(z_of(v, x), z_of(other, x)) for other in (w, p)]
                scores = torch.stack(pair, 1) / TEMPERATURE
                right = torch.zeros(len(x), dtype=torch.int64)
                return entropy(v, x, y) + CONTRAST * cross_entropy(scores, right)

            models.append(descend(w, loss, rate(t), LOCAL["local_steps"]))
        for i, v in zip(cohort, models, strict=True):
            previous[i] = v
        if cohort:
            w = mean_model(cohort, models)
        history.append((w.numpy(), torch.stack(previous).numpy()))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(fit, engine):
    history = History()
    arguments = dict(contrast=CONTRAST, temperature=TEMPERATURE, batch_size=None)
    method = MOON(network(), engine=engine, **arguments, **LOCAL)
    fit(method, world(), len(TRACE), callbacks=[history], trace=TRACE)
    for row, (w, previous) in zip(history.rounds, slow(), strict=True):
        np.testing.assert_allclose(row["w"], w, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row["previous"], previous, rtol=0, atol=1e-12)


def ends(fit, method, rounds):
    fit(method, world(), rounds, trace=TRACE[:rounds])
    return method.global_model


@pytest.mark.parametrize(
    ("contrast", "rounds"), [(0.0, len(TRACE)), (5.0, 1)], ids=["no weight", "first round"]
)
def test_without_contrast_it_is_fedavg(fit, contrast, rounds):
    """Bit for bit with μ = 0, and without weight decay, which the one takes into the gradient and
    the other into a factor on w. In the first round z_w = z_p, and the two slopes cancel: to
    rounding, as each is added to the gradient by itself."""
    settings = LOCAL | dict(batch_size=2, engine="sequential", weight_decay=0.0)
    actual = ends(fit, MOON(network(), contrast=contrast, **settings), rounds)
    expected = ends(fit, FedAvg(network(), **settings), rounds)
    if contrast:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    else:
        assert torch.equal(actual, expected)
