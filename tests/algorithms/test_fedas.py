"""FedAS against plain PyTorch, its ends, and newcomers."""

import numpy as np
import torch

from pfl.algorithms import FedAS
from tests.algorithms.class_world import (
    BODY,
    ENGINES,
    FEATURES,
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
from tests.problems import History

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


@ENGINES
def test_rounds_equal_plain_pytorch(fit, engine):
    history = History()
    method = FedAS(network(), batch_size=None, engine=engine, **ALIGNMENT, **LOCAL)
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


def test_work():
    """The pass of t_i and two epochs of alignment count besides the local epochs."""
    method = FedAS(network(), local_epochs=3, alignment_epochs=2)
    np.testing.assert_array_equal(method.cost(np.array([5, 0])), [(3 + 2 + 1) * 5, 0])
