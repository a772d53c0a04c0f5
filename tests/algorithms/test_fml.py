"""FML against plain PyTorch, its bytes, its limits, and networks of the clients' own."""

import numpy as np
import pytest
import torch
from torch import nn

from models import MLP, Family
from pfl.algorithms import FML, FedAvg, LocalTrain
from pfl.method.exported import client_network, global_network
from pfl.method.messenger import Joined
from tests.algorithms.class_world import (
    CLASSES,
    ENGINES,
    INPUTS,
    LABELS,
    LOCAL,
    SIZE,
    TRACE,
    assert_rounds,
    mean_model,
    network,
    rate,
    samples,
    several_labels,
    start,
    world,
)
from tests.refusal import refused

ALPHA, BETA = 0.7, 0.2
MESSENGER = CLASSES * INPUTS + CLASSES  # values


def messenger():
    """A linear classifier of 15 values."""
    made = nn.Linear(INPUTS, CLASSES).double()
    values = 0.5 * np.random.default_rng(4).normal(size=MESSENGER)
    nn.utils.vector_to_parameters(torch.from_numpy(values), made.parameters())
    return made


def divergence(p, q):
    """KL(p || q), a mean over samples."""
    return (p * (p.log() - q.log())).sum(1).mean()


def one_step(own, common, x, y, lr, alpha, beta):
    """Both networks move by the gradients of their own losses, at their old values."""
    scores = own(x), common(x)
    p, q = (s.softmax(1) for s in scores)
    losses = (
        alpha * nn.functional.cross_entropy(scores[0], y) + (1 - alpha) * divergence(q.detach(), p),
        beta * nn.functional.cross_entropy(scores[1], y) + (1 - beta) * divergence(p.detach(), q),
    )
    decay = LOCAL["weight_decay"]
    slopes = [
        torch.autograd.grad(loss, list(n.parameters()), retain_graph=True)
        for loss, n in zip(losses, (own, common), strict=True)
    ]
    with torch.no_grad():
        for one, gradients in zip((own, common), slopes, strict=True):
            for parameter, g in zip(one.parameters(), gradients, strict=True):
                parameter -= lr * (g + decay * parameter)


def slow(networks, alpha=ALPHA, beta=BETA, trace=TRACE):
    """The messenger, and all u_i, after each round."""
    common = messenger()
    history = []
    for t, cohort in enumerate(trace):
        before = nn.utils.parameters_to_vector(common.parameters()).detach().clone()
        sent = []
        for i in cohort:
            nn.utils.vector_to_parameters(before.clone(), common.parameters())
            for _ in range(LOCAL["local_steps"]):
                one_step(networks[i], common, *samples()[i], rate(t), alpha, beta)
            sent.append(nn.utils.parameters_to_vector(common.parameters()).detach().clone())
        after = mean_model(cohort, sent, before)
        nn.utils.vector_to_parameters(after.clone(), common.parameters())
        own = [nn.utils.parameters_to_vector(n.parameters()).detach().clone() for n in networks]
        history.append((after.numpy(), own))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    shares = {"alpha": ALPHA, "beta": BETA}
    given = {"batch_size": None, "engine": engine, **LOCAL}
    method = FML(network(), messenger=messenger(), **shares, **given)
    rows = []
    for common, own in slow([network() for _ in LABELS]):
        rows.append((torch.stack(own).numpy(), np.append(start(), common)))
    assert_rounds(watch, method, rows, "head", "w")  # w has the first u, which stays


def test_the_ledger_books_the_messenger(watch):
    """15 values of 8 bytes down and up, whatever the clients' network."""
    history = watch(FML(network(), messenger=messenger(), batch_size=None), world(), 6, trace=TRACE)
    rounds = np.zeros(4)
    for row, cohort in zip(history.rounds, TRACE, strict=True):
        rounds[list(cohort)] += 1
        assert row["down"].tolist() == (8 * MESSENGER * rounds).tolist()
        assert row["up"].tolist() == (8 * MESSENGER * rounds).tolist()


def test_networks_that_teach_each_other_nothing_are_local_training_and_fedavg(watch, fit):
    """To rounding: both are in one sum of losses."""
    settings = LOCAL | {"batch_size": 2, "engine": "sequential"}
    method = FML(network(), messenger=messenger(), alpha=1.0, beta=1.0, **settings)
    history = watch(method, world(), 6, trace=TRACE)
    alone = watch(LocalTrain(network(), **settings), world(), 6, trace=TRACE)["w_i"][-1]
    common = fit(FedAvg(messenger(), **settings), world(), 6, trace=TRACE).global_model
    np.testing.assert_allclose(history["head"][-1], alone, rtol=0, atol=1e-13)
    np.testing.assert_allclose(history["w"][-1][SIZE:], common, rtol=0, atol=1e-13)


def families():
    """Two networks of other widths and depths."""
    torch.manual_seed(2)
    return {"wide": MLP(4, (5,), 3).double(), "deep": MLP(4, (3, 2), 3).double()}


def test_networks_of_the_clients_own(watch):
    """Clients 0 and 2 have the wide one, the others the deep one."""
    settings = {"alpha": ALPHA, "beta": BETA, "batch_size": None, **LOCAL}
    method = FML(Family(families()), messenger=messenger(), **settings)
    watch(method, world(), len(TRACE), trace=TRACE)
    own = [families()[("wide", "deep")[i % 2]] for i in range(4)]
    common, expected = slow(own)[-1]
    ids = np.arange(4)
    for i, row in enumerate(method.client_rows("head", ids)):
        np.testing.assert_allclose(row[: len(expected[i])], expected[i], rtol=0, atol=1e-12)
        assert not row[len(expected[i]) :].any()
    sent = nn.utils.parameters_to_vector(global_network(method).parameters()).detach()
    np.testing.assert_allclose(sent, common, rtol=0, atol=1e-12)
    for i in range(4):
        exported = client_network(method, i)
        assert not isinstance(exported, Joined)
        values = nn.utils.parameters_to_vector(exported.parameters()).detach()
        np.testing.assert_allclose(values, expected[i], rtol=0, atol=1e-12)


def test_a_messenger_that_is_not_given_is_as_the_first_network():
    for given in (network(), Family(families())):
        method = FML(given)
        first = given
        if isinstance(given, Family):
            first = given.networks["wide"]
        size = sum(p.numel() for p in first.parameters())
        assert method.download().nbytes == 8 * size


def test_a_clients_network_begins_with_the_weights_of_a_file(tmp_path):
    """A file of the own network leaves the messenger as it is; a file of both has both."""
    own = network()
    nn.utils.vector_to_parameters(2 * start(), own.parameters())
    torch.save(own.state_dict(), tmp_path / "own.pt")
    first = FML(network(), messenger=messenger(), weights=str(tmp_path / "own.pt"))
    assert torch.equal(first.global_model[:SIZE], 2 * start())
    common = nn.utils.parameters_to_vector(messenger().parameters()).detach()
    assert torch.equal(first.global_model[SIZE:], common)
    both = Joined(own, network())
    torch.save(both.state_dict(), tmp_path / "both.pt")
    second = FML(network(), messenger=network(), weights=str(tmp_path / "both.pt"))
    assert torch.equal(second.global_model, torch.cat([2 * start(), start()]))
    torch.save(messenger().state_dict(), tmp_path / "messenger.pt")
    with refused("lacks own.body.weight, own.body.bias, own.out.weight and 3 more of Joined"):
        FML(network(), messenger=messenger(), weights=str(tmp_path / "messenger.pt"))


def test_a_messenger_with_other_classes_is_refused(fit):
    other = nn.Linear(INPUTS, CLASSES + 1).double()
    with refused("Linear gives outputs of shape [4] where Sequential gives [3]"):
        fit(FML(network(), messenger=other), world(), 1)


def test_refusals(fit):
    with pytest.raises(ValueError, match=r"model\.alpha: 1\.5"):
        FML(network(), alpha=1.5)
    other, data = several_labels()
    with refused("FML needs one"):
        fit(FML(other), data, 1)
