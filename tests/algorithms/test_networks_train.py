"""Every network trains a round with FedAvg, FedSLR and FedRep, and declares its head."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import models
from pfl.algorithms import FedAvg, FedRep, FedSLR
from pfl.method import head_name
from tests.problems import owned, run

IMAGES = {
    "FedCLUPCNN-2": (lambda: models.FedCLUPCNN(2, image_size=8), (1, 8, 8)),
    "FedCLUPCNN-3": (lambda: models.FedCLUPCNN(3, image_size=8), (1, 8, 8)),
    "FedCLUPCNN-5": (lambda: models.FedCLUPCNN(5, image_size=8), (1, 8, 8)),
    "MNIST-CNN": (lambda: models.CNN(image_size=8, hidden=16), (1, 8, 8)),
    "CIFAR10CNN": (lambda: models.CIFAR10CNN(image_size=8), (3, 8, 8)),
    "FEMNISTCNN": (lambda: models.FEMNISTCNN(10, image_size=4), (1, 4, 4)),
    "CelebACNN": (lambda: models.CelebACNN(10, image_size=8, width=4), (3, 8, 8)),
    "LeNet5": (lambda: models.LeNet5(image_size=16), (1, 16, 16)),
    "LeNet5-32": (lambda: models.LeNet5(1, 10, 12, (16, 32), padding=2), (1, 12, 12)),
    "AlexNet": (lambda: models.AlexNet(hidden=8), (3, 12, 12)),
    "VGG11": (lambda: models.VGG11(), (3, 32, 32)),
    "ResNet18-group": (lambda: models.ResNet18(), (3, 4, 4)),
    "ResNet18-batch": (lambda: models.ResNet18(norm="batch", small_images=False), (3, 32, 32)),
    "GoogLeNet": (lambda: models.GoogLeNet(), (3, 8, 8)),
    "DenseNet121": (lambda: models.DenseNet121(), (3, 8, 8)),
    "TorchVision": (lambda: models.TorchVision("mnasnet0_5", norm="group"), (3, 32, 32)),
    "Timm": (lambda: models.Timm("test_efficientnet", norm="group"), (3, 16, 16)),
}
TEXTS = {
    "Sent140LSTM": (lambda: models.Sent140LSTM(10, 10, 6, 5), ()),
    "CharLSTM": (lambda: models.CharLSTM(10, hidden=5), ()),
    "CharLSTM-every-token": (lambda: models.CharLSTM(10, hidden=5, every_token=True), (4,)),
}
METHODS = {
    "FedAvg": (FedAvg, {}),
    "FedSLR": (FedSLR, {"proximal_step": 1.0}),
    "FedRep": (FedRep, {}),
}
# Singular values of 7 to 12 million parameters take tens of seconds. Their layers are of the kinds
# of the other networks; here both components are sparse.
NO_SINGULAR_VALUES = ("VGG11", "ResNet18", "GoogLeNet", "DenseNet121", "AlexNet")


def data(inputs, targets):
    return owned(np.array([0, 0, 1, 1]), inputs, targets)


def train(build, method, data, tmp_path, **kwargs):
    """One local step of two clients; returns the method and the initial network."""
    torch.manual_seed(0)
    network = build()
    before = copy.deepcopy(network)
    kind, arguments = METHODS[method]
    algorithm = kind(network, **{"lr": 0.01, "batch_size": 2, **arguments, **kwargs})
    run(algorithm, data, 1, root=tmp_path, precision="32-true")
    return algorithm, before


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("build", "shape"), IMAGES.values(), ids=IMAGES)
def test_a_network_for_images_trains_a_round(build, shape, method, request, tmp_path):
    torch.manual_seed(1)
    images = data(torch.rand(4, *shape), torch.tensor([0, 1, 2, 9]))
    sparse = method == "FedSLR" and any(n in request.node.name for n in NO_SINGULAR_VALUES)
    extra = {"global_component": "sparse", "low_rank_penalty": 1e-9} if sparse else {}
    algorithm, before = train(build, method, images, tmp_path, **extra)
    check(algorithm, before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("build", "targets"), TEXTS.values(), ids=TEXTS)
def test_a_network_for_text_trains_a_round(build, targets, method, tmp_path):
    torch.manual_seed(1)
    texts = data(torch.randint(10, (4, 4)), torch.randint(10, (4, *targets)))
    algorithm, before = train(build, method, texts, tmp_path)
    assert algorithm.oracle.engine.name == "sequential"  # vmap has no fast rule for LSTMs
    check(algorithm, before)


def check(algorithm, before):
    """All weights have moved, and the head is the module `head`.

    Biases are left out: before a BatchNorm they have no effect.
    """
    assert algorithm.rounds == 1 and np.isfinite(algorithm.row["train/loss"])
    assert head_name(before) == "head"
    old = dict(before.named_parameters())
    for layer in algorithm.space.matrices:
        new = algorithm.space.split(algorithm.global_model)[layer.name]
        personal = type(algorithm) is FedRep and layer.name.startswith("head.")
        assert torch.equal(new, old[layer.name]) == personal, layer.name
    if type(algorithm) is FedRep:
        heads = algorithm.store.read("head", np.arange(2))
        assert not torch.equal(heads[0], heads[1]) and heads.isfinite().all()
        start = algorithm.global_model[algorithm.personal_part]  # never trained
        assert (heads != start).any(1).all()


@pytest.mark.parametrize("name", ["CelebACNN", "LeNet5-32"])
def test_a_round_of_fedavg_is_the_mean_of_plain_steps(name, tmp_path):
    """Two clients, a step each with PyTorch alone; weights by samples, which are equal."""
    build, shape = IMAGES[name]
    torch.manual_seed(1)
    inputs, targets = torch.rand(4, *shape), torch.tensor([0, 1, 2, 9])
    algorithm, before = train(build, "FedAvg", data(inputs, targets), tmp_path)
    steps = []
    for client in (slice(0, 2), slice(2, 4)):
        network = copy.deepcopy(before).train()
        cross_entropy(network(inputs[client]), targets[client]).backward()
        steps.append([p.detach() - 0.01 * p.grad for p in network.parameters()])
    expected = torch.cat([((a + b) / 2).flatten() for a, b in zip(*steps, strict=True)])
    torch.testing.assert_close(algorithm.global_model, expected, rtol=1e-4, atol=1e-6)
