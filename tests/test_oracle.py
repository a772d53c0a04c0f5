"""The oracle: two engines, one meaning, and that of plain PyTorch."""

import copy
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from datamodules import TensorDataModule
from datamodules.partitioners import Natural
from datamodules.protocols import SharedTest
from models import CNN, MLP, LeNet5, LogisticRegression, ResNet18, SmallCNN
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg
from pfl.batch import Batch, default_loss
from pfl.oracle import Oracle
from pfl.parameters import ParameterSpace
from tests.refusal import refused

LEAF_SPEC = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")  # Lightning's own use of PyTorch
COUNTS = [5, 4, 4, 1]  # of four clients; a fifth has a model but no data in the batch


class Tied(nn.Module):
    """Every hidden layer has the same weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


class Unused(nn.Module):
    """One parameter that the output does not depend on, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.ones(4))
        self.frozen = nn.Linear(12, 6).requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.frozen(x.flatten(1)).relu())


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Functional(nn.Module):
    """Dropout that no module shows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 3)

    def forward(self, x):
        return self.linear(F.dropout(x.flatten(1), 0.5, self.training))


def mlp(*middle, inputs=12, outputs=3):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 8), *middle, nn.ReLU(), nn.Linear(8, outputs)
    )


# name -> (how it is built, shape of a sample, number of classes)
NETWORKS: dict = {
    "LogisticRegression": (lambda: LogisticRegression(12, 3), (3, 2, 2), 3),
    "MLP": (lambda: MLP(12, (7, 5), 3), (3, 2, 2), 3),
    "LeNet5": (lambda: LeNet5(in_channels=2, num_classes=4, image_size=17), (2, 17, 17), 4),
    "CNN": (lambda: CNN(in_channels=2, num_classes=4, image_size=9), (2, 9, 9), 4),
    "SmallCNN": (lambda: SmallCNN(2, image_size=9, num_classes=4, width=6), (2, 9, 9), 4),
    "ResNet18": (lambda: ResNet18(num_classes=4, in_channels=2), (2, 8, 8), 4),
    "tied": (Tied, (12,), 3),
    "unused and frozen": (Unused, (12,), 3),
}


def make(network, inputs, targets, loss=default_loss, engine="loop", num_classes=None):
    oracle = Oracle(network, ParameterSpace(network), loss, engine)
    oracle.inspect(inputs, targets, num_classes)
    return oracle


def counts_of(build):
    """Two clients are enough for the large network."""
    return [2, 1] if build is NETWORKS["ResNet18"][0] else COUNTS


def labels(classes, counts=COUNTS):
    return torch.randint(classes, (len(counts), max(counts)))


def problem(build, shape, targets, counts=COUNTS, dtype=torch.float64):
    """A network, one model more than clients, and a batch of unequal counts."""
    torch.manual_seed(0)
    network = build().to(dtype)
    inputs = torch.rand(len(counts), max(counts), *shape, dtype=dtype)
    batch = Batch(inputs, targets, list(counts))
    size = sum(p.numel() for p in network.parameters() if p.requires_grad)
    start = torch.cat([p.detach().flatten() for p in network.parameters() if p.requires_grad])
    w = start + 0.1 * torch.randn(len(counts) + 1, size, dtype=dtype)
    return network, w, batch


def put(network, w):
    """A copy of the network with the trainable values w, written without the code under test."""
    network, start = copy.deepcopy(network), 0
    with torch.no_grad():
        for p in network.parameters():
            if p.requires_grad:
                p.copy_(w[start : start + p.numel()].view(p.shape))
                start += p.numel()
    assert start == len(w)
    return network


def plain(network, w, batch, loss):
    """What PyTorch says of one client after another: copy, forward, mean, backward."""
    losses, gradients = [], []
    for c, count in enumerate(batch.counts):
        alone = put(network, w[c]).train()
        value = loss(alone(batch.inputs[c, :count]), batch.targets[c, :count]).mean()
        value.backward()
        losses.append(value.detach())
        gradients.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                    for p in alone.parameters()
                    if p.requires_grad
                ]
            )
        )
    return torch.stack(losses), torch.stack(gradients)


def assert_gradient(oracle, network, w, batch, loss):
    before = w.clone()
    value, g = oracle.gradient(w, batch)
    expected_value, expected = plain(network, w, batch, loss)
    assert not value.requires_grad
    assert not g.requires_grad
    assert value.dtype == g.dtype == w.dtype
    torch.testing.assert_close(value, expected_value)
    torch.testing.assert_close(g[: batch.clients], expected)
    assert g.shape == w.shape
    assert not g[batch.clients :].any()
    assert torch.equal(w, before)


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize(("build", "shape", "classes"), NETWORKS.values(), ids=NETWORKS)
def test_gradients_are_those_of_plain_pytorch(build, shape, classes, engine):
    counts = counts_of(build)
    network, w, batch = problem(build, shape, labels(classes, counts), counts)
    oracle = make(network, batch.inputs[0], batch.targets[0], engine=engine, num_classes=classes)
    assert oracle.engine == engine
    assert_gradient(oracle, network, w, batch, cross_entropy)


@pytest.mark.parametrize(("build", "shape", "classes"), NETWORKS.values(), ids=NETWORKS)
def test_engines_agree_in_float32(build, shape, classes):
    counts = counts_of(build)
    network, w, batch = problem(build, shape, labels(classes, counts), counts, torch.float32)
    (a, g), (b, h) = (
        make(network, batch.inputs[0], batch.targets[0], engine=e).gradient(w, batch)
        for e in ("loop", "vmap")
    )
    assert a.dtype == g.dtype == b.dtype == h.dtype == torch.float32
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(g, h, rtol=1e-3, atol=1e-5)


def l1(outputs, targets):
    """Per sample and output: [n, k]."""
    return (outputs - targets).abs()


# loss given to the oracle, what it means for each sample, shape of a sample's target
LOSSES = {
    "default": (default_loss, lambda o, t: (o - t).square().mean(1), (3,)),
    "MSELoss": (nn.MSELoss(), lambda o, t: (o - t).square().mean(1), (3,)),
    "L1Loss": (nn.L1Loss(), lambda o, t: l1(o, t).mean(1), (3,)),
    "L1Loss sum": (nn.L1Loss(reduction="sum"), lambda o, t: l1(o, t).mean(1), (3,)),
    "function [n, k]": (l1, lambda o, t: l1(o, t).mean(1), (3,)),
    "function [n]": (lambda o, t: l1(o, t).sum(1), lambda o, t: l1(o, t).sum(1), (3,)),
    "partial": (
        partial(F.huber_loss, reduction="none", delta=0.3),
        lambda o, t: F.huber_loss(o, t, reduction="none", delta=0.3).mean(1),
        (3,),
    ),
    "smoothed": (
        nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda o, t: F.cross_entropy(o, t, reduction="none", label_smoothing=0.2),
        None,
    ),
}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize(("loss", "meaning", "target"), LOSSES.values(), ids=LOSSES)
def test_losses(loss, meaning, target, engine):
    targets = labels(3) if target is None else torch.rand(4, 5, *target, dtype=torch.float64)
    network, w, batch = problem(mlp, (12,), targets)
    before = getattr(loss, "reduction", None)
    oracle = make(network, batch.inputs[0], batch.targets[0], loss, engine)
    assert_gradient(oracle, network, w, batch, meaning)
    assert getattr(loss, "reduction", None) == before  # the user's own object stays as it is


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_targets_of_several_labels_a_sample(engine):
    """[n, T] labels and [n, K, T] scores, as of a text model: the mean over T, then samples."""
    targets = torch.randint(3, (4, 5, 2))
    network, w, batch = problem(
        lambda: nn.Sequential(mlp(outputs=6), nn.Unflatten(1, (3, 2))), (12,), targets
    )
    oracle = make(network, batch.inputs[0], batch.targets[0], engine=engine, num_classes=3)
    assert_gradient(oracle, network, w, batch, lambda o, t: cross_entropy(o, t).mean(1))
    _, correct = oracle.evaluate(w[:4], batch)
    assert set(correct.unique().tolist()) <= {0.0, 0.5, 1.0}
    outputs = put(network, w[0])(batch.inputs[0])
    expected = (outputs.argmax(1) == targets[0]).double().mean(1)
    torch.testing.assert_close(correct[0], expected)


def test_default_loss_takes_outputs_of_one_value_a_sample():
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 5.0])
    assert default_loss(outputs, targets).tolist() == [1, 4]
    assert default_loss(outputs, targets[:, None]).tolist() == [[1], [4]]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_padding_has_no_influence(engine):
    network, w, batch = problem(mlp, (12,), labels(3))
    oracle = make(network, batch.inputs[0], batch.targets[0], engine=engine)
    loss, g = oracle.gradient(w, batch)
    scores = oracle.evaluate(w[:4], batch)
    for c, count in enumerate(batch.counts):
        batch.inputs[c, count:] = 1e6
        batch.targets[c, count:] = 2
    again, h = oracle.gradient(w, batch)
    assert torch.equal(loss, again)
    assert torch.equal(g, h)
    for a, b in zip(scores, oracle.evaluate(w[:4], batch), strict=True):
        assert torch.equal(a, b)


def test_sample_weights():
    batch = Batch(torch.zeros(3, 4, 2), torch.zeros(3, 4), [4, 2, 1])
    expected = [[0.25] * 4, [0.5, 0.5, 0, 0], [1, 0, 0, 0]]
    assert batch.sample_weights(torch.float64).tolist() == expected
    assert batch.clients == 3


@pytest.mark.parametrize("training", [True, False])
def test_the_network_of_the_user_is_never_run_or_changed(training):
    """BatchNorm would show it: a forward pass in training mode moves its buffers."""
    network, w, batch = problem(normalized, (12,), labels(3, [5, 4]), [5, 4])
    network.train(training)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    oracle = make(network, batch.inputs[0], batch.targets[0])
    oracle.gradient(w, batch)
    oracle.evaluate(w[:2], batch)
    oracle.gradient(w, batch)
    assert network.training == training
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in network.parameters())


# ---- networks that vmap cannot run ---------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_work_in_the_loop(kind):
    network, w, batch = problem(lambda: Recurrent(kind), (6, 4), labels(3))
    oracle = make(network, batch.inputs[0], batch.targets[0])
    assert_gradient(oracle, network, w, batch, cross_entropy)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_auto_copes_with_recurrent_networks(kind):
    """Whatever vmap does with them, `auto` gives the right gradient, and no warning."""
    network, w, batch = problem(lambda: Recurrent(kind), (6, 4), labels(3))
    oracle = make(network, batch.inputs[0], batch.targets[0], engine="auto")
    assert_gradient(oracle, network, w, batch, cross_entropy)


class Branching(nn.Sequential):
    """Python control flow that depends on the data, which vmap cannot trace."""

    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else 2 * y


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: mlp(nn.BatchNorm1d(8)), "running statistics"),
        (lambda: mlp(nn.Dropout()), "random"),
        (Functional, "random"),
        (lambda: Branching(*mlp()), "data-dependent"),
    ],
    ids=["BatchNorm", "Dropout", "F.dropout", "control flow"],
)
def test_vmap_is_refused_where_it_cannot_be_and_auto_takes_the_loop(build, reason):
    network, _, batch = problem(build, (12,), labels(3))
    with refused("engine", "vmap", type(network).__name__, reason, "engine: loop"):
        make(network, batch.inputs[0], batch.targets[0], engine="vmap")
    assert make(network, batch.inputs[0], batch.targets[0], engine="auto").engine == "loop"


def test_auto_on_a_cpu_takes_vmap_unless_the_network_convolves():
    for build, shape, engine in [
        (lambda: MLP(12, (7,), 3), (12,), "vmap"),
        (lambda: SmallCNN(2, image_size=8, num_classes=3, width=2), (2, 8, 8), "loop"),
    ]:
        network, _, batch = problem(build, shape, labels(3))
        assert make(network, batch.inputs[0], batch.targets[0], engine="auto").engine == engine


# ---- BatchNorm -----------------------------------------------------------------------------------


def normalized():
    return mlp(nn.BatchNorm1d(8, momentum=0.3))


def buffers_of(network):
    found = [b.detach().flatten().double() for b in network.buffers()]
    return torch.cat(found) if found else torch.zeros(0).double()


def test_running_statistics_move_per_client_as_in_plain_pytorch():
    counts = [5, 4, 2]
    network, w, batch = problem(normalized, (12,), labels(3, counts), counts)
    oracle = make(network, batch.inputs[0], batch.targets[0])
    assert oracle.buffers.names == ["2.running_mean", "2.running_var", "2.num_batches_tracked"]
    start = buffers_of(network)
    rows = start.repeat(4, 1)
    rows[1, :8] = 0.5  # clients may come with different statistics
    expected = rows.clone()
    for _ in range(3):
        loss, g = oracle.gradient(w, batch, rows)
        slow_loss, slow_g = plain(network, w, batch, cross_entropy)
        torch.testing.assert_close(loss, slow_loss)
        torch.testing.assert_close(g[:3], slow_g)
    for c, count in enumerate(counts):
        alone = put(network, w[c]).train()
        with torch.no_grad():
            alone[2].running_mean.copy_(expected[c, :8])
            for _ in range(3):
                alone(batch.inputs[c, :count])
        torch.testing.assert_close(rows[c], buffers_of(alone))
        assert rows[c, -1] == 3  # batches tracked
    assert torch.equal(rows[3], start)  # took no part
    assert torch.equal(buffers_of(network), start)


def test_inspection_leaves_no_trace_in_the_buffers():
    network, _, batch = problem(normalized, (12,), labels(3))
    before = buffers_of(network)
    oracle = make(network, batch.inputs[0], batch.targets[0])
    assert torch.equal(buffers_of(oracle.network), before)


def test_evaluation_uses_the_rows_and_does_not_move_them():
    counts = [5, 4, 2]
    network, w, batch = problem(normalized, (12,), labels(3, counts), counts)
    oracle = make(network, batch.inputs[0], batch.targets[0])
    rows = torch.rand(3, oracle.buffers.size, dtype=torch.float64) + 0.5
    before = rows.clone()
    losses, correct = oracle.evaluate(w[:3], batch, rows)
    assert torch.equal(rows, before)
    for c, count in enumerate(counts):
        alone = put(network, w[c]).eval()
        with torch.no_grad():
            alone[2].running_mean.copy_(rows[c, :8])
            alone[2].running_var.copy_(rows[c, 8:16])
            outputs = alone(batch.inputs[c, :count])
        targets = batch.targets[c, :count]
        torch.testing.assert_close(losses[c, :count], cross_entropy(outputs, targets))
        assert torch.equal(correct[c, :count], (outputs.argmax(1) == targets).double())


def federation(tmp_path, sizes=(9, 6, 3), rounds=2, **kwargs):
    """A real run of FedAvg with a BatchNorm network; full batches, so order does not matter."""
    generator = torch.Generator().manual_seed(1)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    x = torch.randn(len(owners), 12, generator=generator) + torch.from_numpy(owners)[:, None]
    y = torch.randint(3, (len(owners),), generator=generator)
    data = TensorDataModule(
        x,
        y,
        torch.randn(7, 12, generator=generator),
        torch.arange(7) % 3,
        client_ids=owners,
        partition=Natural(),
        protocol=SharedTest(validation=0),
    )
    torch.manual_seed(2)
    network = normalized()
    start = copy.deepcopy(network)
    algorithm = FedAvg(network, lr=0.2, batch_size=None, local_epochs=2, **kwargs)
    trainer = Trainer(
        max_epochs=rounds,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_checkpointing=False,
        accelerator="cpu",
        precision="64-true",
    )
    trainer.fit(algorithm, datamodule=FederatedLoop(data))
    parts = [(x[owners == c].double(), y[owners == c]) for c in range(len(sizes))]
    return algorithm, start.double(), parts, data


def slow_round(model, parts, locals_=None):
    """Two full-gradient steps of every client in plain PyTorch; the trained copies."""
    trained = []
    for c, (x, y) in enumerate(parts):
        alone = copy.deepcopy(model)
        if locals_ is not None:
            alone[2].load_state_dict(
                {**alone[2].state_dict(), **dict(locals_[c][2].named_buffers())}
            )
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.2)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(alone(x), y).backward()
            optimizer.step()
        trained.append(alone)
    return trained


def average(model, trained, sizes, buffers):
    result, total = copy.deepcopy(model), sum(sizes)
    with torch.no_grad():
        for p, *mine in zip(result.parameters(), *(t.parameters() for t in trained), strict=True):
            p.copy_(sum(n * m for n, m in zip(sizes, mine, strict=True)) / total)
        if buffers:
            for b, *own in zip(result.buffers(), *(t.buffers() for t in trained), strict=True):
                b.copy_(sum(n * m.double() for n, m in zip(sizes, own, strict=True)) / total)
    return result


@LEAF_SPEC
def test_averaged_buffers_are_the_weighted_mean_and_are_paid_for(tmp_path):
    sizes = (9, 6, 3)
    algorithm, model, parts, _ = federation(tmp_path, sizes, buffers="average")
    for _ in range(2):
        model = average(model, slow_round(model, parts), sizes, buffers=True)
    torch.testing.assert_close(buffers_of(algorithm.network), buffers_of(model))
    for p, q in zip(algorithm.network.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    # 12 x 8 + 8, 8 + 8 and 8 x 3 + 3 parameters, 8 + 8 + 1 buffer values of 8 bytes; 2 rounds.
    assert algorithm.ledger.uplink.tolist() == [(104 + 16 + 27 + 17) * 8 * 2] * 3
    assert algorithm.ledger.downlink.tolist() == algorithm.ledger.uplink.tolist()
    # What is evaluated is the mean's model with the mean's statistics.
    assert algorithm.row["test/global/loss"] == pytest.approx(shared_loss(model))


def shared_loss(model):
    generator = torch.Generator().manual_seed(1)
    torch.randn(18, 12, generator=generator)
    torch.randint(3, (18,), generator=generator)
    x = torch.randn(7, 12, generator=generator).double()
    with torch.no_grad():
        return F.cross_entropy(copy.deepcopy(model).eval()(x), torch.arange(7) % 3).item()


@LEAF_SPEC
def test_local_buffers_stay_with_their_client_and_cost_nothing(tmp_path):
    sizes = (9, 6, 3)
    algorithm, model, parts, _ = federation(tmp_path, sizes, buffers="local")
    trained = None
    start = buffers_of(model)
    for _ in range(2):
        trained = slow_round(model, parts, trained)
        model = average(model, trained, sizes, buffers=False)
    rows = algorithm.store.read("buffers", np.arange(3))
    torch.testing.assert_close(rows, torch.stack([buffers_of(t) for t in trained]))
    assert not torch.allclose(rows[0], rows[1])
    torch.testing.assert_close(buffers_of(algorithm.network), start)
    assert algorithm.ledger.uplink.tolist() == [(104 + 16 + 27) * 8 * 2] * 3
    assert algorithm.ledger.downlink.tolist() == algorithm.ledger.uplink.tolist()
    # Every client evaluates the global model with statistics of its own.
    expected = []
    for alone in trained:
        judged = copy.deepcopy(model)
        judged[2].load_state_dict({**judged[2].state_dict(), **dict(alone[2].named_buffers())})
        expected.append(shared_loss(judged))
    scores = algorithm.evaluation.scores["test", "global"]["loss"]
    torch.testing.assert_close(torch.from_numpy(scores), torch.tensor(expected).double())
    assert len(set(scores.tolist())) == 3


@LEAF_SPEC
def test_a_double_algorithm_with_batch_norm_can_be_set_up(tmp_path):
    """`.double()` by hand before `fit`, as any LightningModule may be treated."""
    x, y = torch.randn(12, 12), torch.arange(12) % 3
    algorithm = FedAvg(normalized(), batch_size=None).double()
    Trainer(
        max_epochs=1,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_checkpointing=False,
        accelerator="cpu",
    ).fit(algorithm, datamodule=FederatedLoop(TensorDataModule(x, y, num_clients=2)))
    assert algorithm.global_model.dtype == torch.float64


@LEAF_SPEC
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_loss_with_tensors_of_its_own_takes_the_precision(tmp_path, precision):
    x, y = torch.randn(12, 12), torch.arange(12) % 3
    weight = torch.tensor([1.0, 2.0, 0.5])
    algorithm = FedAvg(mlp(), loss=nn.CrossEntropyLoss(weight=weight))
    Trainer(
        max_epochs=1,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_checkpointing=False,
        accelerator="cpu",
        precision=precision,
    ).fit(algorithm, datamodule=FederatedLoop(TensorDataModule(x, y, num_clients=2)))
    assert np.isfinite(algorithm.row["train/loss"])


# ---- randomness inside the network ---------------------------------------------------------------


DROPOUT = {"module": lambda: mlp(nn.Dropout()), "functional": Functional}


@pytest.mark.parametrize("build", DROPOUT.values(), ids=DROPOUT)
def test_dropout_is_a_function_of_the_seed(build):
    network, w, batch = problem(build, (12,), labels(3))
    oracle = make(network, batch.inputs[0], batch.targets[0])
    assert oracle.random
    seeds = [11, -12, 2**62, 14]
    batch.seeds = seeds.__getitem__
    torch.manual_seed(1)
    state = torch.get_rng_state()
    loss, g = oracle.gradient(w, batch)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, h = oracle.gradient(w, batch)
    assert torch.equal(loss, again)
    assert torch.equal(g, h)
    # Each row alone, in another order: the same.
    for row in (2, 0):
        one = Batch(
            batch.inputs[row : row + 1],
            batch.targets[row : row + 1],
            [COUNTS[row]],
            lambda _, row=row: seeds[row],
        )
        torch.testing.assert_close(oracle.gradient(w[row : row + 1], one)[1][0], g[row])
    # It is what PyTorch draws from that seed.
    with torch.random.fork_rng([]):
        torch.manual_seed(seeds[0])
        first = Batch(batch.inputs[:1], batch.targets[:1], COUNTS[:1])
        torch.testing.assert_close(plain(network, w, first, cross_entropy)[1][0], g[0])
    batch.seeds = lambda row: seeds[row] + 1
    assert not torch.equal(oracle.gradient(w, batch)[1], g)


def test_inspection_leaves_the_global_generator_alone():
    network, _, batch = problem(DROPOUT["module"], (12,), labels(3))
    state = torch.get_rng_state()
    make(network, batch.inputs[0], batch.targets[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_network_without_random_numbers_is_not_taken_for_one():
    network, _, batch = problem(mlp, (12,), labels(3))
    assert not make(network, batch.inputs[0], batch.targets[0]).random


def test_dropout_is_off_in_evaluation():
    network, w, batch = problem(DROPOUT["module"], (12,), labels(3))
    oracle = make(network, batch.inputs[0], batch.targets[0])
    losses, _ = oracle.evaluate(w[:4], batch)
    with torch.no_grad():
        outputs = put(network, w[0]).eval()(batch.inputs[0])
    torch.testing.assert_close(losses[0], cross_entropy(outputs, batch.targets[0]))


@LEAF_SPEC
@pytest.mark.parametrize("build", DROPOUT.values(), ids=DROPOUT)
def test_a_run_with_dropout_does_not_depend_on_chunks_or_the_global_seed(tmp_path, build):
    models = []
    for global_seed, at_once in [(0, 4), (1, 1), (2, 3)]:
        torch.manual_seed(7)
        network = build()
        x, y = torch.rand(22, 12), torch.arange(22) % 3
        torch.manual_seed(global_seed)
        algorithm = FedAvg(network, lr=0.5, batch_size=2)
        loop = FederatedLoop(TensorDataModule(x, y, num_clients=4), clients_at_once=at_once)
        Trainer(
            max_epochs=2,
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_checkpointing=False,
            accelerator="cpu",
            precision="64-true",
        ).fit(algorithm, datamodule=loop)
        models.append(algorithm.global_model.clone())
    torch.testing.assert_close(models[0], models[1])
    torch.testing.assert_close(models[0], models[2])


# ---- evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize(("build", "shape", "classes"), NETWORKS.values(), ids=NETWORKS)
def test_scores_are_those_of_plain_pytorch(build, shape, classes, engine):
    counts = counts_of(build)
    network, w, batch = problem(build, shape, labels(classes, counts), counts)
    oracle = make(network, batch.inputs[0], batch.targets[0], engine=engine)
    losses, correct = oracle.evaluate(w[:-1], batch)
    assert losses.shape == correct.shape == batch.targets.shape
    for c, count in enumerate(counts):
        alone = put(network, w[c]).eval()
        with torch.no_grad():
            outputs = alone(batch.inputs[c])
        expected = cross_entropy(outputs, batch.targets[c])
        hits = (outputs.argmax(1) == batch.targets[c]).double()
        torch.testing.assert_close(losses[c, :count], expected[:count])
        assert torch.equal(correct[c, :count], hits[:count])
        assert not losses[c, count:].any()
        assert not correct[c, count:].any()
        one, right = oracle.evaluate_one(w[c], batch.inputs[c], batch.targets[c])
        torch.testing.assert_close(one, expected)
        assert torch.equal(right, hits)
        torch.testing.assert_close(oracle.predict(w[c], batch.inputs[c]), outputs)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("outputs", [3, 1])
def test_regression_has_no_accuracy(engine, outputs):
    targets = torch.rand(4, 5, *([outputs] if outputs > 1 else []), dtype=torch.float64)
    network, w, batch = problem(lambda: mlp(outputs=outputs), (12,), targets)
    oracle = make(network, batch.inputs[0], batch.targets[0], engine=engine)
    losses, correct = oracle.evaluate(w[:4], batch)
    real = batch.sample_weights(torch.float32) > 0
    assert correct[real].isnan().all()
    assert not correct[~real].any()
    for c, count in enumerate(COUNTS):
        with torch.no_grad():
            y = put(network, w[c])(batch.inputs[c, :count]).view(targets[c, :count].shape)
        expected = (y - targets[c, :count]).square().view(count, -1).mean(1)
        torch.testing.assert_close(losses[c, :count], expected)
        one, right = oracle.evaluate_one(w[c], batch.inputs[c, :count], targets[c, :count])
        torch.testing.assert_close(one, expected)
        assert right.isnan().all()


# ---- refusals ------------------------------------------------------------------------------------


def test_an_unknown_engine_is_refused():
    with refused("engine", "'jax'", "auto, loop or vmap"):
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
@pytest.mark.parametrize("engine", ["loop", "vmap", "auto"])
def test_losses_that_reduce_are_refused(loss, name, engine):
    network, _, batch = problem(mlp, (12,), labels(3))
    with refused("loss", name, "one value per sample", "reduction='none'"):
        make(network, batch.inputs[0], batch.targets[0], loss, engine)


@pytest.mark.parametrize("engine", ["loop", "vmap", "auto"])
def test_too_few_outputs_are_refused(engine):
    network, _, batch = problem(mlp, (12,), labels(3))
    with refused("Sequential", "[3]", "4 classes", "num_classes=4"):
        make(network, batch.inputs[0], batch.targets[0], engine=engine, num_classes=4)
    flat, _, batch = problem(lambda: nn.Sequential(mlp(outputs=1), nn.Flatten(0)), (12,), labels(2))
    with refused("Sequential", "2 classes"):
        make(flat, batch.inputs[0], batch.targets[0], engine=engine, num_classes=2)


def test_more_outputs_than_classes_are_fine():
    network, _, batch = problem(mlp, (12,), labels(2))
    make(network, batch.inputs[0], batch.targets[0], num_classes=2)


@pytest.mark.parametrize("engine", ["loop", "vmap", "auto"])
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
@pytest.mark.parametrize("engine", ["loop", "vmap", "auto"])
def test_targets_that_do_not_fit_are_refused(loss, targets, says, engine):
    network, _, batch = problem(mlp, (12,), targets)
    with warnings.catch_warnings(), refused("loss", "Sequential", "[5, 3]", says):
        warnings.simplefilter("ignore")  # PyTorch warns before it refuses
        make(network, batch.inputs[0], batch.targets[0], loss, engine)


@pytest.mark.parametrize("samples", [5, 1])
@pytest.mark.parametrize("engine", ["loop", "vmap", "auto"])
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
