"""FedGH against NumPy and against plain PyTorch modules, its bytes, engines and refusals."""

from collections import OrderedDict
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Dirichlet
from models import MLP, SmallCNN
from pfl.algorithms import FedGH
from pfl.randomness import generator
from tests.algorithms.test_trainable import FULL, SIZES
from tests.algorithms.test_trainable import world as regression
from tests.problems import Received, Steps, owned, run
from tests.refusal import refused

INPUTS, FEATURES, CLASSES = 4, 3, 3
BODY = FEATURES * INPUTS  # values of the body, the first ones
SIZE = BODY + CLASSES * FEATURES + CLASSES
LABELS = [[0, 1, 2, 0, 2], [0, 2, 2], [1, 1], [0, 1]]  # of the clients; some lack a class
TRACE = [[0, 1, 2], [1], [], [0, 2]]  # client 3 never takes part


def network():
    """Scores A B x + c, with the body B and the head (A, c)."""
    layers = {"body": nn.Linear(INPUTS, FEATURES, bias=False), "out": nn.Linear(FEATURES, CLASSES)}
    made = nn.Sequential(OrderedDict(layers)).double()
    w = 0.7 * np.random.default_rng(1).normal(size=SIZE)
    nn.utils.vector_to_parameters(torch.from_numpy(w), made.parameters())
    return made, w


def samples():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(len(labels), INPUTS)) for labels in LABELS]


def world():
    inputs = torch.from_numpy(np.concatenate(samples()))
    owners = np.repeat(np.arange(4), [len(labels) for labels in LABELS])
    return owned(owners, inputs, torch.tensor([*chain(*LABELS)]))


def error(head, z, label):
    """The gradient of the cross entropy at the scores: softmax(A z + c) - e_label."""
    scores = head[:-CLASSES].reshape(CLASSES, FEATURES) @ z + head[-CLASSES:]
    odds = np.exp(scores - scores.max())
    return odds / odds.sum() - np.eye(CLASSES)[label]


def slow(w, *, lr, lr_decay, local_steps, server_lr, server_epochs, server_batch_size):
    """Head, bodies and pairs after each round, sample by sample."""
    head, bodies, history = w[BODY:].copy(), np.tile(w[:BODY], (4, 1)), []
    for t, cohort in enumerate(TRACE):
        pairs = []
        for i in cohort:
            b, h = bodies[i].reshape(FEATURES, INPUTS).copy(), head.copy()
            for _ in range(local_steps):
                db, dh = np.zeros_like(b), np.zeros_like(h)
                for x, label in zip(samples()[i], LABELS[i], strict=True):
                    r = error(h, b @ x, label)
                    a = h[:-CLASSES].reshape(CLASSES, FEATURES)
                    db += np.outer(a.T @ r, x) / len(LABELS[i])
                    dh += np.append(np.outer(r, b @ x), r) / len(LABELS[i])
                b, h = b - lr * lr_decay**t * db, h - lr * lr_decay**t * dh
            bodies[i] = b.ravel()
            for label in sorted(set(LABELS[i])):
                of_class = [x for x, y in zip(samples()[i], LABELS[i], strict=True) if y == label]
                pairs.append((np.mean([b @ x for x in of_class], axis=0), label))
        rng = generator(0, "head", t)  # the order of the pairs; all that this has of the method
        for _ in range(server_epochs if pairs else 0):
            order = rng.permutation(len(pairs))
            size = server_batch_size or len(pairs)
            for begin in range(0, len(pairs), size):
                g = np.zeros_like(head)
                batch = [pairs[k] for k in order[begin : begin + size]]
                for z, label in batch:
                    r = error(head, z, label)
                    g += np.append(np.outer(r, z), r) / len(batch)
                head = head - server_lr * g
        history.append((head.copy(), bodies.copy(), pairs))
    return history


def personalized(method):
    models = np.full((method.num_clients, method.space.size), np.nan)
    for clients in method.iter_clients():
        models[clients.ids] = method.personalized(clients).numpy()
    return models


@pytest.mark.parametrize("server_batch_size", [1, 2, None])
def test_rounds_equal_the_numpy_loop(watch, server_batch_size):
    (net, w), received = network(), Received()
    server = dict(server_lr=0.3, server_epochs=2, server_batch_size=server_batch_size)
    local = dict(lr=0.4, lr_decay=0.8, local_steps=3)
    method = FedGH(net, batch_size=None, **server, **local)
    history = watch(method, world(), len(TRACE), callbacks=[received], trace=TRACE, seed=0)
    expected = slow(w, **server, **local)
    for row, (head, bodies, _) in zip(history.rounds, expected, strict=True):
        np.testing.assert_allclose(row["w"][BODY:], head, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row["body"], bodies, rtol=0, atol=1e-12)
        assert np.array_equal(row["w"][:BODY], w[:BODY])  # the initial body, for whoever comes late
    head, bodies, pairs = expected[-1]
    models = np.hstack([bodies, np.tile(head, (4, 1))])
    np.testing.assert_allclose(personalized(method), models, rtol=0, atol=1e-12)
    assert method.has_personalized and not method.has_global  # every client has its own body
    assert np.abs(head - w[BODY:]).max() > 0.05  # the server's steps do move it
    # What the last cohort sent: for each class whether the client has it, and the mean.
    ids, messages = received.rounds[-1]
    assert ids.tolist() == [0, 2]
    rows = messages["w"].view(2, CLASSES, 1 + FEATURES)
    assert rows[..., 0].tolist() == [[1, 1, 1], [0, 1, 0]]
    sent = rows[rows[..., 0] > 0][:, 1:]
    np.testing.assert_allclose(sent, [z for z, _ in pairs], rtol=0, atol=1e-12)


def test_the_ledger_books_the_head_and_the_pairs(watch):
    """Down A and c, 3 * 3 + 3 values of 8 bytes; up 3 means and a label for each of the client's
    classes, of which client 0 has three, client 1 two and client 2 one."""
    history = watch(FedGH(network()[0], batch_size=None), world(), len(TRACE), trace=TRACE)
    visits = np.array([np.bincount([*chain(*TRACE[: t + 1])], minlength=4) for t in range(4)])
    assert np.array_equal(history["down"], 8 * 12 * visits)
    assert np.array_equal(history["up"], 8 * 4 * np.array([3, 2, 1, 2]) * visits)


# ---- networks -----------------------------------------------------------------------------------


def normalized():
    """A user's network without a module `head`, whose body keeps running statistics."""
    layers = (nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10))
    return nn.Sequential(*layers)


class Early(nn.Module):
    """A user's network that lists its head first."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 10)
        self.layer = nn.Linear(64, 6)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x.flatten(1))))


# How it is built, and its features.
NETWORKS = {
    "MLP": (lambda: MLP(64, (8,)), lambda net, x: net.body(x)),
    "SmallCNN": (lambda: SmallCNN(width=4), lambda net, x: net.body(x)),
    "BatchNorm": (normalized, lambda net, x: net[:-1](x)),
    "head first": (Early, lambda net, x: torch.tanh(net.layer(x.flatten(1)))),
    "one layer": (lambda: MLP(64, ()), lambda net, x: x.flatten(1)),
}


@pytest.fixture(scope="module")
def digits():
    return DigitsDataModule(5, Dirichlet(0.3), seed=1)


def trained(root, digits, name, engine="auto", at_once=None, callbacks=()):
    torch.manual_seed(0)
    arguments = dict(lr=0.1, batch_size=40, server_lr=0.1, server_batch_size=4, engine=engine)
    method = FedGH(NETWORKS[name][0]().double(), **arguments)
    loop = dict(trace=[[0, 1, 2, 3], [1, 4]], clients_at_once=at_once, evaluate=())
    loop["callbacks"] = callbacks
    return run(method, digits, 2, root=root, **loop)


@pytest.mark.parametrize("name", NETWORKS)
def test_prototypes_are_the_class_means_of_a_module_s_features(tmp_path, digits, name):
    """A module for each client, with its body and its running statistics, in evaluation mode. The
    head that the client trained does not matter."""
    received, features = Received(), NETWORKS[name][1]
    method = trained(tmp_path, digits, name, callbacks=[received])
    messages = dict(zip((1, 4), received.rounds[-1][1]["w"], strict=True))
    for i in messages:  # the last cohort
        net = NETWORKS[name][0]().double().eval()
        ids = np.array([i])
        model = method.global_model.clone()
        if method.personal_part.any():
            model[method.personal_part] = method.client_rows("body", ids)[0]
        nn.utils.vector_to_parameters(model, net.parameters())
        if name == "BatchNorm":
            method.oracle.buffers.write(net, method.client_rows("buffers", ids)[0])
            assert net[2].num_batches_tracked > 0
        mine = torch.from_numpy(np.asarray(digits.partition.train[i]))
        inputs, targets = digits.samples.gather(mine)
        with torch.no_grad():
            z = features(net, inputs.double())
        rows = messages[i].view(10, -1)
        for label in range(10):
            own = z[targets == label]
            assert bool(rows[label, 0]) == (len(own) > 0)
            expected = own.mean(0) if len(own) else torch.zeros_like(rows[label, 1:])
            torch.testing.assert_close(rows[label, 1:], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("outputs", [2, 1])
def test_for_regression_a_client_sends_the_means_of_its_features_and_targets(fit, outputs):
    """Of one linear layer R^4 -> R^2: 1, the means of its inputs and of its targets. For one output
    the targets are numbers, [N]."""
    x, y, data = regression()
    if outputs == 1:
        data = owned(np.repeat(np.arange(len(SIZES)), SIZES), x, y[:, 0])
        y = y[:, :1]
    method, sent = FedGH(nn.Linear(4, outputs).double(), lr=0.1, local_steps=1, **FULL), {}
    update = method.client_update

    def recorded(clients, w):
        message = update(clients, w)
        sent.update(zip(clients.ids.tolist(), message.values, strict=True))
        return message

    method.client_update = recorded
    fit(method, data, 1)
    for client, (z, t) in enumerate(zip(x.split(SIZES), y.split(SIZES), strict=True)):
        expected = torch.cat([torch.ones(1).double(), z.mean(0), t.mean(0)])
        torch.testing.assert_close(sent[client], expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_engines_and_chunks_agree(tmp_path, digits, name):
    """In float64 the order of sums is all that may differ."""
    first = trained(tmp_path, digits, name, "sequential", 1)
    others = [("auto", None), ("debug", 2)] + [("vmap", 3)] * (name != "BatchNorm")
    for engine, at_once in others:
        other = trained(tmp_path, digits, name, engine, at_once)
        torch.testing.assert_close(other.global_model, first.global_model, rtol=0, atol=1e-10)
        for state in first.store.names:
            rows = (method.client_rows(state, np.arange(5)) for method in (other, first))
            torch.testing.assert_close(*rows, rtol=0, atol=1e-10)


def test_running_statistics_stay_with_the_body(tmp_path, digits):
    """The network of the server keeps the initial ones, and none are sent: 6 * 10 + 10 values."""
    method = trained(tmp_path, digits, "BatchNorm")
    assert method.network[2].num_batches_tracked == 0
    rows = method.client_rows("buffers", np.arange(5))
    assert len(rows.unique(dim=0)) == 5
    assert method.progress.ledger.downlink.tolist() == [8 * 70, 2 * 8 * 70, 8 * 70, 8 * 70, 8 * 70]


def test_a_frozen_bias_of_the_head_stays(fit):
    net, w = network()
    net.out.bias.requires_grad_(False)
    method = FedGH(net, batch_size=None, server_lr=0.3)
    fit(method, world(), 2)
    assert net.out.bias.tolist() == w[-CLASSES:].tolist()
    assert not np.isclose(method.global_model[BODY:], w[BODY:-CLASSES]).any()


def test_the_server_learns_what_the_clients_features_say(fit):
    """Two clients with one class each: the global head tells the classes apart, although the head
    that a client trains alone only ever sees one."""
    x = np.random.default_rng(2).normal(size=(40, INPUTS)) + np.repeat([[-3.0], [3.0]], 20, 0)
    labels, owners = torch.arange(2).repeat_interleave(20), np.repeat([0, 1], 20)
    net = nn.Sequential(nn.Linear(INPUTS, 2), nn.Linear(2, 2)).double()
    nn.init.eye_(net[0].weight)
    method = FedGH(net, lr=1e-3, server_lr=0.5, server_epochs=5, server_batch_size=None)
    fit(method, owned(owners, torch.from_numpy(x), labels), 20)
    models = torch.from_numpy(personalized(method))
    for i in range(2):
        nn.utils.vector_to_parameters(models[i], net.parameters())
        predicted = net(torch.from_numpy(x)).argmax(1)
        assert torch.equal(predicted, labels)


# ---- refusals -----------------------------------------------------------------------------------


class After(nn.Module):
    """A network whose output is not that of its last layer."""

    def __init__(self, kind):
        super().__init__()
        self.body, self.head, self.kind = nn.Linear(INPUTS, 3), nn.Linear(3, 3), kind

    def forward(self, x):
        z = self.body(x)
        if self.kind == "never called":
            return nn.functional.linear(z, self.head.weight, self.head.bias)
        return self.head(z).log_softmax(1) if self.kind == "softmax" else self.head(z) + z


@pytest.mark.parametrize("kind", ["never called", "softmax", "skip"])
def test_an_output_that_is_not_that_of_the_head_is_refused(fit, kind):
    """Before any client has trained."""
    method, steps = FedGH(After(kind).double(), batch_size=None), Steps()
    start = method.global_model.clone()
    with refused("model.network: the output of After is not that of its last layer 'head'"):
        fit(method, world(), 1, callbacks=[steps])
    assert torch.equal(method.global_model, start) and steps.rounds == [[]]


def test_a_frozen_head_is_refused():
    net = network()[0]
    net.head = nn.Linear(2, 2).requires_grad_(False)
    with refused("model.network: the head is frozen; FedGH trains it"):
        FedGH(net)
