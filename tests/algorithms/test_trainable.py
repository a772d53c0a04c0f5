"""`model.trainable`: methods see the adapters only, and there is one frozen body."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule
from models import MLP, Delta, HalfSquaredError, LoRA
from pfl.algorithms import GPGD, LPGD, FedAvg, FedBN, FedDPA, FedSLR
from pfl.engines.oracle import Oracle
from pfl.parameters import frozen_parameters
from tests.problems import owned
from tests.refusal import refused

FULL = dict(batch_size=None, loss=HalfSquaredError())
SIZES = (5, 3, 4)


def world(targets=None, outputs=2):
    """Three clients with samples of a linear map R^4 -> R^2, in float64; inputs, targets, data."""
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(sum(SIZES), 4)))
    y = torch.from_numpy(rng.normal(size=(sum(SIZES), outputs))) if targets is None else targets
    data = owned(np.repeat(np.arange(3), SIZES), x, y)
    return x, y, data


class Linear(nn.Module):
    """One linear layer without a head, so that only its adapter is trained."""

    head = None

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.map = nn.Linear(4, 2, bias=False).double()

    def forward(self, x):
        return self.map(x)


def test_one_step_of_lora_from_zero_has_a_closed_form(fit):
    """B_i = -lr s g_i A0' with g_i the gradient by the weight, and A0 does not move, as B is 0."""
    x, y, data = world()
    network = Linear()
    algorithm = FedAvg(network, lr=0.3, local_steps=1, trainable=LoRA(rank=2, alpha=3.0), **FULL)
    a0, weight = network.map.lora_A.detach().clone(), network.map.base.weight.detach().clone()
    fit(algorithm, data, 1)
    expected = 0
    for rows, n in zip(torch.split(torch.arange(len(x)), SIZES), SIZES, strict=True):
        g = (x[rows] @ weight.T - y[rows]).T @ x[rows] / n
        expected = expected - n / len(x) * 0.3 * 1.5 * g @ a0.T
    torch.testing.assert_close(network.map.lora_A.detach(), a0, rtol=0, atol=0)
    torch.testing.assert_close(network.map.lora_B.detach(), expected, rtol=0, atol=1e-12)
    assert torch.equal(network.map.base.weight, weight)
    # |A| + |B| values of 8 bytes, down and up, for three clients.
    assert algorithm.progress.bytes_up == algorithm.progress.bytes_down == 8 * (2 * 4 + 2 * 2) * 3


def test_a_frozen_factor_is_a_linear_model_in_its_features(fit):
    """With A frozen (FFA-LoRA), B is FedAvg's linear model of the features s A x, from 0, on what
    the frozen layer leaves of the targets: the mean of B is the exact mean of the updates."""
    x, y, data = world()
    network = Linear()
    one = FedAvg(network, lr=0.2, local_steps=3, trainable=LoRA(2, 3.0, freeze_a=True), **FULL)
    fit(one, data, 4)
    weight, a = network.map.base.weight, network.map.lora_A.detach()
    z, left = 1.5 * x @ a.T, (y - x @ weight.T).detach()
    plain = nn.Linear(2, 2, bias=False).double()
    nn.init.zeros_(plain.weight)
    _, _, other = world(left)
    other = owned(np.repeat(np.arange(3), SIZES), z, left)
    fit(FedAvg(plain, lr=0.2, local_steps=3, **FULL), other, 4)
    torch.testing.assert_close(network.map.lora_B.data, plain.weight.data, rtol=0, atol=1e-12)


def test_fedslr_with_delta_has_a_low_rank_shared_and_a_sparse_personal_update(fit):
    """On a linear layer W + D is W plus FedSLR's model of what W leaves of the targets, from 0."""
    settings = dict(lr=0.2, local_steps=3, proximal_step=2.0, low_rank_penalty=0.4)
    settings |= dict(sparse_penalty=0.05, **FULL)
    x, y, data = world()
    network = Linear()
    updates = FedSLR(network, trainable=Delta(), **settings)
    fit(updates, data, 5)
    plain = nn.Linear(4, 2, bias=False).double()
    nn.init.zeros_(plain.weight)
    left = (y - x @ network.map.base.weight.T).detach()
    models = FedSLR(plain, **settings)
    fit(models, world(left)[2], 5)
    for name in ("p", "gamma"):
        one, other = (m.client_rows(name, np.arange(3)) for m in (updates, models))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    torch.testing.assert_close(updates.global_model, models.global_model, rtol=0, atol=1e-12)
    assert torch.equal(updates.ranks, models.ranks)
    assert int(updates.ranks) == 1  # lower than 2
    assert int((one != 0).sum()) > 0


@pytest.mark.parametrize("kind", [FedSLR, LPGD, GPGD])
def test_ranks_of_factors_are_refused(kind):
    with refused("model.trainable: lora", kind.__name__, "delta"):
        kind(MLP(64, (16,)), trainable="lora")
    assert kind(MLP(64, (16,)), trainable="delta").space.size == 64 * 16 + 16 * 10 + 10


def test_mistakes_name_the_key():
    with refused("model.trainable: LoRA.layers: 'query' matches none"):
        FedAvg(MLP(64, (16,)), trainable=LoRA(layers=["query"]))
    with refused("model.trainable: FedDPA", "pair"):
        FedDPA(MLP(64, (16,)), trainable=LoRA(rank=2))
    normed = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    with refused("model.personal", "none of what is trained, 0.lora_A"):
        FedBN(copy.deepcopy(normed), trainable=LoRA(rank=2))
    assert FedBN(normed, trainable="norm").personal_part.sum() == 8


def test_there_is_one_frozen_body(fit):
    """Every copy that a run makes shares the memory of the frozen parameters, in their dtype."""
    network = MLP(64, (16,))
    algorithm = FedAvg(network, trainable=LoRA(rank=2))
    fit(algorithm, DigitsDataModule(3), 1)
    runner = algorithm.oracle.runner
    runner.allocate_replicas(3)
    body = frozen_parameters(network)
    assert body
    for copied in (runner.network, *(replica[0] for replica in runner._unused)):
        own = frozen_parameters(copied)
        assert own.keys() == body.keys()
        assert all(own[name].data_ptr() == body[name].data_ptr() for name in body)
        trained = [p for p in copied.parameters() if p.requires_grad]
        assert trained
        assert copied is not network


def test_a_body_of_16_bits_is_not_converted(fit):
    network = MLP(64, (16,))
    algorithm = FedAvg(network, trainable=LoRA(rank=2))
    network.body.bfloat16()
    oracle = Oracle(network, algorithm.space, HalfSquaredError())
    oracle.runner.to(torch.device("cpu"), torch.float64)
    assert {p.dtype for p in frozen_parameters(oracle.runner.network).values()} == {torch.bfloat16}


def test_a_checkpoint_has_the_checksum_of_the_body(fit, tmp_path):
    torch.manual_seed(0)
    network = MLP(64, (16,))
    other = copy.deepcopy(network)
    settings = dict(lr=0.1, trainable=LoRA(rank=2, freeze_a=True))
    algorithm = fit(FedAvg(network, **settings), DigitsDataModule(3), 1)
    path = tmp_path / "last.ckpt"
    algorithm.trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert not any("base" in name or "lora_A" in name for name in saved["state_dict"])
    assert saved["federated"]["body"] == algorithm.body_digest
    again = FedAvg.load_from_checkpoint(path, network=copy.deepcopy(algorithm.network))
    assert torch.equal(again.global_model, algorithm.global_model)
    # Another draw of A is another body.
    with refused("ckpt_path", algorithm.body_digest, "frozen parameters"):
        FedAvg.load_from_checkpoint(path, network=other, **settings)
