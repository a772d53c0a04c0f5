"""What must not depend on how clients are put together: engines, chunks, and neighbours' sizes.

test_conformance.py asks that of every method; here are convolutions, optimizers and precision.
"""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl import FederatedLoop
from pfl.algorithms import LPGD, FedAvg, FedSLR, LocalTrain
from pfl.clients import Clients, LocalSchedule
from pfl.models.cnn import SmallCNN

METHODS = {
    "FedAvg": FedAvg,
    "FedAvg, Adam": partial(FedAvg, optimizer=torch.optim.Adam),
    "FedSLR": partial(FedSLR, proximal_step=1.0, low_rank_penalty=0.05, sparse_penalty=0.01),
    "LPGD": partial(LPGD, low_rank_penalty=0.05),
}
NETWORKS = {"MLP": lambda: MLP(64, (8,)), "CNN": lambda: SmallCNN(width=4)}


@pytest.fixture(scope="module")
def digits():
    """Five clients of very unequal sizes."""
    datamodule = DigitsDataModule(num_clients=5, partition=Dirichlet(0.2), seed=1)
    sizes = datamodule.client_sizes
    assert len(set(-(-sizes // 64))) > 3  # numbers of local steps differ
    return datamodule


def everything(watch, digits, method, network, engine, at_once, precision):
    """Global model and all client states after two rounds of 4 of the 5 clients."""
    torch.manual_seed(0)
    algorithm = METHODS[method](NETWORKS[network](), lr=0.1, batch_size=64, engine=engine)
    arguments = dict(precision=precision, clients_per_round=4, clients_at_once=at_once, evaluate=())
    history = watch(algorithm, digits, 2, **arguments)
    result = {"w": history["w"][-1], "up": history["up"][-1], "down": history["down"][-1]}
    for name in algorithm.store.names:
        result[f"client {name}"] = algorithm.store.read(name, np.arange(5)).numpy()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("method", ["FedAvg, Adam", "FedSLR", "LPGD"])
def test_engines_and_chunks_agree_on_convolutions(watch, digits, method):
    """Against one client after another by the plain loop: in float64 the order of sums is all that
    differs, so 1e-10 leaves no room for a masked row that moves or a client in a wrong row."""
    first = everything(watch, digits, method, "CNN", "sequential", 1, "64-true")
    for engine, at_once in (("sequential", 4), ("vmap", 1), ("vmap", 2), ("vmap", 4)):
        other = everything(watch, digits, method, "CNN", engine, at_once, "64-true")
        for name, values in first.items():
            scale = np.abs(values).max()
            arguments = dict(rtol=0, atol=1e-10 * scale, err_msg=f"{name} {engine} {at_once}")
            np.testing.assert_allclose(other[name], values, **arguments)


# With singular values, once a round or in every step, both are about 1e-6 from double precision
# (more or less by the CPU: matrix kernels differ).
@pytest.mark.parametrize(
    ("method", "tolerance"), [("FedAvg", 1e-6), ("FedSLR", 4e-6), ("LPGD", 4e-6)]
)
def test_engines_agree_in_single_precision(watch, digits, method, tolerance):
    first = everything(watch, digits, method, "MLP", "sequential", 1, "32-true")
    other = everything(watch, digits, method, "MLP", "vmap", None, "32-true")
    assert first["w"].dtype == np.float32
    for name, values in first.items():
        error = np.linalg.norm((other[name] - values).astype(float))
        assert error <= tolerance * np.linalg.norm(values.astype(float)), name


# ---- every client as if it were alone -----------------------------------------------------------

OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.02),
    "Nesterov": partial(torch.optim.SGD, momentum=0.8, nesterov=True),
    "Adam": partial(torch.optim.Adam, betas=(0.8, 0.9)),
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.3),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5),
}


def train_one_client(model, own, digits, i, round_index=0, weight_decay=0.0, precision=nullcontext):
    """Two local epochs of client i in a round, by a plain loop with an optimizer of its own."""
    data, (first, *_) = FederatedLoop(digits), model.parameters()
    data.setup()
    samples = data.client_data(torch.device("cpu"))
    alone = Clients(np.array([i]), round_index, samples, dtype=first.dtype)
    for batch in alone.batches(LocalSchedule(64, epochs=2)):
        own.zero_grad()
        with precision():
            loss = nn.functional.cross_entropy(model(batch.inputs[0]), batch.targets[0])
        loss.backward()
        for parameter in model.parameters():
            parameter.grad += weight_decay * parameter.detach()
        own.step()


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_client_trains_as_if_alone(fit, digits, name, engine):
    """Each client's model equals that of a plain training loop with a torch.optim optimizer of its
    own on the same batches: momentum moves no client whose samples are used up, and every round
    starts with a fresh optimizer."""
    optimizer, lr, rounds = OPTIMIZERS[name], 0.02, 2

    def network():
        torch.manual_seed(0)
        return MLP(64, (8,)).double()

    arguments = dict(lr=lr, lr_decay=0.5, local_epochs=2, batch_size=64, weight_decay=0.01)
    algorithm = LocalTrain(network(), optimizer=optimizer, engine=engine, **arguments)
    fit(algorithm, digits, rounds, evaluate=())
    for i in range(5):
        model = network()
        for round_index in range(rounds):
            own = optimizer(model.parameters(), lr=lr * 0.5**round_index)
            train_one_client(model, own, digits, i, round_index, weight_decay=0.01)
        expected = nn.utils.parameters_to_vector(model.parameters()).detach()
        actual = algorithm.store.read("w", np.array([i]))[0]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


def test_16_bits_are_the_network_s_only(fit, digits):
    """bf16-mixed: a client's model is that of a plain loop in float32 whose forward pass alone is
    under autocast. vmap's products may round otherwise, by 2^-8 each, but are no float32 ones."""

    def network():
        torch.manual_seed(0)
        return MLP(64, (8,))

    def alone(i, enabled):
        model = network()
        own = torch.optim.SGD(model.parameters(), lr=0.05)
        precision = partial(torch.autocast, "cpu", torch.bfloat16, enabled=enabled)
        train_one_client(model, own, digits, i, precision=precision)
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    start = nn.utils.parameters_to_vector(network().parameters()).detach()
    for engine, tolerance in (("sequential", 1e-6), ("vmap", 0.02)):
        algorithm = LocalTrain(network(), lr=0.05, local_epochs=2, batch_size=64, engine=engine)
        fit(algorithm, digits, 1, evaluate=(), precision="bf16-mixed")
        actual = algorithm.store.read("w", np.arange(5))
        assert actual.dtype == torch.float32
        for i in range(5):
            expected, exact = alone(i, True), alone(i, False)
            assert (actual[i] - expected).norm() <= tolerance * (expected - start).norm()
            assert (actual[i] - exact).norm() > 1e-4 * (expected - start).norm()
