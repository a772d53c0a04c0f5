"""What is said of networks and data that do not fit each other."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pfl.engines.oracle import Oracle
from pfl.engines.probe import _advice, _instead_of_classes, _outputs_needed, first_line
from pfl.parameters import ParameterSpace
from tests.refusal import refused


@pytest.mark.parametrize(
    ("loss", "classes", "needed"),
    [
        (nn.CrossEntropyLoss(), 5, 5),
        (nn.CrossEntropyLoss(ignore_index=4), 5, 3),  # of 0, 2 and 4, which means no class
        (nn.CrossEntropyLoss(ignore_index=3), 5, 5),
        (nn.MSELoss(), None, None),
    ],
)
def test_a_class_that_the_loss_ignores_needs_no_output(loss, classes, needed):
    targets = torch.tensor([[0, 2], [4, 2]])
    assert _outputs_needed(SimpleNamespace(loss=loss), targets, classes) == needed


@pytest.mark.parametrize(
    ("outputs", "targets", "threshold", "words"),
    [
        ([4, 1], [4], None, "for a regression, make the targets floating numbers"),
        ([4, 1], [4], 0.0, "for one output with BCEWithLogitsLoss, make the targets floating"),
        ([4, 2], [4], None, "if the labels begin with 1, subtract 1"),
        ([4, 2, 3], [4, 3], None, "if 2 means that there is no class, make it -100"),
    ],
)
def test_what_else_can_be_meant_by_few_outputs(outputs, targets, threshold, words):
    runner = SimpleNamespace(label_threshold=threshold, loss=nn.BCEWithLogitsLoss())
    said = _instead_of_classes(runner, torch.zeros(outputs), torch.zeros(targets), 3)
    assert said.startswith(words)


@pytest.mark.parametrize(
    ("error", "inputs", "words"),
    [
        ("wrong type", torch.zeros(2, 3, dtype=torch.uint8), "; the inputs are torch.uint8: make"),
        ("wrong size", torch.zeros(2, 3, dtype=torch.uint8), ""),
        ("wrong type", torch.zeros(2, 3), ""),
        ("Expected more than 1 value per channel", torch.zeros(1, 3), "; take another batch_size"),
        ("size", torch.zeros(2, 8, 8, 3), "; channels come first, as of inputs.transpose(0, 3"),
        (
            "to have 1 channels",
            torch.zeros(2, 8, 8),
            "; images need an axis of channels, as of inp",
        ),
        ("size", torch.zeros(2, 8, 8, 1), "; channels come first, as of inputs.transpose(0, 3"),
        ("size", torch.zeros(2, 8, 8, 2), ""),
        ("size", torch.zeros(2, 3, 3, 3), ""),
        ("size", torch.zeros(2, 8, 6, 3), ""),
        ("size", torch.zeros(2, 3, 8, 8), ""),
    ],
)
def test_advice_for_inputs_that_a_network_cannot_process(error, inputs, words):
    said = _advice(RuntimeError(error), inputs)
    assert said.startswith(words)
    assert bool(said) == bool(words)


def test_the_first_line_of_an_error():
    assert first_line(ValueError("\n  one\ntwo")) == "one"
    assert first_line(ValueError("\n")) == "no message"


def test_a_loss_that_is_nan_for_finite_outputs_is_refused():
    network = nn.Linear(2, 3)

    def gap(outputs, targets):
        return outputs.sum(1) * float("nan")

    oracle = Oracle(network, ParameterSpace(network), gap, "sequential")
    with refused("loss: gap gives NaN for finite outputs before any training"):
        oracle.inspect(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]), 3)
