"""FedBN against a plain PyTorch loop with a module for each client."""

import copy
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import SharedTest
from models import VGG11, HalfSquaredError, ResNet18, SmallCNN
from pfl.algorithms import FedBN
from tests.problems import owned

SIZES = (7, 4, 5, 3)
TRACE = [[0, 1, 2], [0, 2], [], [2], [0, 1]]  # client 3 never takes part


def network():
    """The running statistics follow slowly, so that they differ from a batch's."""
    torch.manual_seed(1)
    middle = (nn.BatchNorm1d(4, momentum=0.3), nn.Tanh(), nn.Linear(4, 2))
    return nn.Sequential(nn.Linear(3, 4), *middle).double()


def world():
    """Clients whose inputs have different means and scales; all are tested on the same samples."""
    rng = np.random.default_rng(0)
    own = [rng.uniform(-2, 2) + rng.uniform(0.5, 3) * rng.normal(size=(n, 3)) for n in SIZES]
    x, test = torch.from_numpy(np.concatenate(own)), torch.from_numpy(rng.normal(size=(6, 3)))
    y, test_y = (torch.from_numpy(rng.normal(size=(n, 2))) for n in (len(x), 6))
    data = owned(
        np.repeat(np.arange(4), SIZES), x, y, test, test_y, protocol=SharedTest(validation=0.0)
    )
    return data, (x.split(SIZES), y.split(SIZES), test, test_y)


def half_squared(outputs, targets):
    return 0.5 * (outputs - targets).square().sum(1).mean()


def loop(samples, *, lr, steps, uniform):
    """Modules of all clients after each round: all parameters but BatchNorm's are averaged."""
    x, y, *_ = samples
    modules, history = [network() for _ in SIZES], []
    for cohort in TRACE:
        for i in cohort:
            modules[i].train()
            optimizer = torch.optim.SGD(modules[i].parameters(), lr=lr)
            for _ in range(steps):
                optimizer.zero_grad()
                half_squared(modules[i](x[i]), y[i]).backward()
                optimizer.step()
        weights = torch.tensor([1.0 if uniform else SIZES[i] for i in cohort]).double()
        for name in ("0.weight", "0.bias", "3.weight", "3.bias") if cohort else ():
            sent = torch.stack([modules[i].get_parameter(name).detach() for i in cohort])
            mean = torch.einsum("n,n...->...", weights / weights.sum(), sent)
            for module in modules:  # also of clients that were away: they would receive it
                module.get_parameter(name).data.copy_(mean)
        history.append(copy.deepcopy(modules))
    return history


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_rounds_equal_a_loop_with_a_module_for_each_client(watch, weighting):
    (data, samples) = world()
    settings = dict(lr=0.2, weighting=weighting, batch_size=None, loss=HalfSquaredError())
    method = FedBN(network(), local_epochs=3, **settings)
    history = watch(method, data, len(TRACE), trace=TRACE)
    own, losses = method.personal_part.numpy(), []
    expected = loop(samples, lr=0.2, steps=3, uniform=weighting == "uniform")
    for row, modules in zip(history.rounds, expected, strict=True):
        for i, module in enumerate(modules):
            model = nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
            np.testing.assert_allclose(row["w"][~own], model[~own], rtol=0, atol=1e-12)
            np.testing.assert_allclose(row["head"][i], model[own], rtol=0, atol=1e-12)
            norm = module[1]
            kept = [*norm.running_mean, *norm.running_var, norm.num_batches_tracked]
            np.testing.assert_allclose(row["buffers"][i], kept, rtol=0, atol=1e-12)
    # The shared layers are scored with the client's own statistics, in evaluation mode.
    for module in expected[-1]:
        module.eval()
        losses.append(half_squared(module(samples[2]), samples[3]).item())
    assert method.row["test/personalized/loss"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert np.ptp(losses) > 1e-3


def test_what_is_sent_has_no_normalization_layer(watch):
    """3 * 4 + 4 and 4 * 2 + 2 values, 8 bytes each; neither BatchNorm's 8 nor its statistics."""
    (data, _) = world()
    history = watch(FedBN(network(), batch_size=None), data, 5, trace=TRACE)
    for way in ("down", "up"):
        visits = [np.bincount([*chain(*TRACE[: t + 1])], minlength=4) for t in range(5)]
        assert np.array_equal(history[way], 8 * 26 * np.array(visits))


# The channels of the normalization layers, each with a scale and a shift.
RESNET = 64 + 4 * 64 + 4 * 128 + 128 + 4 * 256 + 256 + 4 * 512 + 512  # with the shortcuts' layers
LAYERS = {
    "SmallCNN": (SmallCNN, 2 * (16 + 32)),
    "ResNet18": (ResNet18, 2 * RESNET),
    "ResNet18, BatchNorm": (lambda: ResNet18(norm="batch"), 2 * RESNET),
    "VGG11": (VGG11, 2 * (64 + 128 + 2 * 256 + 4 * 512)),
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), 2 * 4),
    "RMSNorm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)), 4),
    "InstanceNorm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.InstanceNorm1d(4, affine=True)), 8),
    "a name without bn": (
        lambda: nn.ModuleDict({"a": nn.BatchNorm1d(4), "bn": nn.Linear(2, 2)}),
        8,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_normalization_layers_are_found_by_their_type(name):
    build, expected = LAYERS[name]
    assert int(FedBN(build()).personal_part.sum()) == expected


def test_a_newcomer_has_the_newest_shared_layers_and_the_initial_normalization(fit):
    data, _ = world()
    method = FedBN(network(), lr=0.2, batch_size=None)
    fit(method, data, 2, trace=TRACE[:2])
    initial = nn.utils.parameters_to_vector(network().parameters()).detach()
    for clients in method.iter_clients():
        if 3 in clients.ids:
            row = clients.ids.tolist().index(3)
            expected = torch.where(method.personal_part, initial, method.global_model)
            assert torch.equal(method.newcomer(clients)[row], expected)
            assert not torch.equal(expected, initial)
