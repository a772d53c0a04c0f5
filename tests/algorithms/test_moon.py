"""MOON against plain PyTorch, and its limits."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from pfl.algorithms import MOON, FedAvg
from tests.algorithms.class_world import (
    ENGINES,
    LABELS,
    LOCAL,
    TRACE,
    assert_rounds,
    assert_same_end,
    descend,
    entropy,
    mean_model,
    network,
    rate,
    samples,
    start,
    z_of,
)

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
        w = mean_model(cohort, models, w)
        history.append((w.numpy(), torch.stack(previous).numpy()))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    arguments = dict(contrast=CONTRAST, temperature=TEMPERATURE, batch_size=None)
    method = MOON(network(), engine=engine, **arguments, **LOCAL)
    assert_rounds(watch, method, slow(), "w", "previous")


@pytest.mark.parametrize(
    ("contrast", "rounds"), [(0.0, len(TRACE)), (5.0, 1)], ids=["no weight", "first round"]
)
def test_without_contrast_it_is_fedavg(fit, contrast, rounds):
    """Bit for bit with μ = 0, and without weight decay, which the one takes into the gradient and
    the other into a factor on w. In the first round z_w = z_p, and the two slopes cancel: to
    rounding, as each is added to the gradient by itself."""
    settings = LOCAL | dict(batch_size=2, engine="sequential", weight_decay=0.0)
    methods = MOON(network(), contrast=contrast, **settings), FedAvg(network(), **settings)
    assert_same_end(fit, *methods, TRACE[:rounds], atol=1e-13 if contrast else 0.0)
