"""FedAS against plain PyTorch, its ends, and newcomers."""

from functools import partial

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
    assert_rounds,
    descend,
    entropy,
    network,
    rate,
    samples,
    slope,
    start,
    world,
    z_of,
)

ALIGNMENT = dict(alignment_lr=0.6, alignment_epochs=2)


def away(u, own, x, y):
    """sum_c 1/n_c sum_{x of c} 1/K |z - C_c|^2, with the class means of the client's own model."""
    total = 0.0
    for c in y.unique():
        mean = z_of(own, x[y == c]).mean(0)
        total = total + (z_of(u, x[y == c]) - mean).square().sum(1).mean() / FEATURES
    return total


def trace_of(v, x, y):
    return float(slope(v, x, y)[1].square().sum())


def slow():
    """u, and each client's last model, in each round, with full batches."""
    w, own, history = start(), [start() for _ in LABELS], []
    for t, cohort in enumerate(TRACE):
        bodies, traces = [], []
        for i in cohort:
            x, y = samples()[i]
            v = torch.cat([w[:BODY], own[i][BODY:]])
            aligned = ALIGNMENT["alignment_lr"], ALIGNMENT["alignment_epochs"], slice(BODY)
            v = descend(v, partial(away, own=own[i], x=x, y=y), *aligned)
            v = descend(v, partial(entropy, x=x, y=y), rate(t), LOCAL["local_steps"])
            own[i] = v
            bodies.append(v[:BODY])
            traces.append(trace_of(v, x, y))
        if cohort:
            shares = torch.from_numpy(np.array(traces) / sum(traces))
            w = torch.cat([shares @ torch.stack(bodies), w[BODY:]])
        models = torch.stack(own).numpy()
        history.append((w.numpy(), models[:, :BODY], models[:, BODY:]))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    method = FedAS(network(), batch_size=None, engine=engine, **ALIGNMENT, **LOCAL)
    history = slow()
    assert_rounds(watch, method, history, "w", "body", "head", atol=1e-11)
    (clients,) = method.iter_clients("train")
    expected = torch.from_numpy(np.hstack(history[-1][1:])[clients.ids])
    torch.testing.assert_close(method.personalized(clients), expected, rtol=0, atol=1e-11)
    assert torch.equal(method.newcomer(clients)[0], method.global_model)
    assert np.array_equal(method.global_model[BODY:], start()[BODY:])


def test_the_trace_adds_up_mini_batches_of_stragglers_too(watch):
    """Samples one by one: t_i is the sum of their squared gradients, complete for a slow client."""
    settings = dict(batch_size=1, local_epochs=2, lr=0.1, engine="sequential")
    method = FedAS(network(), **settings)
    loop = dict(trace=[[0, 1]], stragglers=[[0]])
    history = watch(method, world(), 1, **loop)
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
    assert method.progress.samples > 2 * (5 + 3)


def test_the_body_stays_where_no_client_has_samples(watch):
    history = watch(FedAS(network(), **LOCAL), world(5), 2, trace=[[0, 1], [4]])
    assert np.array_equal(history["w"][1], history["w"][0])


def test_work():
    """The pass of t_i and two epochs of alignment count besides the local epochs."""
    method = FedAS(network(), local_epochs=3, alignment_epochs=2)
    np.testing.assert_array_equal(method.cost(np.array([5, 0])), [(3 + 2 + 1) * 5, 0])
