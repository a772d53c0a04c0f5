"""The oracle on networks that remember, BatchNorm's statistics, or draw: dropout."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from datamodules import TensorDataModule
from pfl.algorithms import FedAvg
from pfl.datamodules.protocols.protocol import SharedTest
from pfl.engines.batch import Batch, Origin
from tests.networks import (
    COUNTS,
    Functional,
    cross_entropy,
    labels,
    make,
    mlp,
    normalized,
    plain,
    problem,
    put,
)
from tests.problems import owned, run

# ---- BatchNorm -----------------------------------------------------------------------------------


def buffers_of(network):
    actual = [b.detach().flatten().double() for b in network.buffers()]
    return torch.cat(actual) if actual else torch.zeros(0).double()


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
    assert torch.equal(buffers_of(oracle.runner.network), before)


def test_evaluation_uses_the_rows_and_does_not_move_them():
    counts = [5, 4, 2]
    network, w, batch = problem(normalized, (12,), labels(3, counts), counts)
    oracle = make(network, batch.inputs[0], batch.targets[0])
    rows = torch.rand(3, oracle.buffers.size, dtype=torch.float64) + 0.5
    before = rows.clone()
    losses, correct, _ = oracle.evaluate(w[:3], batch, rows)
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
    test = torch.randn(7, 12, generator=generator), torch.arange(7) % 3
    data = owned(owners, x, y, *test, protocol=SharedTest(validation=0))
    torch.manual_seed(2)
    network = normalized()
    start = copy.deepcopy(network)
    algorithm = FedAvg(network, lr=0.2, batch_size=None, local_epochs=2, **kwargs)
    run(algorithm, data, rounds, root=tmp_path)
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


def test_averaged_buffers_are_the_weighted_mean_and_are_paid_for(tmp_path):
    sizes = (9, 6, 3)
    algorithm, model, parts, _ = federation(tmp_path, sizes, buffers="average")
    for _ in range(2):
        model = average(model, slow_round(model, parts), sizes, buffers=True)
    torch.testing.assert_close(buffers_of(algorithm.network), buffers_of(model))
    for p, q in zip(algorithm.network.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    # 12 x 8 + 8, 8 + 8 and 8 x 3 + 3 parameters, 8 + 8 + 1 buffer values of 8 bytes; 2 rounds.
    assert algorithm.progress.ledger.uplink.tolist() == [(104 + 16 + 27 + 17) * 8 * 2] * 3
    assert algorithm.progress.ledger.downlink.tolist() == algorithm.progress.ledger.uplink.tolist()
    # What is evaluated is the mean's model with the mean's statistics.
    assert algorithm.row["test/global/loss"] == pytest.approx(shared_loss(model))


def shared_loss(model):
    generator = torch.Generator().manual_seed(1)
    torch.randn(18, 12, generator=generator)
    torch.randint(3, (18,), generator=generator)
    x = torch.randn(7, 12, generator=generator).double()
    with torch.no_grad():
        return F.cross_entropy(copy.deepcopy(model).eval()(x), torch.arange(7) % 3).item()


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
    assert algorithm.progress.ledger.uplink.tolist() == [(104 + 16 + 27) * 8 * 2] * 3
    assert algorithm.progress.ledger.downlink.tolist() == algorithm.progress.ledger.uplink.tolist()
    # Every client evaluates the global model with statistics of its own.
    expected = []
    for alone in trained:
        judged = copy.deepcopy(model)
        judged[2].load_state_dict({**judged[2].state_dict(), **dict(alone[2].named_buffers())})
        expected.append(shared_loss(judged))
    scores = algorithm.evaluation.scores["test", "global"]["loss"]
    torch.testing.assert_close(torch.from_numpy(scores), torch.tensor(expected).double())
    assert len(set(scores.tolist())) == 3


def test_a_double_algorithm_with_batch_norm_can_be_set_up(tmp_path):
    """`.double()` by hand before `fit`, as any LightningModule may be treated."""
    x, y = torch.randn(12, 12), torch.arange(12) % 3
    algorithm = FedAvg(normalized(), batch_size=None).double()
    run(algorithm, TensorDataModule(x, y, num_clients=2), 1, root=tmp_path, precision=None)
    assert algorithm.global_model.dtype == torch.float64


# ---- randomness inside the network ---------------------------------------------------------------


DROPOUT = {"module": lambda: mlp(nn.Dropout()), "functional": Functional}


class Seeds(Origin):
    """The origin of a batch with one seed for each row."""

    def __init__(self, seeds):
        self.seeds = seeds

    def seed(self, row):
        return self.seeds[row]


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_a_function_of_the_seed(name):
    """In a chain of layers by keys (test_dropout.py), elsewhere by PyTorch's generator."""
    network, w, batch = problem(DROPOUT[name], (12,), labels(3))
    oracle = make(network, batch.inputs[0], batch.targets[0])
    assert oracle.runner.is_stochastic == (name == "functional")
    assert oracle.runner.has_keys == (name == "module")
    seeds = [11, -12, 2**62, 14]
    batch.origin = Seeds(seeds)
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
        own = batch.inputs[[row]], batch.targets[[row]]
        one = Batch(*own, [COUNTS[row]], Seeds([seeds[row]]))
        torch.testing.assert_close(oracle.gradient(w[row : row + 1], one)[1][0], g[row])
    if name == "functional":  # it is what PyTorch draws from that seed
        with torch.random.fork_rng([]):
            torch.manual_seed(seeds[0])
            first = Batch(batch.inputs[:1], batch.targets[:1], COUNTS[:1])
            torch.testing.assert_close(plain(network, w, first, cross_entropy)[1][0], g[0])
    batch.origin = Seeds([seed + 1 for seed in seeds])
    assert not torch.equal(oracle.gradient(w, batch)[1], g)


def test_inspection_leaves_the_global_generator_alone():
    network, _, batch = problem(DROPOUT["module"], (12,), labels(3))
    state = torch.get_rng_state()
    make(network, batch.inputs[0], batch.targets[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_network_without_random_numbers_is_not_taken_for_one():
    network, _, batch = problem(mlp, (12,), labels(3))
    assert not make(network, batch.inputs[0], batch.targets[0]).runner.is_stochastic


def test_dropout_is_off_in_evaluation():
    network, w, batch = problem(DROPOUT["module"], (12,), labels(3))
    oracle = make(network, batch.inputs[0], batch.targets[0])
    losses, _, _ = oracle.evaluate(w[:4], batch)
    with torch.no_grad():
        outputs = put(network, w[0]).eval()(batch.inputs[0])
    torch.testing.assert_close(losses[0], cross_entropy(outputs, batch.targets[0]))


@pytest.mark.parametrize("build", DROPOUT.values(), ids=DROPOUT)
def test_a_run_with_dropout_does_not_depend_on_chunks_or_the_global_seed(tmp_path, build):
    models = []
    for global_seed, at_once in [(0, 4), (1, 1), (2, 3)]:
        torch.manual_seed(7)
        network = build()
        x, y = torch.rand(22, 12), torch.arange(22) % 3
        torch.manual_seed(global_seed)
        algorithm = FedAvg(network, lr=0.5, batch_size=2)
        data = TensorDataModule(x, y, num_clients=4)
        run(algorithm, data, 2, root=tmp_path, clients_at_once=at_once)
        models.append(algorithm.global_model.clone())
    torch.testing.assert_close(models[0], models[1])
    torch.testing.assert_close(models[0], models[2])


# ---- a network's own `train` --------------------------------------------------------------------


class Frozen(nn.Module):
    """A linear layer after BatchNorm that stays in evaluation mode, as detection networks do it."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.norm.running_mean.fill_(5.0)
        self.norm.running_var.fill_(2.0)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.linear(self.norm(x))


@pytest.mark.parametrize("engine", ["auto", "sequential", "vmap"])
@pytest.mark.parametrize("evaluate", [(), ("test",)])
def test_a_network_s_own_train_is_asked_before_the_first_round(tmp_path, engine, evaluate):
    """The statistics stay, and FedAvg on full batches equals plain steps of each client."""
    torch.manual_seed(0)
    x, y, start = torch.randn(24, 4).double(), torch.arange(24) % 2, Frozen().double()
    method = FedAvg(copy.deepcopy(start), lr=0.1, batch_size=None, engine=engine)
    data = owned(np.arange(24) % 4, x, y, x[:3], y[:3], protocol=SharedTest(validation=0.0))
    run(method, data, 3, root=tmp_path, evaluate=evaluate)
    norm = method.network.norm
    assert norm.running_mean.tolist() == [5.0] * 4
    assert norm.num_batches_tracked == 0
    network = start.train()
    for _ in range(3):
        models = []
        for i in range(4):
            client = copy.deepcopy(network)
            F.cross_entropy(client(x[i::4]), y[i::4]).backward()
            models.append([p - 0.1 * p.grad for p in client.parameters()])
        for parameter, *values in zip(network.parameters(), *models, strict=True):
            parameter.data = torch.stack(values).mean(0).detach()
    for ours, plain_one in zip(method.network.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(ours, plain_one, rtol=0, atol=1e-12)
