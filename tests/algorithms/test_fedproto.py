"""FedProto against plain PyTorch, its bytes, and its limit."""

from functools import partial

import numpy as np
import torch

from pfl.algorithms import FedProto, LocalTrain
from tests.algorithms.class_world import (
    ENGINES,
    KNOWN,
    LABELS,
    LOCAL,
    TRACE,
    as_sent,
    assert_rounds,
    class_means,
    descend,
    near_means,
    network,
    rate,
    samples,
    start,
    world,
)

PENALTY = 0.8


def slow():
    """The prototypes by class, and all w_i, after each round."""
    known, models, history = {}, [start() for _ in LABELS], []
    for t, cohort in enumerate(TRACE):
        for i in cohort:
            x, y = samples()[i]
            loss = partial(near_means, x=x, y=y, known=known, penalty=PENALTY)
            models[i] = descend(models[i], loss, rate(t), LOCAL["local_steps"])
        known |= class_means(cohort, models)
        history.append((as_sent(known), torch.stack(models).numpy()))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    method = FedProto(network(), penalty=PENALTY, batch_size=None, engine=engine, **LOCAL)
    assert_rounds(watch, method, slow(), "prototypes", "w_i")


def test_the_ledger_books_known_prototypes_and_the_classes_of_a_client(watch):
    """Numbers of 8 bytes. Down 3 features and the class's number for each known class. Up
    3 features, the number of the class and that of its samples for each of the client's classes."""
    history = watch(FedProto(network(), batch_size=None), world(), 6, trace=TRACE)
    classes = np.array([len(set(labels)) for labels in LABELS])
    visits = np.array([[i in cohort for i in range(4)] for cohort in TRACE])
    assert np.array_equal(history["up"], 8 * 5 * classes * visits.cumsum(0))
    assert np.array_equal(history["down"], 8 * 4 * (visits.T * KNOWN).T.cumsum(0))


def test_no_penalty_is_local_training(watch):
    """Bit for bit, also with mini-batches; without weight decay, which the one takes into the
    gradient and the other into a factor on w."""
    settings = LOCAL | dict(batch_size=2, engine="sequential", weight_decay=0.0)
    methods = FedProto(network(), penalty=0.0, **settings), LocalTrain(network(), **settings)
    ends = [watch(method, world(), 6, trace=TRACE)["w_i"][-1] for method in methods]
    assert np.array_equal(*ends)


def test_a_client_without_samples_changes_nothing(watch):
    """A round of it alone keeps its model and all prototypes."""
    history = watch(FedProto(network(), **LOCAL), world(5), 2, trace=[[0, 1], [4]])
    one, two = history.rounds
    assert np.array_equal(two["prototypes"], one["prototypes"])
    assert np.array_equal(two["w_i"], one["w_i"])
    assert np.array_equal(two["w_i"][4], start())
    assert two["up"][4] == 0
