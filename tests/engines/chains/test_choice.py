"""Which runs get the engines of chains, and in which order they are tried."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models import MLP, LeNet5, SmallCNN
from pfl.engines.batch import Batch, default_loss
from pfl.engines.chains.chain import KINDS
from pfl.engines.chains.engine import ChainEngine, CompiledChainEngine
from pfl.engines.chains.kernels import train
from pfl.engines.common_layers import COMMON
from pfl.engines.registry import engines_for
from pfl.torchscript import is_scripted
from tests.networks import cross_entropy, labels, make, mlp, problem

COMPILED = "compiled chain" if is_scripted(train) else "eager chain"


@pytest.mark.parametrize(
    ("build", "shape", "loss", "engine", "batched"),
    [
        (lambda: MLP(12, (7,), 3), (12,), default_loss, COMPILED, True),
        (lambda: MLP(12, (7,), 3), (12,), cross_entropy, "chain", True),
        (lambda: LeNet5(num_classes=3, image_size=16), (1, 16, 16), default_loss, COMPILED, False),
        (lambda: SmallCNN(2, 8, 3, width=2), (2, 8, 8), default_loss, COMPILED, False),
    ],
    ids=["linear chain", "own loss", "convolutions", "normalization"],
)
def test_auto_takes_a_chain_where_there_is_one(build, shape, loss, engine, batched):
    """On a CPU. Without TorchScript the compiled chain is the eager one."""
    network, _, batch = problem(build, shape, labels(3))
    chosen = make(network, batch.inputs[0], batch.targets[0], loss=loss, engine="auto").engine
    assert (chosen.name, chosen.batched) == (engine, batched)


@pytest.mark.parametrize("asked", ["auto", "vmap"])
def test_chains_are_tried_first(asked):
    assert engines_for(asked)[:2] == [CompiledChainEngine, ChainEngine]


def test_every_common_layer_has_a_kernel():
    assert KINDS.keys() == set(COMMON)


def obstacle(network, shape, asked="auto", loss=default_loss):
    """Why the compiled chain does not run a network, in words; None if it may."""
    targets = torch.tensor([0, 1, 2])
    runner = make(network, torch.randn(3, *shape), targets, loss=loss, engine="sequential").runner
    batch = Batch(torch.randn(1, 3, *shape), targets[None], [3])
    return CompiledChainEngine.obstacle(runner, batch, asked)


def test_reasons_are_given_in_words():
    assert obstacle(MLP(12, (7,), 3), (12,)) is None
    assert obstacle(mlp(nn.GELU()), (12,)) == "it is not a chain of common layers"
    assert obstacle(MLP(12, (7,), 3), (12,), loss=cross_entropy) == "its loss is not cross entropy"
    network = LeNet5(num_classes=3, image_size=16)
    assert obstacle(network, (1, 16, 16)) is None
    one_by_one = "chains with convolutions or BatchNorm run client after client, on CPUs alone"
    assert obstacle(network, (1, 16, 16), "vmap") == one_by_one


def test_a_chain_takes_objectives_only_if_its_last_layer_is_the_head():
    """An objective sees the head's input: the features."""
    inputs = torch.randn(3, 12)
    targets = torch.tensor([0, 1, 2])
    assert make(MLP(12, (7,), 3), inputs, targets, engine="auto").engine.serves_objectives
    layers = (nn.Linear(12, 8), nn.Linear(8, 3), nn.Tanh())
    engine = make(nn.Sequential(*layers), inputs, targets, engine="auto").engine
    assert engine.name == COMPILED and not engine.serves_objectives


def test_scores_of_a_chain_are_pytorchs_and_of_equal_outputs_the_first_counts():
    targets, network = torch.arange(50) % 3, MLP(4, (5,), 3)
    engine = make(network, torch.randn(50, 4), targets, engine="auto", num_classes=3).engine
    assert engine.keeps_inputs  # it is a chain's
    outputs = torch.randn(50, 3, dtype=torch.float64)
    outputs[:10, 2] = outputs[:10, 1] = 5.0
    outputs[0, 0] = torch.nan
    losses, correct = engine.scores(outputs, targets)
    expected = F.cross_entropy(outputs, targets, reduction="none")
    torch.testing.assert_close(losses, expected, equal_nan=True)
    assert correct[1:10].tolist() == [1.0, 0.0, 0.0] * 3  # class 1, not 2
    assert torch.equal(correct, (outputs.argmax(1) == targets).double())
