"""What the oracle refuses: engines, losses, networks and data that do not fit each other."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models import SmallCNN
from pfl.engines.batch import default_loss
from pfl.engines.oracle import Oracle
from pfl.parameters import ParameterSpace
from tests.networks import labels, make, mlp, normalized, problem
from tests.refusal import refused


def test_an_unknown_engine_is_refused():
    with refused("engine", "'jax'", "auto, sequential, vmap, debug"):
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


@pytest.mark.parametrize("samples", [5, 1])
@pytest.mark.parametrize("engine", ["sequential", "vmap", "auto"])
def test_a_loss_that_pairs_every_output_with_every_target_is_refused(engine, samples):
    """[n, 1] - [n] is [n, n] in PyTorch, which only warns; the result would be nonsense.

    Also where there is only one sample to try it with: later batches are longer.
    """
    network, _, batch = problem(
        lambda: mlp(outputs=1), (12,), torch.rand(4, 5, dtype=torch.float64)
    )
    with warnings.catch_warnings(), refused("loss", "L1Loss"):
        warnings.simplefilter("ignore")
        make(network, batch.inputs[0, :samples], batch.targets[0, :samples], nn.L1Loss(), engine)


def test_batch_norm_with_one_sample_is_refused_in_one_line():
    network, _, batch = problem(normalized, (12,), labels(3))
    with refused("Sequential", "more than 1 value"):
        make(network, batch.inputs[0, :1], batch.targets[0, :1])


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_change_their_weights_are_refused(kind):
    """PyTorch shortens rows of the weights in the forward pass, which models in rows would lose."""
    table = kind(5, 3, max_norm=1.0)
    layers = [table] if kind is nn.EmbeddingBag else [table, nn.Flatten()]
    network, inputs = nn.Sequential(*layers, nn.LazyLinear(2)), torch.zeros(4, 2).long()
    network(inputs)
    with refused("network: 0 is an", f"{kind.__name__} with max_norm=1.0", "give None"):
        make(network, inputs, labels(4))
