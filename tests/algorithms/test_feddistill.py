"""FedDistill against plain PyTorch, its bytes, its limit, and networks of the clients' own."""

import numpy as np
import torch
from torch import nn

from models import MLP, Family
from pfl.algorithms import FedDistill, LocalTrain
from tests.algorithms.class_world import (
    BODY,
    CLASSES,
    ENGINES,
    LABELS,
    LOCAL,
    TRACE,
    assert_rounds,
    descend,
    entropy,
    network,
    rate,
    samples,
    scores,
    several_labels,
    start,
    world,
    z_of,
)
from tests.refusal import refused

PENALTY = 0.8


def outputs(w, x):
    return scores(z_of(w, x), w[BODY:])


def teacher(sent, client, label):
    """The mean of what the others have sent last for a class; None: nobody has sent anything."""
    others = [means[label] for j, means in sent.items() if j != client and label in means]
    return sum(others) / len(others) if others else None


def distilled(w, x, y, taught):
    """The cross entropy, and γ times that of each sample's probabilities and its class's."""
    total = 0.0
    for f, label in zip(outputs(w, x).softmax(1), y.tolist(), strict=True):
        if taught[label] is not None:
            total = total - (taught[label] * f.log()).sum()
    return entropy(w, x, y) + PENALTY * total / len(x)


def slow():
    """All w_i after each round."""
    sent, models, history = {}, [start() for _ in LABELS], []
    for t, cohort in enumerate(TRACE):
        new = dict(sent)
        for i in cohort:
            x, y = samples()[i]
            taught = [teacher(sent, i, label) for label in range(CLASSES)]

            def loss(w, x=x, y=y, taught=taught):
                return distilled(w, x, y, taught)

            models[i] = descend(models[i], loss, rate(t), LOCAL["local_steps"])
            odds = outputs(models[i], x).softmax(1)
            new[i] = {label: odds[y == label].mean(0) for label in set(LABELS[i])}
        sent = new
        history.append((torch.stack(models).numpy(),))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    method = FedDistill(network(), penalty=PENALTY, batch_size=None, engine=engine, **LOCAL)
    assert_rounds(watch, method, slow(), "w_i")


def test_the_ledger_books_classes_that_others_have_sent_and_those_of_a_client(watch):
    """Numbers of 8 bytes. For each class its number and three probabilities."""
    history = watch(FedDistill(network(), batch_size=None), world(), 6, trace=TRACE)
    down, up = np.zeros((2, 4))
    seen = set()
    for row, cohort in zip(history.rounds, TRACE, strict=True):
        for i in cohort:
            known = {label for j in seen - {i} for label in LABELS[j]}
            down[i] += 8 * 4 * len(known)
            up[i] += 8 * 4 * len(set(LABELS[i]))
        seen |= set(cohort)
        assert row["down"].tolist() == down.tolist()
        assert row["up"].tolist() == up.tolist()


def test_no_penalty_is_local_training(watch):
    """Bit for bit, also with mini-batches; without weight decay, as for FedProto."""
    settings = LOCAL | dict(batch_size=2, engine="sequential", weight_decay=0.0)
    methods = FedDistill(network(), penalty=0.0, **settings), LocalTrain(network(), **settings)
    ends = [watch(method, world(), 6, trace=TRACE)["w_i"][-1] for method in methods]
    assert np.array_equal(*ends)


def test_a_client_alone_has_no_teacher(watch):
    """It sends, and is not among its own teachers in its second round."""
    settings = LOCAL | dict(engine="sequential", weight_decay=0.0)
    methods = FedDistill(network(), **settings), LocalTrain(network(), **settings)
    ends = [watch(method, world(), 2, trace=[[0], [0]])["w_i"][-1] for method in methods]
    assert np.array_equal(*ends)


def test_networks_of_the_clients_own(watch):
    """Two rounds with one full step of two networks that differ in width and depth: what the first
    round's models send teaches the others in the second."""

    def networks():
        torch.manual_seed(2)
        return {"wide": MLP(4, (5,), 3).double(), "deep": MLP(4, (3, 2), 3).double()}

    method = FedDistill(Family(networks()), penalty=PENALTY, lr=0.1, batch_size=None)
    history = watch(method, world(), 2, trace=[[0, 1], [0, 1]])
    own = networks()
    means = {}
    for number in range(2):
        sent = {}
        for i, name in enumerate(own):
            x, y = samples()[i]
            loss = nn.functional.cross_entropy(own[name](x), y)
            if number:
                logs = own[name](x).log_softmax(1)
                for log, label in zip(logs, y.tolist(), strict=True):
                    if label in means[1 - i]:
                        loss = loss - PENALTY * (means[1 - i][label] * log).sum() / len(x)
            grads = torch.autograd.grad(loss, list(own[name].parameters()))
            with torch.no_grad():
                for p, g in zip(own[name].parameters(), grads, strict=True):
                    p -= 0.1 * g
                odds = own[name](x).softmax(1)
            sent[i] = {label: odds[y == label].mean(0) for label in y.unique().tolist()}
        means = sent
    assert len(history.rounds) == 2
    for i, name in enumerate(own):
        row = method.client_rows("w", np.array([i]))[0]
        expected = nn.utils.parameters_to_vector(own[name].parameters()).detach()
        torch.testing.assert_close(row[: len(expected)], expected, rtol=0, atol=1e-13)


def test_refusals(fit):
    with refused("model.penalty: -1"):
        FedDistill(network(), penalty=-1)
    other, data = several_labels()
    with refused("FedDistill needs one"):
        fit(FedDistill(other), data, 1)
