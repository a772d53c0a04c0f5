"""FedProto against plain PyTorch, its bytes, and its limit."""

from itertools import chain

import numpy as np
import torch

from pfl.algorithms import FedProto, LocalTrain
from tests.algorithms.class_world import (
    CLASSES,
    ENGINES,
    FEATURES,
    KNOWN,
    LABELS,
    LOCAL,
    TRACE,
    descend,
    entropy,
    network,
    rate,
    samples,
    start,
    world,
    z_of,
)
from tests.problems import Models

PENALTY = 0.8


def slow():
    """The prototypes by class, and all w_i, after each round."""
    known, models, history = {}, [start() for _ in LABELS], []
    for t, cohort in enumerate(TRACE):
        for i in cohort:
            x, y = samples()[i]

            def loss(v, x=x, y=y):
                away = sum(
                    ((z - known[int(c)]) ** 2).sum() / FEATURES
                    for z, c in zip(z_of(v, x), y, strict=True)
                    if int(c) in known
                )
                return entropy(v, x, y) + PENALTY * away / len(x)

            models[i] = descend(models[i], loss, rate(t), LOCAL["local_steps"])
        # The mean over all samples of the cohort that are of the class.
        for label in set(chain(*(LABELS[i] for i in cohort))):
            own = [z_of(models[i], samples()[i][0])[samples()[i][1] == label] for i in cohort]
            known[label] = torch.cat(own).mean(0)
        history.append((dict(known), torch.stack(models).numpy()))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(fit, engine):
    history = Models()
    method = FedProto(network(), penalty=PENALTY, batch_size=None, engine=engine, **LOCAL)
    fit(method, world(), len(TRACE), callbacks=[history], trace=TRACE)
    for row, (known, models) in zip(history.rounds, slow(), strict=True):
        np.testing.assert_allclose(row["w_i"], models, rtol=0, atol=1e-12)
        for label in range(CLASSES):
            flag, values = row["prototypes"][label, 0], row["prototypes"][label, 1:]
            assert flag == (label in known)
            expected = known.get(label, torch.zeros(FEATURES))
            np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)


def test_the_ledger_books_known_prototypes_and_the_classes_of_a_client(fit):
    """Numbers of 8 bytes. Down 3 features and the class's number for each known class. Up
    3 features, the number of the class and that of its samples for each of the client's classes."""
    history = Models()
    fit(FedProto(network(), batch_size=None), world(), 6, callbacks=[history], trace=TRACE)
    classes = np.array([len(set(labels)) for labels in LABELS])
    visits = np.array([[i in cohort for i in range(4)] for cohort in TRACE])
    assert np.array_equal(history["up"], 8 * 5 * classes * visits.cumsum(0))
    assert np.array_equal(history["down"], 8 * 4 * (visits.T * KNOWN).T.cumsum(0))


def test_no_penalty_is_local_training(fit):
    """Bit for bit, also with mini-batches; without weight decay, which the one takes into the
    gradient and the other into a factor on w."""
    settings = LOCAL | dict(batch_size=2, engine="sequential", weight_decay=0.0)
    runs = [FedProto(network(), penalty=0.0, **settings), LocalTrain(network(), **settings)]
    actual, expected = (
        fit(method, world(), 6, trace=TRACE).client_rows("w", np.arange(4)) for method in runs
    )
    assert torch.equal(actual, expected)


def test_a_client_without_samples_changes_nothing(fit):
    """A round of it alone keeps its model and all prototypes."""
    history = Models()
    fit(FedProto(network(), **LOCAL), world(5), 2, callbacks=[history], trace=[[0, 1], [4]])
    one, two = history.rounds
    assert np.array_equal(two["prototypes"], one["prototypes"])
    assert np.array_equal(two["w_i"], one["w_i"])
    assert np.array_equal(two["w_i"][4], start())
    assert two["up"][4] == 0
