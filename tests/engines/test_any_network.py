"""Networks that users bring: whatever engine `auto` takes, a run ends where `sequential` ends.

`sequential` itself is held to plain PyTorch in test_oracle.py.
"""

import copy
from types import MethodType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from datamodules import SharedTest
from pfl.algorithms import FedPD, FedSLR, LocalTrain
from pfl.engines.batch import default_loss
from pfl.engines.oracle import Oracle
from pfl.errors import ConfigError
from pfl.parameters import ParameterSpace
from tests.problems import owned, run


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 6), nn.Linear(5, 3)
        self.memory = kind(6, 5, batch_first=True)

    def forward(self, x):
        return self.head(self.memory(self.embedding(x))[0][:, -1])


class Written(nn.Module):
    """A layer, what a function does with its input, and another."""

    def __init__(self, function, width=6):
        super().__init__()
        self.first, self.function = nn.Linear(6, width), function
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.function(self, self.first(x)))


def keep(network, x):
    network.features = x.relu()
    return network.features


def chain(*layers):
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), *layers, nn.Linear(4, 3))


def hooked(register):
    network = chain()
    getattr(network[2], register)(lambda module, *gradients: (0.5 * gradients[0][0],))
    return network


def changed():
    network = chain()
    network[2].forward = MethodType(lambda self, x: F.linear(x, 2 * self.weight), network[2])
    return network


def twice(layer, width=5):
    between = nn.Linear(width, width)
    return nn.Sequential(nn.Linear(6, width), layer, between, layer, nn.Linear(width, 3))


def by_pieces(network, x):
    """Takes views of its feature maps, which only one layout has."""
    images, channels, *_ = x.shape
    return x.view(images * channels, -1).mean(1).view(images, channels)


class Pieces(Written):
    def __init__(self):
        super().__init__(by_pieces, width=4)
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2))


# What they are given: 6 values, or 6 tokens, or images of 2x8x8.
VECTORS = {
    "BatchNorm without statistics": lambda: chain(nn.BatchNorm1d(4, track_running_stats=False)),
    "keeps what it computed": lambda: Written(keep),
    "changes its input": lambda: Written(lambda network, x: x.sub_(1)),
    "backward hook": lambda: hooked("register_full_backward_hook"),
    "backward pre-hook": lambda: hooked("register_full_backward_pre_hook"),
    "another forward": changed,
    "PReLU twice": lambda: twice(nn.PReLU()),
    "Linear twice": lambda: twice(nn.Linear(5, 5)),
}
TOKENS = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "embedding by frequency": lambda: nn.Sequential(
        nn.Embedding(7, 6, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(36, 3)
    ),
}
IMAGES = {
    "pooling only": lambda: nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Flatten(), nn.Linear(128, 3)),
    "linear layer of rows": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Linear(6, 4), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)
    ),
    "views": Pieces,
}
NETWORKS = VECTORS | TOKENS | IMAGES


def world(name):
    """Clients with 10, 6 and 4 samples, so that batches are padded."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 6, generator=rng, dtype=torch.float64)
    if name in TOKENS:
        inputs = torch.randint(7, (24, 6), generator=rng)
    elif name in IMAGES:
        inputs = torch.randn(24, 2, 8, 8, generator=rng, dtype=torch.float64)
    return dealt(inputs, torch.randint(3, (24,), generator=rng))


def dealt(inputs, targets):
    train, test = (inputs[:20], targets[:20]), (inputs[20:], targets[20:])
    owners = np.repeat([0, 1, 2], [10, 6, 4])
    return owned(owners, *train, *test, protocol=SharedTest(0.0))


def both(make, data, root, **settings):
    """The same run with `sequential` and with `auto`: equal models, states and scores."""
    rows = []
    for engine in ("sequential", "auto"):
        torch.manual_seed(0)
        method = run(make(engine), data, 2, root=root / engine, **settings)
        states = {name: method.store.read(name, np.arange(3)) for name in method.store.names}
        rows.append({**method.row, **states, "w": method.global_model})
    for name, expected in rows[0].items():
        torch.testing.assert_close(rows[1][name], expected, rtol=1e-9, atol=1e-11)
    return method


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_run_with_auto_ends_where_the_sequential_engine_ends(tmp_path, threads, name, number):
    threads(number)

    def make(engine):
        size = 4 if "BatchNorm" in name else 5  # the second client's last batch has one sample
        return FedSLR(NETWORKS[name](), lr=0.1, batch_size=size, engine=engine)

    both(make, world(name), tmp_path)


class Averaging(nn.Module):
    """Remembers what its positive inputs are on average."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().relu().mean())
        return self.head(x + self.mean)


def looked_at(network, inputs):
    oracle = Oracle(network, ParameterSpace(network), default_loss)
    oracle.inspect(inputs, torch.tensor([0, 1]))
    return oracle


def test_what_the_first_samples_do_not_show_is_found_all_the_same():
    """Statistics that stay 0, and a layer whose effect two equal samples do not show."""
    assert looked_at(Averaging(), -torch.ones(2, 6)).buffers.names == ["mean"]
    equal = looked_at(VECTORS["BatchNorm without statistics"](), torch.ones(2, 6))
    assert equal.engine.name == "sequential"


@pytest.mark.parametrize("name", VECTORS)
def test_two_gradients_of_one_batch_are_those_of_the_sequential_engine(tmp_path, name):
    def make(engine):
        settings = {"variance_reduction": True, "lr": 0.1, "batch_size": 4}
        return FedPD(VECTORS[name](), engine=engine, **settings)

    both(make, world(name), tmp_path)


def test_a_network_may_change_its_input(tmp_path):
    """x.sub_(1) against x - 1, with two gradients of each batch."""
    actual = []
    for function in (lambda network, x: x, lambda network, x: x - 1, lambda network, x: x.sub_(1)):
        torch.manual_seed(0)
        network = Written(function)
        network.first = nn.Identity()
        method = FedPD(network, variance_reduction=True, lr=0.1, batch_size=5)
        actual.append(run(method, world(""), 2, root=tmp_path).global_model)
    torch.testing.assert_close(actual[2], actual[1], rtol=0, atol=1e-12)
    assert not torch.allclose(actual[0], actual[1], atol=1e-3)


def test_inputs_with_one_axis_more_are_trained(tmp_path):
    """Inputs [N, 1, 6] and targets [N, 1, 3] of a network that flattens nothing."""
    rng = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(24, 1, 6, generator=rng), torch.randn(24, 1, 3, generator=rng)

    def make(engine):
        return LocalTrain(chain(), lr=0.1, batch_size=5, loss=nn.MSELoss(), engine=engine)

    both(make, dealt(inputs.double(), targets.double()), tmp_path)


def test_samples_of_a_single_token_are_trained(tmp_path):
    rng = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randint(n, (24,), generator=rng) for n in (7, 3))

    def make(engine):
        network = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3))
        return LocalTrain(network, lr=0.1, batch_size=5, engine=engine)

    assert both(make, dealt(inputs, targets), tmp_path).oracle.engine.name == "vmap"


def test_a_loss_that_draws_follows_the_seed_of_the_run_only(tmp_path):
    class Noisy(nn.Module):
        def forward(self, outputs, targets):
            noise = 0.3 * torch.randn_like(outputs)
            return F.cross_entropy(outputs + noise, targets, reduction="none")

    network, models = chain(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        method = LocalTrain(copy.deepcopy(network), loss=Noisy(), batch_size=5)
        models.append(run(method, world(""), 1, root=tmp_path).store.read("w", np.arange(3)))
    assert torch.equal(*models)


def test_layers_that_autocast_keeps_in_full_precision(tmp_path):
    """vmap does not take LayerNorm there, which only a trial under autocast shows."""
    torch.manual_seed(0)
    network, data = chain(nn.LayerNorm(4)).float(), world("")
    actual = []
    for engine in ("sequential", "auto"):
        method = LocalTrain(copy.deepcopy(network), lr=0.1, batch_size=5, engine=engine)
        run(method, data, 2, root=tmp_path, precision="bf16-mixed")
        actual.append(method.store.read("w", np.arange(3)))
    assert torch.equal(*actual)


def test_a_prox_center_may_be_a_number(tmp_path):
    """Of |v - center|^2: as a vector of that number."""

    class Centered(LocalTrain):
        center = 1.0

        def client_update(self, clients, w):
            v = self.local_sgd(clients, w, prox_weight=0.5, prox_center=self.center)
            clients.state["w"] = v
            return v

    network, actual = chain(), []
    for vector in (False, True):
        method = Centered(copy.deepcopy(network), lr=0.1, batch_size=5)
        if vector:
            method.center = torch.ones(method.space.size, dtype=torch.float64)
        actual.append(run(method, world(""), 1, root=tmp_path).store.read("w", np.arange(3)))
    torch.testing.assert_close(*actual, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("network", "batch_size", "says"),
    [
        (Written(lambda network, x: (x, x)), 5, "cannot process inputs"),
        (nn.Sequential(nn.LSTM(6, 3)), 5, "returns a tuple; it must return one tensor"),
        (chain(nn.BatchNorm1d(4)), 3, "a batch of one sample, as a client's last one is"),
        (Written(lambda network, x: network.missing), 5, "no attribute 'missing'"),
        (Written(lambda network, x: torch._assert(False, "Too small")), 5, "inputs .* Too small"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path, network, batch_size, says):
    with pytest.raises(ConfigError, match=says) as error:
        run(LocalTrain(network, batch_size=batch_size), world(""), 1, root=tmp_path)
    assert "\n" not in str(error.value)


def test_parts_of_one_sample_are_refused_in_one_line(tmp_path):
    """All mini-batches have 5 or 4 samples; in three parts 5 samples are 2, 2 and 1."""
    torch.manual_seed(0)
    network = chain(nn.BatchNorm1d(4))
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 6, generator=rng, dtype=torch.float64)
    targets = torch.randint(3, (24,), generator=rng)
    data = owned(np.repeat([0, 1], [15, 9]), inputs, targets)
    with pytest.raises(ConfigError, match=r"a part of one with model.accumulate") as error:
        run(LocalTrain(network, batch_size=5, accumulate=3), data, 1, root=tmp_path)
    assert "\n" not in str(error.value)
    run(LocalTrain(network, batch_size=5, accumulate=2), data, 1, root=tmp_path)


class SameShapes(nn.Module):
    """A loss that asserts outputs and targets of one shape."""

    def forward(self, outputs, targets):
        torch._assert(outputs.shape == targets.shape, "Shapes differ")
        return (outputs - targets).square().mean(1)


def test_a_loss_whose_assertion_fails_is_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"loss: SameShapes cannot compare .*: Shapes differ"):
        run(LocalTrain(chain(), loss=SameShapes()), world(""), 1, root=tmp_path)


def test_a_class_in_the_place_of_a_network_is_refused():
    with pytest.raises(ConfigError, match=r"model\.network: .*Linear.*; it must be a module"):
        LocalTrain(nn.Linear)


def test_an_error_leaves_the_process_as_it_was(tmp_path, threads):
    threads(2)

    class Wrong(LocalTrain):
        def server_update(self, mean):
            raise ZeroDivisionError

    method = Wrong(chain())
    with pytest.raises(ZeroDivisionError):
        run(method, world(""), 1, root=tmp_path)
    assert torch.get_num_threads() == 2 and method.groups.threads.count == 1
