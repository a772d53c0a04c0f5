"""A method's object can be sent to another process: joblib, Ray and multiprocessing pickle it."""

import copy
import pickle

import pytest
import torch
from torch import nn

import pfl.algorithms
from models import LoRA
from tests.algorithms.entries_baselines import WITH_PUBLIC, normals
from tests.algorithms.methods import differing, everything, small_world

NAMES = sorted(set(pfl.algorithms.__all__) - {"FederatedAlgorithm"})
FACTORS = {"FedExLoRA", "FLoRA", "FlexLoRA", "RoLoRA", "FedSALoRA", "FedDPA"}


def make(name):
    arguments = {"lr": 0.05, "batch_size": 2}
    if name in FACTORS:
        pair = 0.4 if name == "FedDPA" else None
        arguments["trainable"] = LoRA(rank=2, layers=["0"], pair=pair)
    if name == "FedBuff":
        arguments["buffer_size"] = 2
    if name == "FedFomo":
        arguments["judged_on"] = "training"
    if name in WITH_PUBLIC:
        arguments["public"] = normals(5, (3,))
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)
    return getattr(pfl.algorithms, name)(nn.Sequential(*layers).double(), **arguments)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_that_was_pickled_or_copied_trains_as_before(fit, name):
    """Clients of a copy begin with the copy's own model, whatever became of the first one's."""
    method = make(name)
    pickled, copied = pickle.loads(pickle.dumps(method)), copy.deepcopy(method)
    method.global_model.fill_(7.0)
    runs = [
        fit(one, small_world(classes=True), 1, evaluate=()) for one in (make(name), pickled, copied)
    ]
    expected, *others = map(everything, runs)
    assert [differing(other, expected) for other in others] == [set(), set()]
