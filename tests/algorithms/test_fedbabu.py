"""FedBABU against NumPy: a body under a head that never moves, and fine-tuning in evaluations."""

from functools import partial

import numpy as np
import pytest
import torch

from datamodules import DigitsDataModule, Dirichlet, SplitOwn
from models import MLP, HalfSquaredError
from pfl.algorithms import FedBABU
from pfl.communication import Message
from tests.algorithms import two_layers

FULL = dict(batch_size=None, loss=HalfSquaredError())
TRACE = [[0, 1, 2], [0, 2], [], [2], [0, 1]]  # client 3 never takes part
HEAD, BODY = slice(two_layers.BODY, None), slice(two_layers.BODY)
PARTS = {"body": BODY, "head": HEAD, "full": slice(None)}


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_rounds_equal_the_numpy_loop(watch, weighting):
    data, w = two_layers.problem((7, 4, 5, 3)), two_layers.start()
    settings = dict(lr=0.2, lr_decay=0.9, weight_decay=0.1)
    method = FedBABU(data.network(w), local_epochs=3, weighting=weighting, **settings, **FULL)
    history = watch(method, data, len(TRACE), trace=TRACE)
    uniform = weighting == "uniform"
    expected = two_layers.rounds(data, w, TRACE, [(BODY, 3)], uniform=uniform, **settings)
    for row, (body, heads) in zip(history.rounds, expected, strict=True):
        np.testing.assert_allclose(row["w"][BODY], body, rtol=0, atol=1e-12)
        assert np.array_equal(row["w"][HEAD], w[HEAD])
        assert (heads == w[HEAD]).all()  # of the slow loop, too


@pytest.mark.parametrize("part", PARTS)
def test_fine_tuning_equals_the_numpy_loop(fit, part):
    """Two epochs of full gradients from (φ, h_0) with the rate of the coming round, also for a
    client that never took part."""
    data, w = two_layers.problem((7, 4, 5, 3)), two_layers.start()
    settings = dict(lr=0.2, lr_decay=0.9, weight_decay=0.1)
    tuning = dict(finetune_epochs=2, finetune_part=part)
    method = FedBABU(data.network(w), **tuning, **settings, **FULL)
    fit(method, data, len(TRACE), trace=TRACE)
    seen, model = set(), method.global_model.numpy().copy()
    for clients in method.iter_clients():
        tuned = method.personalized(clients)
        assert torch.equal(method.adaptation_start(clients)[0], method.global_model)
        for i, actual in zip(clients.ids.tolist(), tuned.numpy(), strict=True):
            v = model.copy()
            for _ in range(2):
                g = two_layers.gradient(data, i, v) + 0.1 * v
                v[PARTS[part]] -= 0.2 * 0.9 ** len(TRACE) * g[PARTS[part]]
            np.testing.assert_allclose(actual, v, rtol=0, atol=1e-12)
            seen.add(i)
    assert seen == {0, 1, 2, 3}
    assert np.array_equal(method.global_model, model)


class Watched(FedBABU):
    """Records what is received, trained and sent."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trained, self.messages = [], []

    def local_sgd(self, clients, start, **kwargs):
        v = super().local_sgd(clients, start, **kwargs)
        if kwargs.get("name", "train") == "train":
            self.trained.append(v.clone())
        return v

    def client_update(self, clients, w):
        message = super().client_update(clients, w)
        assert isinstance(message, Message)
        self.messages.append((w.clone(), message))
        return message


OPTIMIZERS = {
    "plain": None,
    "momentum": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, weight_decay=0.1),
}


@pytest.mark.parametrize("engine", ["auto", "sequential", "vmap"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_head_keeps_its_bits_and_the_body_alone_is_sent(watch, optimizer, engine):
    """On the server and on every client, also with weight decay and momentum, and although every
    evaluation fine-tunes it. A message is 64 * 8 weights and 8 biases of 8 bytes."""
    torch.manual_seed(0)
    arguments = dict(lr=0.05, weight_decay=0.1, batch_size=64, finetune_epochs=1, engine=engine)
    method = Watched(MLP(64, (8,)).double(), optimizer=OPTIMIZERS[optimizer], **arguments)
    start = method.global_model.clone()
    data, trace = DigitsDataModule(5, Dirichlet(1.0)), [[0, 1, 3], [1], [3, 4]]
    history = watch(method, data, 3, trace=trace, clients_at_once=2)
    head, size = method.head, 8 * (64 * 8 + 8)
    assert torch.equal(method.global_model[head], start[head])
    assert (method.global_model[~head] != start[~head]).any()
    for (received, message), v in zip(method.messages, method.trained, strict=True):
        assert torch.equal(v[:, head], start[head].expand(len(v), -1))
        assert torch.equal(message.values[:, ~head], v[:, ~head])
        assert not message.values[:, head].any() and torch.equal(received[head], start[head])
        assert message.nbytes == size
        # What rules and privacy measure it from: the received body, and zeros like its own head.
        assert torch.equal(message.reference, torch.where(head, 0.0, received))
    for way in ("down", "up"):
        visits = [np.bincount(np.concatenate(trace[: t + 1]), minlength=5) for t in range(3)]
        assert np.array_equal(history[way], size * np.array(visits))


def test_fine_tuning_leaves_no_trace(fit):
    """The same bits with and without evaluations; what it adds are scores of its own."""
    rows, data = [], DigitsDataModule(4, Dirichlet(1.0), protocol=SplitOwn(0.3))
    for evaluate in (("test",), ()):
        torch.manual_seed(0)
        method = FedBABU(MLP(64, (8,)), lr=0.1, finetune_epochs=2)
        fit(method, data, 3, clients_per_round=2, evaluate=evaluate)
        rows.append((method.global_model.clone(), method.row))
    (w, row), (other, plain) = rows
    assert torch.equal(w, other)
    assert plain == {name: row[name] for name in plain}
    assert row["test/personalized/loss"] != row["test/global/loss"]
    assert method.client_state_names == []
