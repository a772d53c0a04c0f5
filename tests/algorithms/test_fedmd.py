"""FedMD against plain PyTorch, its bytes, its limit, public samples, and clients' own networks."""

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, SplitOwn, TensorDataModule
from models import MLP, Family
from pfl.algorithms import FedMD, LocalTrain
from pfl.method import PublicSamples
from pfl.randomness import generator
from tests.algorithms.class_world import (
    CLASSES,
    ENGINES,
    INPUTS,
    LABELS,
    LOCAL,
    TRACE,
    assert_rounds,
    network,
    rate,
    samples,
    world,
)
from tests.refusal import refused

PUBLIC = 7  # inputs, of which a round draws DRAWN
DRAWN = 4


def public(count=PUBLIC, width=INPUTS):
    """Inputs from R^4; the targets are no numbers, so that whoever reads them is found."""
    inputs = torch.from_numpy(np.random.default_rng(8).normal(size=(count, width)))
    none = SplitOwn(test=0.0, validation=0.0)
    return TensorDataModule(inputs, torch.zeros(count), num_clients=2, protocol=none)


def drawn(t):
    """The inputs of a round: the first of a permutation that the seed and the round decide."""
    order = generator(0, "public samples", t).permutation(PUBLIC)[:DRAWN]
    return public().samples.gather(torch.from_numpy(order))[0]


def descend(own, loss, lr, steps):
    """Takes plain steps of a network on loss(its outputs) in place, with weight decay."""
    x, of_outputs = loss
    for _ in range(steps):
        gradients = torch.autograd.grad(of_outputs(own(x)), list(own.parameters()))
        with torch.no_grad():
            for p, g in zip(own.parameters(), gradients, strict=True):
                p -= lr * (g + LOCAL["weight_decay"] * p)


def near(x, target):
    """The inputs, and the mean distance of scores from the target."""
    return x, lambda scores: (scores - target).abs().mean()


def entropy(x, y):
    return x, lambda scores: nn.functional.cross_entropy(scores, y)


def slow(networks, digest_epochs):
    """All w_i, and s̄ with its round, after each round."""
    consensus = None
    history = []
    for t, cohort in enumerate(TRACE):
        sent = []
        for i in cohort:
            own = networks[i]
            if consensus is not None:
                at, target = consensus
                descend(own, near(drawn(at), target), rate(t), digest_epochs)
            descend(own, entropy(*samples()[i]), rate(t), LOCAL["local_steps"])
            sent.append(own(drawn(t)).detach())
        if sent:
            consensus = t, torch.stack(sent).mean(0)
        rows = [nn.utils.parameters_to_vector(n.parameters()).detach().clone() for n in networks]
        number, mean = consensus
        history.append((rows, np.append(number + 1.0, mean.flatten())))
    return history


def make(given, **arguments):
    settings = {"public": public(), "public_samples": DRAWN, "batch_size": None}
    return FedMD(given, **settings | LOCAL | arguments)


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    """With two full steps of digesting."""
    rows = [
        (torch.stack(own).numpy(), state)
        for own, state in slow([network() for _ in LABELS], digest_epochs=2)
    ]
    method = make(network(), digest_epochs=2, engine=engine)
    assert_rounds(watch, method, rows, "w_i", "consensus")


def test_networks_of_the_clients_own(watch):
    """Clients 0 and 2 have the wide one, the others the deep one."""

    def networks():
        torch.manual_seed(2)
        return {"wide": MLP(4, (5,), 3).double(), "deep": MLP(4, (3, 2), 3).double()}

    method = make(Family(networks()), digest_epochs=1)
    watch(method, world(), len(TRACE), trace=TRACE)
    expected, state = slow([networks()[("wide", "deep")[i % 2]] for i in range(4)], 1)[-1]
    for i, row in enumerate(method.client_rows("w", np.arange(4))):
        np.testing.assert_allclose(row[: len(expected[i])], expected[i], rtol=0, atol=1e-12)
    np.testing.assert_allclose(method.consensus, state, rtol=0, atol=1e-12)


def test_the_ledger_books_scores_of_public_samples(watch):
    """4 x 3 numbers of 8 bytes up; down these and the number of their round, once there are any."""
    history = watch(make(network()), world(), 6, trace=TRACE)
    down, up = np.zeros((2, 4))
    for t, (row, cohort) in enumerate(zip(history.rounds, TRACE, strict=True)):
        for i in cohort:
            down[i] += 8 * (1 + DRAWN * CLASSES) * (t > 0)
            up[i] += 8 * DRAWN * CLASSES
        assert row["down"].tolist() == down.tolist()
        assert row["up"].tolist() == up.tolist()


def test_without_digesting_it_is_local_training(watch):
    """Bit for bit, also with mini-batches."""
    settings = LOCAL | {"batch_size": 2, "engine": "sequential"}
    methods = make(network(), digest_epochs=0, **settings), LocalTrain(network(), **settings)
    ends = [watch(method, world(), 6, trace=TRACE)["w_i"][-1] for method in methods]
    assert np.array_equal(*ends)


def test_a_round_draws_other_inputs_each_time_and_the_same_for_everyone():
    one = PublicSamples(public(), DRAWN)
    like = torch.zeros(1, dtype=torch.float64)
    for t in range(3):
        assert torch.equal(one.inputs(0, t, like), drawn(t))
    assert not torch.equal(drawn(0), drawn(1))
    assert PublicSamples(public(), 100).size == PUBLIC


def test_public_inputs_of_another_shape_are_refused(fit):
    with refused("model.public: the inputs of TensorDataModule have the shape [5] and those of"):
        fit(make(network(), public=public(width=5)), world(), 1)


def test_the_clients_own_data_may_be_public(fit):
    data = DigitsDataModule(num_clients=3)
    method = FedMD(MLP(64, (8,)), public=data, public_samples=20)
    assert fit(method, data, 2).consensus.shape == (1 + 20 * 10,)


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match=r"model\.digest_epochs: -1"):
        make(network(), digest_epochs=-1)
