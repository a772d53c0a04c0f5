"""FedAS against plain PyTorch, its ends, newcomers, and slips that would show."""

import numpy as np
import pytest
import torch
from torch import nn

from pfl.algorithms import FedAS
from pfl.errors import ConfigError
from tests.algorithms.class_world import (
    BODY,
    FEATURES,
    LABELS,
    LOCAL,
    TRACE,
    descend,
    entropy,
    network,
    rate,
    samples,
    several_labels,
    start,
    world,
    z_of,
)
from tests.problems import History
from tests.refusal import refused

ALIGNMENT = dict(alignment_lr=0.6, alignment_epochs=2)


def away(u, own, x, y):
    """sum_c 1/n_c sum_{x of c} 1/K |z - C_c|^2, with the class means of the client's own model."""
    total = 0.0
    for c in y.unique():
        mean = z_of(own, x[y == c]).mean(0)
        total = total + (z_of(u, x[y == c]) - mean).square().sum(1).mean() / FEATURES
    return total


def trace_of(v, x, y):
    at = v.clone().requires_grad_()
    (g,) = torch.autograd.grad(entropy(at, x, y), at)
    return float(g.square().sum())


def slow():
    """u, and each client's last model, in each round, with full batches."""
    w, own, history = start(), [start() for _ in LABELS], []
    for t, cohort in enumerate(TRACE):
        bodies, traces = [], []
        for i in cohort:
            x, y = samples()[i]
            v = torch.cat([w[:BODY], own[i][BODY:]])
            aligned = ALIGNMENT["alignment_lr"], ALIGNMENT["alignment_epochs"], slice(BODY)
            v = descend(v, lambda u, i=i, x=x, y=y: away(u, own[i], x, y), *aligned)
            v = descend(v, lambda u, x=x, y=y: entropy(u, x, y), rate(t), LOCAL["local_steps"])
            own[i] = v
            bodies.append(v[:BODY])
            traces.append(trace_of(v, x, y))
        if cohort:
            shares = torch.from_numpy(np.array(traces) / sum(traces))
            w = torch.cat([shares @ torch.stack(bodies), w[BODY:]])
        history.append((w.numpy(), torch.stack(own).numpy()))
    return history


def assert_equal(fit, kind, **settings):
    history = History()
    method = kind(network(), batch_size=None, **ALIGNMENT, **LOCAL, **settings)
    fit(method, world(), len(TRACE), callbacks=[history], trace=TRACE)
    for row, (w, own) in zip(history.rounds, slow(), strict=True):
        np.testing.assert_allclose(row["w"], w, rtol=0, atol=1e-11)
        np.testing.assert_allclose(row["body"], own[:, :BODY], rtol=0, atol=1e-11)
        np.testing.assert_allclose(row["head"], own[:, BODY:], rtol=0, atol=1e-11)
    (clients,) = method.iter_clients("train")
    expected = torch.from_numpy(slow()[-1][1][clients.ids])
    torch.testing.assert_close(method.personalized(clients), expected, rtol=0, atol=1e-11)
    assert torch.equal(method.newcomer(clients)[0], method.global_model)
    assert np.array_equal(method.global_model[BODY:], start()[BODY:])


@pytest.mark.parametrize("engine", ["auto", "sequential", "vmap"])
def test_rounds_equal_plain_pytorch(fit, engine):
    assert_equal(fit, FedAS, engine=engine)


class Unaligned(FedAS):
    """The received body as it is."""

    def _aligned(self, clients, v, own):
        return v


class Towards(FedAS):
    """The class means are those of the received body."""

    def _aligned(self, clients, v, own):
        return super()._aligned(clients, v, v)


class BySamples(FedAS):
    """t_i is the number of samples."""

    def _trace(self, clients, v):
        return torch.from_numpy(clients.sizes).to(v)[:, None]


class Before(FedAS):
    """t_i is taken at the model before the local steps."""

    def _trace(self, clients, v):
        start = clients.received["w"].repeat(len(clients), 1)
        start[:, BODY:] = v[:, BODY:]
        return super()._trace(clients, start)


class Plain(FedAS):
    """All samples weigh the same in the alignment."""

    def _distance(self, outputs, features, samples, own):
        weights = torch.ones_like(own["weights"])
        return super()._distance(outputs, features, samples, {**own, "weights": weights})


@pytest.mark.parametrize("kind", [Unaligned, Towards, BySamples, Before, Plain])
def test_a_slip_would_show(fit, kind):
    with pytest.raises(AssertionError):
        assert_equal(fit, kind)


def test_the_trace_adds_up_mini_batches_of_stragglers_too(fit):
    """Samples one by one: t_i is the sum of their squared gradients, complete for a slow client."""
    settings = dict(batch_size=1, local_epochs=2, lr=0.1, engine="sequential")
    method, history = FedAS(network(), **settings), History()
    loop = dict(trace=[[0, 1]], stragglers=[[0]])
    fit(method, world(), 1, callbacks=[history], **loop)
    models = [
        torch.from_numpy(np.concatenate([history["body"][0][i], history["head"][0][i]]))
        for i in (0, 1)
    ]
    traces = [
        sum(trace_of(v, x[[k]], y[[k]]) for k in range(len(y)))
        for v, (x, y) in zip(models, samples(), strict=False)
    ]
    expected = np.average([v[:BODY] for v in models], axis=0, weights=traces)
    np.testing.assert_allclose(history["w"][0][:BODY], expected, rtol=0, atol=1e-12)
    # Two of five epochs' steps would be another number of gradients: 5 + 3 in t_i, 3 and 2 epochs.
    assert method.samples_seen > 2 * (5 + 3)


def test_the_body_stays_where_no_client_has_samples(fit):
    history = History()
    method = FedAS(network(), **LOCAL)
    fit(method, world(5), 2, callbacks=[history], trace=[[0, 1], [4]])
    assert np.array_equal(history["w"][1], history["w"][0])


def test_work_and_refusals():
    """The pass of t_i and two epochs of alignment count besides the local epochs."""
    method = FedAS(network(), local_epochs=3, alignment_epochs=2)
    np.testing.assert_array_equal(method.cost(np.array([5, 0])), [(3 + 2 + 1) * 5, 0])
    for name, value, expected in (
        ("alignment_lr", 0.0, "positive"),
        ("alignment_epochs", 0, "at least 1"),
    ):
        with refused(f"model.{name}: {value}; it must be {expected}"):
            FedAS(network(), **{name: value})
    with pytest.raises(ConfigError, match="FedAS needs a linear layer"):
        FedAS(nn.Sequential(nn.Linear(4, 3), nn.Conv1d(1, 1, 1)))


def test_several_labels_are_refused(fit):
    made, data = several_labels()
    with refused("data: the targets are several labels per sample; FedAS needs one"):
        fit(FedAS(made, personal=["1.*"]), data, 1)
