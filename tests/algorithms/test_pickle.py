"""A method's object can be sent to another process: joblib, Ray and multiprocessing pickle it."""

import copy
import io
import pickle
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

import pfl.algorithms
from models import Family, LoRA
from tests.algorithms.entries_baselines import WITH_PUBLIC, normals
from tests.algorithms.methods import (
    differing,
    everything,
    normalized_network,
    small_network,
    small_world,
)

NAMES = sorted(set(pfl.algorithms.__all__) - {"FederatedAlgorithm"})
FACTORS = {"FedExLoRA", "FLoRA", "FlexLoRA", "RoLoRA", "FedSALoRA", "FedDPA"}
# Fewer steps of the server than the defaults.
FEW = {
    "FedDF": {"server_steps": 4},
    "FedGen": {"server_steps": 4},
    "FedTGP": {"server_epochs": 4},
}


def make(name):
    arguments = {"lr": 0.05, "batch_size": 2, **FEW.get(name, {})}
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


def saved(method):
    """A method that `torch.save` has written."""
    file = io.BytesIO()
    torch.save(method, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def mlp(width):
    """A network from R^3 to two classes."""
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def same_scores(one, other):
    """Whether two evaluations have the same scores of every client."""
    assert one.keys() == other.keys()
    return all(
        np.array_equal(one[key][name], values, equal_nan=True)
        for key, scores in other.items()
        for name, values in scores.items()
    )


def statistics():
    """FedAvg whose clients keep BatchNorm's running statistics."""
    return pfl.algorithms.FedAvg(normalized_network(), lr=0.05, batch_size=2, buffers="local")


@pytest.mark.filterwarnings("ignore:The method has been through 2 rounds:UserWarning")
@pytest.mark.parametrize("make", [*(partial(make, name) for name in NAMES), statistics])
def test_a_method_is_copied_after_a_run(fit, make):
    """Each copy trains on as the method would have, bit for bit."""
    world = small_world(classes=make is not statistics)
    method = fit(make(), world, 2)
    copies = [copy.deepcopy(method), saved(method)]
    assert all(same_scores(one.evaluation.scores, method.evaluation.scores) for one in copies)
    expected, *others = [everything(fit(one, world, 1)) for one in (method, *copies)]
    assert [differing(other, expected) for other in others] == [set(), set()]


@pytest.mark.filterwarnings("ignore:The method has been through 2 rounds:UserWarning")
def test_a_method_of_several_networks_is_copied_after_a_run(fit):
    """Clients of each network go on with the models that they had."""
    networks = {f"width {width}": mlp(width) for width in (4, 6)}
    method = pfl.algorithms.FedProto(Family(networks, features=3), lr=0.05, batch_size=2)
    world = small_world(classes=True)
    fit(method, world, 2)
    copies = [copy.deepcopy(method), saved(method)]
    expected, *others = [everything(fit(one, world, 1)) for one in (method, *copies)]
    assert [differing(other, expected) for other in others] == [set(), set()]


class Keep(pl.Callback):
    """Keeps copies of the method after its second round."""

    def on_train_epoch_end(self, trainer, pl_module):
        if pl_module.rounds == 2:
            self.copies = [copy.deepcopy(pl_module), saved(pl_module)]


@pytest.mark.filterwarnings("ignore:The method has been through 2 rounds:UserWarning")
@pytest.mark.parametrize("name", ["FedAvg", "Ditto", "FedAMP"])
def test_a_callback_copies_the_method_within_a_run(fit, name):
    keep = Keep()
    world = small_world(classes=True)
    fit(make(name), world, 3, callbacks=[keep])
    expected = everything(fit(fit(make(name), world, 2), world, 1))
    others = [everything(fit(one, world, 1)) for one in keep.copies]
    assert [differing(other, expected) for other in others] == [set(), set()]


def test_a_copy_has_no_samples(fit):
    world = small_world(classes=True, copies=1000)  # 15,000 samples of 3 numbers of 8 bytes
    method = fit(pfl.algorithms.Ditto(small_network(), lr=0.05, batch_size=10_000), world, 1)
    assert len(pickle.dumps(method)) < 100_000
    assert "run" not in vars(copy.deepcopy(method))
