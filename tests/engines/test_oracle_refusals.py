"""What the oracle refuses: engines, losses, networks and data that do not fit each other."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from models import Family, SmallCNN
from pfl.algorithms import FML, FedAvg
from pfl.engines.batch import default_loss
from pfl.engines.oracle import Oracle
from pfl.parameters import ParameterSpace
from tests.networks import labels, make, mlp, normalized, problem
from tests.refusal import refused


def test_an_unknown_engine_is_refused():
    with refused("engine", "'jax'", "auto, vmap, sequential, debug"):
        Oracle(mlp(), ParameterSpace(mlp()), default_loss, "jax")


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (partial(F.cross_entropy, reduction="mean"), "partial"),
        (F.cross_entropy, "cross_entropy"),
        (lambda o, t: F.cross_entropy(o, t)[None], "<lambda>"),
    ],
    ids=["partial", "function", "shape [1]"],
)
@pytest.mark.parametrize("engine", ["sequential", "vmap", "auto"])
def test_losses_that_reduce_are_refused(loss, name, engine):
    network, _, batch = problem(mlp, (12,), labels(3))
    with refused("loss", name, "one value per sample", "reduction='none'"):
        make(network, batch.inputs[0], batch.targets[0], loss, engine)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: (o - t).square().mean(1),
        lambda o, t: (o[:, 0] - o.mean() - t).square(),
    ],
    ids=["a mean over [n, n]", "a statistic of the batch"],
)
@pytest.mark.parametrize("engine", ["sequential", "vmap", "auto"])
def test_losses_in_which_samples_meet_are_refused(loss, engine):
    targets = torch.arange(20.0).double().view(4, 5)
    network, _, batch = problem(partial(mlp, outputs=1), (12,), targets)
    with refused("loss: the loss of <lambda>", "depends on the other samples", "[10, 1]", "[10]"):
        make(network, batch.inputs[0], batch.targets[0], loss, engine)


@pytest.mark.parametrize("engine", ["sequential", "vmap", "auto"])
def test_too_few_outputs_are_refused(engine):
    network, _, batch = problem(mlp, (12,), labels(3))
    with refused("Sequential", "[3]", "4 classes", "num_classes=4"):
        make(network, batch.inputs[0], batch.targets[0], engine=engine, num_classes=4)
    flat, _, batch = problem(lambda: nn.Sequential(mlp(outputs=1), nn.Flatten(0)), (12,), labels(2))
    with refused("Sequential", "2 classes", "floating numbers"):
        make(flat, batch.inputs[0], batch.targets[0], engine=engine, num_classes=2)


def test_more_outputs_than_classes_are_fine():
    network, _, batch = problem(mlp, (12,), labels(2))
    make(network, batch.inputs[0], batch.targets[0], num_classes=2)


@pytest.mark.parametrize("engine", ["sequential", "vmap", "auto"])
def test_inputs_that_do_not_fit_are_refused(engine):
    network, _, batch = problem(mlp, (7,), labels(3))
    with refused("network", "Sequential", "[7]"):
        make(network, batch.inputs[0], batch.targets[0], engine=engine)
    network, _, batch = problem(lambda: SmallCNN(3), (8, 8), labels(3))
    with refused("network", "SmallCNN", "[8, 8]"):
        make(network, batch.inputs[0], batch.targets[0], engine=engine)


@pytest.mark.parametrize(
    ("loss", "targets", "says"),
    [
        (default_loss, torch.rand(4, 5, 2).double(), "[5, 2]"),
        (nn.MSELoss(), torch.rand(4, 5, 2).double(), "[5, 2]"),
        (nn.CrossEntropyLoss(), torch.zeros(4, 5, 2).long(), "[5, 2]"),
    ],
    ids=["default", "MSELoss", "cross entropy"],
)
@pytest.mark.parametrize("engine", ["sequential", "vmap", "auto"])
def test_targets_that_do_not_fit_are_refused(loss, targets, says, engine):
    network, _, batch = problem(mlp, (12,), targets)
    with warnings.catch_warnings(), refused("loss", "Sequential", "[5, 3]", says):
        warnings.simplefilter("ignore")  # PyTorch warns before it refuses
        make(network, batch.inputs[0], batch.targets[0], loss, engine)


def l1(outputs, targets):
    return (outputs - targets).abs()


@pytest.mark.parametrize("samples", [5, 1])
@pytest.mark.parametrize("engine", ["sequential", "vmap", "auto"])
def test_a_loss_that_pairs_every_output_with_every_target_is_refused(engine, samples):
    """[n, 1] - [n] is [n, n] in PyTorch, which only warns; the result would be nonsense.

    Also where there is only one sample to try it with: later batches are longer.
    """
    network, _, batch = problem(
        lambda: mlp(outputs=1), (12,), torch.rand(4, 5, dtype=torch.float64)
    )
    told = "loss: l1 compares outputs", "all against all; give both the same shape, as outputs"
    with warnings.catch_warnings(), refused(*told):
        warnings.simplefilter("ignore")
        make(network, batch.inputs[0, :samples], batch.targets[0, :samples], l1, engine)


def test_batch_norm_with_one_sample_is_refused_in_one_line():
    network, _, batch = problem(normalized, (12,), labels(3))
    with refused("Sequential", "more than 1 value"):
        make(network, batch.inputs[0, :1], batch.targets[0, :1])


class Bag(nn.Module):
    """Tokens whose vectors are added up, by an embedding with sparse gradients."""

    def __init__(self, layer):
        super().__init__()
        self.words = layer
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x).reshape(len(x), -1, 4).sum(1))


@pytest.mark.parametrize("engine", ["sequential", "vmap", "auto", "debug"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_sparse_gradients_is_named(kind, engine):
    tokens = torch.randint(7, (2, 5))
    with refused("network", "words of Bag", "sparse=False"):
        make(Bag(kind(7, 4, sparse=True)), tokens, torch.tensor([0, 1]), engine=engine)
    make(Bag(kind(7, 4)), tokens, torch.tensor([0, 1]))


def held(container, *, frozen=False, detached=False):
    """A network with two layers in `container(layers)`, and a head that is a layer of its own."""

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = container([nn.Linear(5, 5), nn.Linear(5, 5)])
            self.head = nn.Linear(5, 3)
            self.seen = [self.head]  # what PyTorch finds may be in a list as well
            if frozen:
                for layer in self.parts():
                    layer.requires_grad_(False)

        def parts(self):
            return self.layers.values() if isinstance(self.layers, dict) else self.layers

        def forward(self, x):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
                for layer in self.parts():
                    x = layer(x).tanh()
            return self.head(x)

    return Held()


def numbered(layers):
    return dict(enumerate(layers))


FEW = torch.linspace(-1, 1, 10).view(2, 5), torch.tensor([0, 2])


@pytest.mark.parametrize("engine", ["sequential", "vmap", "auto", "debug"])
@pytest.mark.parametrize("container", [list, tuple, numbered], ids=["list", "tuple", "dict"])
def test_layers_that_would_never_train_are_named(container, engine):
    with refused("network: Held", "layers.0.weight", "nn.ModuleList"):
        make(held(container), *FEW, engine=engine)


def test_layers_in_a_list_are_named_where_they_do_not_fit_the_others():
    """They stay where they are when PyTorch moves the network to a device or a dtype."""
    inputs, targets = FEW
    network = held(list)
    network.head.double()
    network.layers[0].double()
    with refused("network: Held", "layers.0.weight", "nn.ModuleList"):
        make(network, inputs.double(), targets)


class Scaled(nn.Module):
    """A factor that is a tensor and no parameter."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.factor = torch.ones(1, requires_grad=True)

    def forward(self, x):
        return self.factor * self.head(x)


def test_a_tensor_that_would_never_train_is_named():
    with refused("network: Scaled", "factor", "nn.Parameter"):
        make(Scaled(), *FEW)


def test_a_network_of_which_all_layers_are_in_a_list_is_refused():
    network = held(list)
    network.layers.append(network.head)
    del network.head
    with refused("network: Held", "layers.0.weight", "nn.ModuleList"):
        ParameterSpace(network)


@pytest.mark.parametrize(
    "network",
    [
        held(nn.ModuleList),
        held(list, frozen=True),
        held(list, detached=True),
        nn.Sequential(nn.Unflatten(1, (5, 1)), nn.RNN(1, 3), nn.Flatten()),
    ],
    ids=["ModuleList", "frozen teacher", "teacher without gradients", "RNN"],
)
def test_what_is_not_to_be_trained_may_be_in_a_list(network):
    if isinstance(network, nn.Sequential):  # its list of weights has those that PyTorch finds
        network = nn.Sequential(network[0], Last(network[1]))
    make(network, *FEW)


class Last(nn.Module):
    """The last state of a recurrent layer, and a head."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.memory(x)[0][:, -1])


class Mixed(nn.Module):
    """A network that does something with a whole batch between two layers."""

    def __init__(self, mix, start=None):
        super().__init__()
        self.mix = mix
        self.first = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)
        if start is not None:
            nn.init.constant_(self.head.weight, start)

    def forward(self, x):
        return self.head(self.mix(self, self.first(x)))


def softmax_over_the_batch(network, x):
    return x.softmax(0)


def center(network, x):
    return x - x.mean(0)


def center_in_training(network, x):
    return x - x.mean(0) if network.training else x


@pytest.mark.parametrize("engine", ["sequential", "vmap", "auto", "debug"])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(
    ("network", "mode"),
    [
        (Mixed(center), "evaluation"),
        (Mixed(softmax_over_the_batch), "evaluation"),
        (Mixed(center, start=0.0), "evaluation"),
        (Mixed(center_in_training), "training"),
    ],
    ids=["mean", "softmax", "last layer of zeros", "mean in training"],
)
def test_a_network_that_mixes_the_samples_of_a_batch_is_refused(network, mode, samples, engine):
    inputs, targets = FEW
    with refused("network", f"in {mode} mode", "Mixed", "other samples of the batch"):
        make(network, inputs[:samples], targets[:samples], engine=engine)


@pytest.mark.parametrize(
    "mix",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.Dropout(),
    ],
    ids=lambda layer: str(layer),
)
def test_norms_and_dropout_are_no_mixing(mix):
    network = nn.Sequential(nn.Linear(5, 4), mix, nn.Linear(4, 3))
    state = torch.get_rng_state()
    make(network, *FEW)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_change_their_weights_are_refused(kind):
    """PyTorch shortens rows of the weights in the forward pass, which models in rows would lose."""
    table = kind(5, 3, max_norm=1.0)
    layers = [table] if kind is nn.EmbeddingBag else [table, nn.Flatten()]
    network, inputs = nn.Sequential(*layers, nn.LazyLinear(2)), torch.zeros(4, 2).long()
    network(inputs)
    with refused("network: 0 is an", f"{kind.__name__} with max_norm=1.0", "give None"):
        make(network, inputs, labels(4))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("method", [FedAvg, FML])
def test_weights_that_are_computed_beside_the_parameters_are_refused(method):
    """Neither PyTorch nor we can copy them; FML copies a network before all others do."""
    network = nn.Sequential(nn.Linear(5, 4), nn.utils.weight_norm(nn.Linear(4, 3)))
    with refused("network: Sequential", "1.weight", "parametrizations.weight_norm"):
        method(network)
    with refused("network: Sequential", "1.weight"):
        method(Family({"one": network, "other": mlp()}))
    network = nn.Sequential(nn.Linear(5, 4), parametrizations.weight_norm(nn.Linear(4, 3)))
    assert method(network).space.size > 0


def test_a_tensor_that_a_forward_pass_has_left_in_a_network_is_refused():
    network = nn.Sequential(nn.Linear(5, 3))
    network.seen = network(torch.ones(1, 5))
    with refused("network: Sequential", "its tensor seen was computed", "detached"):
        FedAvg(network)
    network.seen = network.seen.detach()
    assert FedAvg(network).space.size == 18  # 5 * 3 + 3
