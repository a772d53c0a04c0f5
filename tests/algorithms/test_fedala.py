"""FedALA against plain PyTorch, and its share of samples."""

from functools import partial

import numpy as np
import pytest
import torch

from pfl.algorithms import FedALA, FedAvg
from tests.algorithms.class_world import (
    BODY,
    ENGINES,
    LABELS,
    LOCAL,
    SIZE,
    TRACE,
    assert_rounds,
    assert_same_end,
    descend,
    entropy,
    mean_model,
    network,
    rate,
    samples,
    slope,
    start,
    world,
)
from tests.problems import Steps

WEIGHT_LR, THRESHOLD, WINDOW, MOST = 4.0, 5e-3, 3, 7
ARGUMENTS = dict(weight_lr=WEIGHT_LR, threshold=THRESHOLD, window=WINDOW)


@pytest.fixture(autouse=True)
def most_passes(monkeypatch):
    monkeypatch.setattr(FedALA, "most_passes", MOST)


def mixture(w, own, weights):
    v = w.clone()
    v[BODY:] = own + weights * (w[BODY:] - own)
    return v


def slow():
    """w, all u_i, W_i and the numbers of passes of the cohort in each round, with full batches."""
    w, own = start(), [start()[BODY:] for _ in LABELS]
    weights, learned = [torch.ones(SIZE - BODY).double() for _ in LABELS], set()
    history = []
    for t, cohort in enumerate(TRACE):
        models, passes = [], []
        for i in cohort:
            (x, y), losses = samples()[i], []
            away = w[BODY:] - own[i]
            while away.any():
                loss, g = slope(mixture(w, own[i], weights[i]), x, y)
                weights[i] = (weights[i] - WEIGHT_LR * g[BODY:] * away).clamp(0, 1)
                losses.append(loss)
                settled = len(losses) > WINDOW and np.std(losses[-WINDOW:]) < THRESHOLD
                if i in learned or settled or len(losses) == MOST:
                    learned.add(i)
                    break
            first = mixture(w, own[i], weights[i])
            loss = partial(entropy, x=x, y=y)
            models.append(descend(first, loss, rate(t), LOCAL["local_steps"]))
            passes.append(len(losses))
        for i, v in zip(cohort, models, strict=True):
            own[i] = v[BODY:]
        w = mean_model(cohort, models, w)
        history.append((w.numpy(), torch.stack(own).numpy(), torch.stack(weights).numpy(), passes))
    return history


def test_the_comparison_has_every_kind_of_round():
    """No passes, a single one, passes until the loss settles, and the most there may be."""
    passes = {n for *_, row in slow() for n in row}
    assert {0, 1, MOST} < passes
    assert any(WINDOW < n < MOST for n in passes)
    weights = slow()[-1][2]
    assert (weights == 0).any()
    assert ((weights > 0) & (weights < 1)).any()


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    method = FedALA(network(), batch_size=None, engine=engine, **ARGUMENTS, **LOCAL)
    expected = [row[:3] for row in slow()]
    assert_rounds(watch, method, expected, "w", "own", "weights", atol=1e-11)
    w, own, weights = map(torch.from_numpy, expected[-1])
    (clients,) = method.iter_clients("train")
    for i, model in zip(clients.ids, method.personalized(clients), strict=True):
        expected = mixture(w, own[i], weights[i])
        torch.testing.assert_close(model, expected, rtol=0, atol=1e-11)


def test_a_share_of_the_samples_is_chosen_anew_each_round_and_kept_for_all_passes(watch):
    """Five samples one by one: 60 % are three. Their order, as recorded, gives W_i."""
    steps = Steps()
    settings = dict(share=0.6, batch_size=1, local_epochs=1, lr=0.3, engine="sequential")
    method = FedALA(network(), **ARGUMENTS, **settings)
    trace = [[1], [0], [1], [0]]  # client 0 finds another model than its own in the second round
    history = watch(method, world(), 4, callbacks=[steps], trace=trace)
    x, y = samples()[0]
    own, weights = start()[BODY:], torch.ones(SIZE - BODY).double()
    drawn = []
    for t in (1, 3):
        w = torch.from_numpy(history["w"][t - 1])
        seen = [int((x == inputs.flatten()).all(1).nonzero()) for inputs, _ in steps.rounds[t]]
        # Three samples in a pass, and five local steps.
        passes = [seen[k : k + 3] for k in range(0, len(seen) - 5, 3)]
        drawn.append(passes[0])
        assert len(set(drawn[-1])) == 3
        assert all(one == passes[0] for one in passes)
        losses = []
        for one in passes:
            losses.append(0.0)
            for k in one:
                loss, g = slope(mixture(w, own, weights), x[[k]], y[[k]])
                weights = (weights - WEIGHT_LR * g[BODY:] * (w[BODY:] - own)).clamp(0, 1)
                losses[-1] += loss / 3
        ends = [np.std(losses[n - WINDOW : n]) < THRESHOLD for n in range(WINDOW + 1, len(losses))]
        assert not any(ends)  # the loss had not settled after any pass but, perhaps, the last
        last = len(losses) == MOST or np.std(losses[-WINDOW:]) < THRESHOLD
        assert len(losses) == 1 if t == 3 else len(losses) > WINDOW and last
        np.testing.assert_allclose(history["weights"][t][0], weights, rtol=0, atol=1e-12)
        own = torch.from_numpy(history["own"][t][0])
    assert drawn[0] != drawn[1]


def test_the_loss_has_settled_by_the_deviation_with_the_divisor_n(watch):
    """Of the losses of the last n = 3 passes. The threshold lies a tenth above that deviation after
    the fourth pass, the first that may be the last; with the divisor n - 1 it is 1.22 times as
    large, and the passes go on."""
    trace, settings = [[1], [0]], dict(batch_size=None, local_steps=1, lr=0.3, engine="sequential")
    before = FedALA(network(), **settings)
    w = torch.from_numpy(watch(before, world(), 1, trace=trace[:1])["w"][0])
    (x, y), own = samples()[0], start()[BODY:]
    weights, losses = torch.ones(SIZE - BODY).double(), []
    for _ in range(WINDOW + 1):
        loss, g = slope(mixture(w, own, weights), x, y)
        weights = (weights - WEIGHT_LR * g[BODY:] * (w[BODY:] - own)).clamp(0, 1)
        losses.append(loss)
    threshold = 1.1 * float(np.std(losses[-WINDOW:]))
    assert np.std(losses[-WINDOW:], ddof=1) > threshold
    method = FedALA(network(), **ARGUMENTS | dict(threshold=threshold), **settings)
    history = watch(method, world(), 2, trace=trace)
    np.testing.assert_allclose(history["weights"][1][0], weights, rtol=0, atol=1e-12)


def test_the_first_round_is_fedavg(fit):
    """Bit for bit: everyone has the initial model, and there is nothing to learn."""
    settings = LOCAL | dict(batch_size=2, engine="sequential")
    methods = FedALA(network(), **settings), FedAvg(network(), **settings)
    assert_same_end(fit, *methods, [[0, 1, 3]])


def test_a_client_without_samples_learns_nothing(watch):
    history = watch(FedALA(network(), **LOCAL), world(5), 2, trace=[[0, 1], [4]])
    one, two = history.rounds
    assert np.array_equal(two["w"], one["w"])
    assert (two["weights"][4] == 1).all()
    assert not two["learned"][4]


def test_the_weights_cost_their_share_of_a_pass():
    method = FedALA(torch.nn.Linear(4, 2), adaptive="*", share=0.5, local_epochs=2)
    assert method.cost(np.array([10, 20])).tolist() == [25, 50]  # 10 (2 + 0.5)
