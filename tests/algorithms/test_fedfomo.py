"""FedFomo against a loop over clients, its bytes, whom it asks, and the samples that judge."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from datamodules import SplitOwn
from pfl.algorithms import FedFomo, LocalTrain
from pfl.randomness import generator
from tests.algorithms.class_world import (
    ENGINES,
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
)
from tests.problems import owned
from tests.refusal import refused

ASKED = dict(models=2, exploration=0.5, exploration_decay=0.2)


def partners(t, client, sent, affinity):
    """Up to two of the others: the best by P, but for those that are drawn at random."""
    rng = generator(0, "partners", t, client)  # whose draws are all that this has of the method
    others = rng.permutation([j for j in sorted(sent) if j != client])
    ranked = sorted(others.tolist(), key=lambda j: -affinity[client, j])
    count = min(2, len(ranked))
    best = count - rng.binomial(count, max(0.0, 0.5 - 0.2 * t))
    drawn = rng.choice(ranked[best:], count - best, replace=False).tolist()
    return sorted(ranked[:best] + drawn)


def slow(train, judges):
    """All w_i after each round, P, and how many models each client has received in all."""
    models, begins, sent = [start() for _ in LABELS], [start() for _ in LABELS], {}
    affinity, received, history = np.zeros((4, 4)), np.zeros(4), []
    for t, cohort in enumerate(TRACE):
        new = dict(sent)
        gained = affinity.copy()
        for i in cohort:
            asked = partners(t, i, sent, affinity)
            received[i] += len(asked)
            theta, gains = begins[i], []
            for w in [models[i], *(sent[j] for j in asked)]:
                away = (w - theta).norm()
                gain = (
                    entropy(theta, *judges[i]) - entropy(w, *judges[i])
                    if len(judges[i][1])
                    else 0.0
                )
                gains.append(float(gain / away) if away > 0 else 0.0)
            for j, gain in zip(asked, gains[1:], strict=True):
                gained[i, j] += gain
            total = sum(max(gain, 0.0) for gain in gains)
            mixed = theta.clone()
            for w, gain in zip([models[i], *(sent[j] for j in asked)], gains, strict=True):
                if gain > 0:
                    mixed += gain / total * (w - theta)
            if not len(judges[i][1]):
                mixed = models[i]
            begins[i] = mixed
            models[i] = descend(
                mixed, lambda v, i=i: entropy(v, *train[i]), rate(t), LOCAL["local_steps"]
            )
            new[i] = models[i]
        sent, affinity = new, gained
        history.append(torch.stack(models).numpy())
    return history, affinity, received


@ENGINES
def test_rounds_equal_a_loop_over_clients(watch, engine):
    """Judged on the training samples; the bytes are those of the models that a client has asked
    for, and its own and a number for each of these."""
    method = FedFomo(
        network(), judged_on="training", batch_size=None, engine=engine, **ASKED, **LOCAL
    )
    history = watch(method, world(), len(TRACE), trace=TRACE)
    expected, affinity, received = slow(samples(), samples())
    np.testing.assert_allclose(history["w_i"], expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(method.affinity, affinity, rtol=0, atol=1e-12)
    size = method.space.size
    visits = np.array([sum(i in cohort for cohort in TRACE) for i in range(4)])
    assert history.rounds[-1]["down"].tolist() == (8 * size * received).tolist()
    assert history.rounds[-1]["up"].tolist() == (8 * (size * visits + received)).tolist()
    assert (received > 0).all() and np.count_nonzero(affinity) > 4


class ButOne(SplitOwn):
    """Some of each client's samples are for validation, but none of client 2."""

    def split(self, owned, pool, rng):
        partition = super().split(owned, pool, rng)
        owners = np.repeat(np.arange(4), partition.val.sizes)
        return replace(partition, val=partition.val.select(owners != 2))


def split_world():
    """The same inputs, of which some are for validation."""
    inputs = torch.cat([x for x, _ in samples()])
    labels = torch.cat([y for _, y in samples()])
    owners = np.repeat(np.arange(4), [len(own) for own in LABELS])
    return owned(owners, inputs, labels, protocol=ButOne(test=0.0, validation=0.3))


def test_validation_samples_judge(watch):
    """They are not trained on; who has none goes on from its own model."""
    method = FedFomo(network(), batch_size=None, **ASKED, **LOCAL)
    data = split_world()
    history = watch(method, data, len(TRACE), trace=TRACE)
    parts = []
    for split in (data.partition.train, data.partition.val):
        index = [torch.from_numpy(split[i]).long() for i in range(4)]
        parts.append([data.samples.gather(own) for own in index])
    assert [len(y) for _, y in parts[1]] == [2, 1, 0, 1]
    expected, affinity, _ = slow(*parts)
    np.testing.assert_allclose(history["w_i"], expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(method.affinity, affinity, rtol=0, atol=1e-12)


def test_a_client_whose_loss_falls_and_who_gets_no_models_trains_alone(watch):
    settings = LOCAL | dict(batch_size=None, engine="sequential")
    trace = [[0]] * 4
    methods = (
        FedFomo(network(), judged_on="training", **settings),
        LocalTrain(network(), **settings),
    )
    one, other = (watch(method, world(), 4, trace=trace)["w_i"] for method in methods)
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


def test_validation_samples_are_asked_for(fit):
    with refused("model.judged_on: validation; the clients have no validation samples"):
        fit(FedFomo(network()), world(), 1)


@pytest.mark.parametrize("given", [{"models": 0}, {"exploration": 1.5}, {"judged_on": "test"}])
def test_refusals(given):
    (key,) = given
    with refused(f"model.{key}: {given[key]!r}"):
        FedFomo(network(), **given)
