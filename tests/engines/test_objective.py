"""Objectives see features, the clients' tensors and older models, in every engine."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Sizes
from models import MLP, SmallCNN
from models.classifier import head_name
from pfl.algorithms import FedAvg
from pfl.engines import Batch, Oracle, default_loss
from pfl.engines.objective import BatchSamples, Objective, Outputs, run_watched
from pfl.engines.vmap import VmapEngine
from pfl.errors import ConfigError
from pfl.parameters import ParameterSpace
from tests.problems import run
from tests.refusal import refused

A, B, CLASSES = 3, 4, 3


def objective(outputs, features, samples, own):
    """Cross entropy, the distance to a point of the client, and to an older model's features."""
    loss = nn.functional.cross_entropy(outputs, samples.targets, reduction="none")
    away = (features - own["center"]).square().sum(1) * own["weight"]
    moved = (features * own["older"].features).sum(1) + own["older"].outputs.sum(1)
    return loss + away + 0.3 * moved.tanh() + 0.01 * samples.inputs.flatten(1).sum(1)


def body_and_head(network):
    head = network.get_submodule(head_name(network))
    features = []
    hook = head.register_forward_hook(lambda _, args, out: features.append(args[0]))
    return head, features, hook


def slow(network, space, w, inputs, targets, own, older):
    """One client's mean objective and its gradient, with a module of its own."""
    values = []
    for vector in (older, w):
        net = copy.deepcopy(network).double().train(vector is w)
        nn.utils.vector_to_parameters(vector, net.parameters())
        _, features, _ = body_and_head(net)
        values.append((net(inputs), features, net))
    (old_out, (old_z,), _), (outputs, (z,), net) = values
    loss = nn.functional.cross_entropy(outputs, targets, reduction="none")
    loss = loss + (z - own["center"]).square().sum(1) * own["weight"]
    loss = loss + 0.3 * ((z * old_z.detach()).sum(1) + old_out.detach().sum(1)).tanh()
    loss = (loss + 0.01 * inputs.flatten(1).sum(1)).mean()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in net.parameters()])


class Unnamed(nn.Module):
    """A body and a last layer that has another name than `head`."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.last(self.first(x).tanh())


NETWORKS = {
    "MLP": (lambda: MLP(6, (5,), CLASSES), (6,)),
    "unnamed": (Unnamed, (6,)),
    "only a head": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, CLASSES)), (2, 3)),
    "SmallCNN": (lambda: SmallCNN(num_classes=CLASSES, width=2), (1, 8, 8)),
}


@pytest.mark.parametrize("older_is_common", [True, False], ids=["common", "own older model"])
@pytest.mark.parametrize("engine", ["sequential", "vmap", "debug", "auto"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_of_an_objective_is_that_of_a_plain_module(name, engine, older_is_common):
    """With padded batches of 4, 2 and 1 samples, a fourth client that has no data left, tensors of
    each client, and one older model for all or one for each."""
    build, shape = NETWORKS[name]
    torch.manual_seed(1)
    network = build().double()
    space = ParameterSpace(network)
    counts = [4, 2, 1]
    inputs, targets = torch.randn(A, B, *shape).double(), torch.randint(CLASSES, (A, B))
    w = space.vector.detach() + 0.1 * torch.randn(A + 1, space.size).double()
    older = space.vector.detach() + 0.1 * torch.randn(A + 1, space.size).double()
    older = older[0] if older_is_common else older
    width = network.get_submodule(head_name(network)).in_features
    own = {"center": torch.randn(A + 1, width).double(), "weight": torch.rand(A + 1).double()}
    oracle = Oracle(network, space, default_loss, engine)
    oracle.inspect(inputs[0], targets[0], CLASSES)
    f = Objective(objective, own=own, older={"older": older})
    loss, g = oracle.gradient(w, Batch(inputs, targets, counts), objective=f)
    assert not g[A].any()
    for c, n in enumerate(counts):
        mine = {key: rows[c] for key, rows in own.items()}
        old = older if older_is_common else older[c]
        expected = slow(network, space, w[c], inputs[c, :n], targets[c, :n], mine, old)
        torch.testing.assert_close(loss[c], expected[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(g[c], expected[1], rtol=0, atol=1e-12)


def test_an_objective_that_is_the_loss_gives_the_loss_s_gradient():
    network = MLP(6, (5,), CLASSES).double()
    space = ParameterSpace(network)
    oracle = Oracle(network, space, default_loss, "sequential")
    inputs, targets = torch.randn(2, 3, 6).double(), torch.randint(CLASSES, (2, 3))
    oracle.inspect(inputs[0], targets[0], CLASSES)
    batch = Batch(inputs, targets, [3, 3])
    w = space.vector.detach().repeat(2, 1)

    def plain(outputs, features, samples, own):
        return oracle.losses(outputs, samples.targets)

    for one, other in zip(
        oracle.gradient(w, batch, objective=plain), oracle.gradient(w, batch), strict=True
    ):
        assert torch.equal(one, other)


class Decayed(FedAvg):
    """FedAvg on f_i(v) + mean_x |z(x; v) - z(x; w)|^2, by `local_sgd`."""

    def client_update(self, clients, w):
        f = Objective(self.steady, own={"one": w.new_ones(len(clients), 1)}, older={"w": w})
        return self.local_sgd(clients, w, objective=f)

    def steady(self, outputs, features, samples, own):
        away = (features - own["w"].features).square().sum(1) * own["one"]
        return self.oracle.losses(outputs, samples.targets) + away


@pytest.mark.parametrize("build", [lambda: MLP(64, (8,)), lambda: SmallCNN(width=2)])
def test_engines_chunks_and_threads_agree(tmp_path, build):
    models = []
    settings = [("sequential", 1, 1), ("vmap", 3, 1), ("auto", 6, 2), ("debug", 2, 1)]
    for engine, at_once, threads in settings:
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        try:
            method = Decayed(build(), lr=0.05, batch_size=16, engine=engine)
            data = DigitsDataModule(None, Sizes([50, 40, 35, 30, 20, 9]))
            run(method, data, 2, root=tmp_path, clients_at_once=at_once, evaluate=())
        finally:
            torch.set_num_threads(1)
        models.append(method.global_model)
    for other in models[1:]:
        torch.testing.assert_close(other, models[0], rtol=0, atol=1e-10)


class OutputsAlone(VmapEngine):
    """An engine that does not see features."""

    name = "outputs alone"
    serves_objectives = False


def test_one_line_says_which_engine_takes_over(tmp_path, caplog):
    engine = f"{__name__}.OutputsAlone"
    method = Decayed(MLP(64, (8,)), lr=0.05, local_steps=1, engine=engine)
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        run(method, DigitsDataModule(3), 2, root=tmp_path, evaluate=())
    said = [r.message for r in caplog.records if r.message.startswith("engine: ")]
    assert len(said) == 1
    assert said[0].startswith("engine: vmap takes the gradients of the method's objective")
    assert said[0].endswith("which sees features; outputs alone sees the outputs alone")


def test_an_objective_must_return_one_value_for_each_sample(tmp_path):
    class Mean(FedAvg):
        def client_update(self, clients, w):
            return self.local_sgd(clients, w, objective=lambda out, z, s, own: out.mean())

    with refused("model: the objective returns [] for 32 samples", "one loss for each of them"):
        run(Mean(MLP(64, (8,))), DigitsDataModule(3), 1, root=tmp_path, evaluate=())


def test_a_network_whose_head_is_not_called_with_features(tmp_path):
    class Bilinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Bilinear(64, 64, 10)

        def forward(self, x):
            return self.head(x.flatten(1), x.flatten(1))

    with refused("model.network: Bilinear does not call its last layer 'head' with one tensor"):
        run(Decayed(Bilinear()), DigitsDataModule(3), 1, root=tmp_path, evaluate=())


def test_running_statistics_move_once_a_step_with_an_objective(tmp_path):
    """The older model runs in evaluation mode: its passes move nothing."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 10))
    method = Decayed(network, lr=0.05, local_steps=3, buffers="local")
    run(method, DigitsDataModule(3), 2, root=tmp_path, evaluate=())
    counts = method.client_rows("buffers", np.arange(3))[:, -1]
    assert method.oracle.buffers.names[-1].endswith("num_batches_tracked")
    assert counts.tolist() == [6, 6, 6]


def test_no_engine_is_chosen_for_a_method_without_objectives(tmp_path):
    method = run(FedAvg(MLP(64, (8,))), DigitsDataModule(3), 1, root=tmp_path, evaluate=())
    assert method.oracle._objective_engine is None
    with pytest.raises(ConfigError):
        Oracle(method.network, method.space, default_loss, "chain")


@pytest.mark.parametrize(
    ("returned", "words"),
    [(0.5, "returns float for 2 samples"), (torch.zeros(3), "returns [3] for 2 samples")],
)
def test_an_objective_returns_a_loss_for_each_sample(returned, words):
    f = Objective(lambda outputs, features, samples, own: returned)
    samples = BatchSamples(torch.zeros(2, 6), torch.zeros(2))
    with refused(f"model: the objective {words}; it must return one loss for each of them, [2]"):
        f.losses(Outputs(torch.zeros(2, 1), torch.zeros(2, 5)), samples, {})


def test_a_head_is_watched_only_while_it_runs():
    """Its last call counts, and afterwards nothing is recorded, also after an error."""
    network = MLP(6, (5,), CLASSES)
    head = network.get_submodule(head_name(network))
    inputs = torch.randn(2, 6)
    result = run_watched(network, head_name(network), lambda: network(inputs))
    torch.testing.assert_close(head(result.features), result.outputs)
    with refused("model.network: MLP does not call its last layer"):
        run_watched(network, head_name(network), lambda: inputs)
    assert not head._forward_hooks
