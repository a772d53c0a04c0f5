"""The measured choice between engines, with a clock that engines move, and in whole runs.

It is made on GPUs alone. Here CPUs get the stand-in of `tests.recorder`.
"""

import copy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from datamodules import DigitsDataModule, Sizes
from models import MLP
from pfl import FederatedLoop
from pfl.algorithms import FedAvg
from pfl.engines import graph, timing
from pfl.engines.base import Engine
from pfl.engines.batch import StepBlock, default_loss
from pfl.engines.graph import GraphEngine, recording_of
from pfl.engines.local_step import Step
from pfl.engines.matrix_convolution import with_matrix_products
from pfl.engines.oracle import Oracle
from pfl.engines.sequential import SequentialEngine
from pfl.engines.timing import Timing, candidates, engine_named, fastest_engine
from pfl.engines.unrolled import UNROLLED, UnrolledEngine
from pfl.parameters import ParameterSpace
from pfl.randomness import Seeded
from tests.problems import quiet
from tests.recorder import Recorder

ROUTINE = 0.010
"""Seconds that the sequential engine takes for a client's step."""


class Clock:
    """A clock that only engines move."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


@pytest.fixture
def recorder(monkeypatch):
    """CPUs can record, as GPUs do."""
    recorder = Recorder()
    monkeypatch.setitem(graph.RECORDERS, "cpu", recorder)
    return recorder


class Slow(nn.Linear):
    """A layer that takes some time."""

    clock: Clock

    def forward(self, x):
        self.clock.now += ROUTINE
        return super().forward(x)


class Timed(Engine):
    """An engine that takes `seconds` for a step of all clients.

    Args:
        fault: Changes the gradients, or raises.
        memory: For how many clients there is memory.
    """

    batched = True

    def __init__(self, name, runner, clock, seconds, fault=None, memory=1000):
        super().__init__(runner)
        self.name = name
        self.clock = clock
        self.seconds = seconds
        self.fault = fault
        self.memory = memory
        self.calls = 0
        self.released = 0

    def gradient(self, w, batch, buffers=None, objective=None):
        begun = self.clock.now
        self.calls += 1
        if len(w) > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        loss, g = SequentialEngine(self.runner).gradient(w, batch)
        self.clock.now = begun + self.seconds
        if self.fault is not None:
            g = self.fault(g)
        return loss, g

    def release(self):
        self.released += 1


def problem(clock, clients=4):
    """A runner, and two local steps of some clients."""
    torch.manual_seed(0)
    network = nn.Sequential(Slow(5, 3)).double()
    Slow.clock = clock
    oracle = Oracle(network, ParameterSpace(network), default_loss, "sequential")
    x = torch.randn(20, 5, dtype=torch.float64)
    y = torch.randint(3, (20,))
    oracle.inspect(x[:2], y[:2])
    picks = torch.randint(20, (2, clients, 4))
    return oracle.runner, StepBlock(x, y, picks, np.full((2, clients), 4), torch.float64)


def choose(monkeypatch, clock, *engines, clients=4):
    """The choice between engines, each (name, seconds, ...); the last one is the one in use."""
    runner, block = problem(clock, clients)
    made = [Timed(name, runner, clock, *rest) for name, *rest in engines]
    monkeypatch.setattr(timing, "candidates", lambda engine, clients: iter(made))
    return fastest_engine(made[-1], block), made


def other(g):
    return g * 1.2


def raises(g):
    raise ValueError("no rule for\nthis operation")


# ---- the choice ---------------------------------------------------------------------------------


def test_the_fastest_engine_that_is_right_is_chosen(monkeypatch, clock):
    """Four clients take the sequential engine 40 milliseconds, of 10 for each."""
    found, made = choose(
        monkeypatch,
        clock,
        ("slow", 0.030),
        ("wrong", 0.001, other),
        ("not finite", 0.001, lambda g: g * torch.nan),
        ("raises", 0.001, raises),
        ("fast", 0.002),
        ("in use", 0.020),
    )
    assert found.engine is made[4]
    assert found.clients == 4
    expected = {"sequential": 40, "slow": 30, "fast": 2, "in use": 20}
    assert found.milliseconds == pytest.approx(expected)
    unequal = "its steps are not those of the sequential engine"
    assert found.refused == {
        "wrong": unequal,
        "not finite": unequal,
        "raises": "no rule for",
    }
    assert found.describe() == (
        "engine: fast; milliseconds of a local step of 4 client(s): "
        "fast 2, in use 20, slow 30, sequential 40"
    )
    # All others give their memory back.
    assert [bool(engine.released) for engine in made] == [True, True, True, True, False, True]


def test_the_sequential_engine_is_chosen_where_nothing_is_faster(monkeypatch, clock):
    found, _ = choose(monkeypatch, clock, ("slow", 0.090), ("in use", 0.050))
    assert found.engine.name == "sequential"


@pytest.mark.parametrize(("later", "chosen"), [(0.0085, "first"), (0.0075, "later")])
def test_a_later_engine_must_be_clearly_faster(monkeypatch, clock, later, chosen):
    found, _ = choose(monkeypatch, clock, ("first", 0.010), ("later", later), ("in use", 0.050))
    assert found.engine.name == chosen


def test_a_slow_engine_is_timed_once(monkeypatch, clock):
    """Calls: a warm-up and a time of two steps, and one step that is compared; eight times else."""
    _, made = choose(monkeypatch, clock, ("slow", 0.090), ("fast", 0.001), ("in use", 0.050))
    assert [engine.calls for engine in made] == [5, 2 + 8 * 2 + 1, 5]


@pytest.mark.parametrize("refused", [False, True])
def test_the_engine_in_use_is_timed_where_its_recording_was_not(monkeypatch, clock, refused):
    fault = None
    if refused:
        fault = raises
    own = ("CUDA graph of in use", 0.010, fault)
    found, _ = choose(monkeypatch, clock, own, ("other", 0.009), ("in use", 0.002))
    assert recording_of(SimpleNamespace(name="in use")) == own[0]
    assert ("in use" in found.milliseconds) == refused
    if refused:
        assert found.engine.name == "in use"
    else:
        assert found.engine.name == own[0]


@pytest.mark.parametrize(("memory", "clients"), [(8, 8), (4, 4), (3, 2), (1, 1)])
def test_half_of_the_clients_take_the_steps_where_there_is_no_memory(
    monkeypatch, clock, memory, clients
):
    engines = (("one", 0.002, None, memory), ("in use", 0.5, None, memory))
    found, _ = choose(monkeypatch, clock, *engines, clients=8)
    assert (found.engine.name, found.clients) == ("one", clients)
    assert found.milliseconds["sequential"] == pytest.approx(10 * clients)


def test_no_memory_for_a_single_client(monkeypatch, clock):
    found, _ = choose(monkeypatch, clock, ("one", 0.002, None, 0), ("in use", 0.002, None, 0))
    assert (found.engine.name, found.clients) == ("sequential", 1)
    assert found.refused == {"one": "no memory", "in use": "no memory"}


def test_an_engine_without_memory_beside_one_with(monkeypatch, clock):
    found, _ = choose(monkeypatch, clock, ("one", 0.001, None, 3), ("in use", 0.010))
    assert (found.engine.name, found.clients) == ("in use", 4)
    assert found.refused == {"one": "no memory"}


class Failing(nn.Module):
    """Fails in the place of the sequential engine's own network."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


def test_without_memory_for_the_sequential_engine_nothing_is_chosen(monkeypatch, clock):
    runner, block = problem(clock)
    one = Timed("in use", runner, clock, 0.001)
    network = runner.network
    network.append(Failing(torch.OutOfMemoryError("CUDA out of memory.")))
    found = fastest_engine(one, block)
    assert found.engine is one and found.refused == {"sequential": "no memory"}
    network[1].error = RuntimeError("another error")
    with pytest.raises(RuntimeError, match="another error"):
        fastest_engine(one, block)


def test_gradients_that_are_not_finite_refuse_no_engine(monkeypatch, clock):
    runner, block = problem(clock)
    block.inputs.fill_(torch.nan)
    made = [Timed("one", runner, clock, 0.001), Timed("in use", runner, clock, 0.001)]
    monkeypatch.setattr(timing, "candidates", lambda engine, clients: iter(made))
    assert fastest_engine(made[1], block).engine is made[0]


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_runs_take_the_first_engine_that_is_right(monkeypatch, clock, deterministic):
    """Even one that this clock calls slower than all others: another time it may not be."""
    engines = (("wrong", 0.001, other), ("first", 0.5), ("fast", 0.001), ("in use", 0.001))
    found, made = choose(monkeypatch, clock, *engines)
    assert found.engine is made[1]
    assert made[2].calls == made[3].calls == 0


# ---- the candidates -----------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.memory(x)[0][:, -1])


def convolutions(*layers):
    return nn.Sequential(nn.Conv2d(1, 2, 3), *layers, nn.Flatten(), nn.Linear(8, 3))


NAMES = ["graph of vmap", "graph of unrolled", "vmap"]
if "pfl.engines.chains" in sys.modules:  # a folder that can be deleted
    NAMES = ["graph of compiled chain", "graph of vmap", "graph of unrolled", "compiled chain"]

NETWORKS = {  # a network, the shape of a sample, and what may run it
    "chain": (
        lambda: nn.Sequential(nn.Linear(4, 3)),
        (4,),
        NAMES,
    ),
    "no chain": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Softplus()),
        (4,),
        ["graph of vmap", "graph of unrolled", "vmap"],
    ),
    "convolutions": (
        convolutions,
        (1, 4, 4),
        ["graph of vmap", "graph of vmap of matrix products", "graph of unrolled", "vmap"],
    ),
    "convolutions with dropout": (
        lambda: convolutions(nn.Dropout(0.5)),
        (1, 4, 4),
        ["graph of vmap", "graph of vmap of matrix products", "graph of unrolled", "vmap"],
    ),
    "recurrent": (Recurrent, (6, 4), ["graph of unrolled", "sequential"]),
    "running statistics": (
        lambda: convolutions(nn.BatchNorm2d(2)),
        (1, 4, 4),
        ["graph of unrolled", "sequential"],
    ),
}


def looked_at(network, shape, engine="auto"):
    """An oracle, and two local steps of three clients."""
    torch.manual_seed(0)
    x = torch.randn(20, *shape, dtype=torch.float64)
    y = torch.randint(3, (20,))
    if engine == "auto" and any(isinstance(m, nn.Conv2d) for m in network.modules()):
        engine = "vmap"  # as `auto` is on a GPU
        if any(isinstance(m, nn.BatchNorm2d) for m in network.modules()):
            engine = "sequential"
    oracle = Oracle(network, ParameterSpace(network), default_loss, engine)
    oracle.inspect(x[:2], y[:2])
    oracle.requested = "auto"
    picks = torch.randint(20, (2, 3, 4))
    block = StepBlock(x, y, picks, np.full((2, 3), 4), torch.float64)
    block.lasting = True
    return oracle, block


@pytest.mark.parametrize("name", NETWORKS)
def test_candidates_are_right_and_are_found_by_name(recorder, name):
    make, shape, names = NETWORKS[name]
    oracle, block = looked_at(make().double(), shape)
    engine = oracle.engine
    found = [one.name for one in candidates(engine, 3)]
    assert [one.removeprefix("CUDA ") for one in found] == names
    many = [one.name for one in candidates(engine, UNROLLED + 1)]
    assert many == [one for one in found if "unrolled" not in one]
    w = oracle.space.vector.detach()
    with torch.no_grad():
        expected = w.repeat(3, 1)
        SequentialEngine(oracle.runner).descend(expected, [block], Step(0.1))
        for one in (*found, "sequential"):
            again = engine_named(one, engine, 3)
            assert again.name == one
            v = w.repeat(3, 1)
            again.descend(v, [block], Step(0.1))
            torch.testing.assert_close(v, expected, rtol=1e-12, atol=1e-12)
        chosen = fastest_engine(engine, block)
    assert chosen.refused == {}
    assert set(chosen.milliseconds) >= {one for one in found if one.startswith("CUDA")}
    assert engine_named("another", engine, 3) is None


def test_matrix_products_are_of_a_network_in_training(recorder):
    """A user's network may have come in evaluation mode, whole or in part."""
    network = convolutions(nn.Dropout(0.5)).double()
    network[1].eval()
    oracle, _ = looked_at(network, (1, 4, 4))
    assert all(m.training for m in with_matrix_products(oracle.runner).network.modules())


# ---- the oracle ---------------------------------------------------------------------------------


def assert_nothing_is_chosen(oracle, block, name=None):
    engine = oracle.engine
    oracle.choose_fastest(block, name)
    assert oracle.engine is engine and oracle.chosen is None and oracle.timing is None


def test_nothing_is_chosen_on_cpus():
    oracle, block = looked_at(nn.Linear(4, 3).double(), (4,))
    assert_nothing_is_chosen(oracle, block)
    assert_nothing_is_chosen(oracle, block, "sequential")


@pytest.mark.parametrize("engine", ["sequential", "vmap", "debug"])
def test_nothing_is_chosen_where_an_engine_was_asked_for(recorder, engine):
    oracle, block = looked_at(nn.Linear(4, 3).double(), (4,), engine)
    oracle.requested = engine
    assert_nothing_is_chosen(oracle, block, "CUDA graph of vmap")


def test_images_have_their_channels_last_in_lower_precision(recorder):
    """Where the GPU's convolutions want them so; the choice between the layouts is measured."""

    def bf16():
        return torch.autocast("cpu", torch.bfloat16)

    layouts = []

    class Looking(nn.Conv2d):
        def forward(self, x):
            layouts.append(x.is_contiguous(memory_format=torch.channels_last))
            return super().forward(x)

    network = nn.Sequential(Looking(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    torch.manual_seed(0)
    x = torch.randn(20, 2, 4, 4)
    y = torch.randint(3, (20,))
    oracle = Oracle(network, ParameterSpace(network), default_loss, "sequential")
    oracle.inspect(x[:2], y[:2], precision=bf16)
    names = [one.name for one in candidates(oracle.engine, 3)]
    assert names == [
        "CUDA graph of unrolled",
        "CUDA graph of unrolled, channels last",
        "sequential",
    ]
    block = StepBlock(x, y, torch.randint(20, (2, 3, 4)), np.full((2, 3), 4), torch.float32)
    for last, name in enumerate(names[:2]):
        layouts.clear()
        v = oracle.space.vector.detach().repeat(3, 1)
        with torch.no_grad():
            engine_named(name, oracle.engine, 3).descend(v, [block], Step(0.1))
        assert set(layouts) == {bool(last)}
    with torch.no_grad():
        assert fastest_engine(oracle.engine, block).refused == {}
    oracle.inspect(x[:2], y[:2])
    assert not any("last" in one.name for one in candidates(oracle.engine, 3))


class Drawing(nn.Linear):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


def test_nothing_is_chosen_for_networks_that_draw_from_a_generator(recorder):
    oracle, block = looked_at(Drawing(4, 3).double(), (4,))
    assert_nothing_is_chosen(oracle, block, "CUDA graph of unrolled")


def test_statistics_that_wait_for_the_gpu_are_not_recorded(recorder):
    """With the momentum None they are means over all batches, whose number the layer reads."""
    network = convolutions(nn.BatchNorm2d(2, momentum=None)).double()
    oracle, block = looked_at(network, (1, 4, 4))
    oracle.choose_fastest(block)
    assert oracle.chosen == "sequential"
    assert "waits for the GPU" in oracle.timing.refused["CUDA graph of unrolled"]


class OwnStatistics(SequentialEngine):
    """An engine whose gradients are right, and whose running statistics are those of its start."""

    name = "own statistics"

    def gradient(self, w, batch, buffers=None, objective=None):
        return super().gradient(w, batch, buffers.clone(), objective)

    def take_step(self, v, batch, step, buffers, objective):
        return super().take_step(v, batch, step, buffers.clone(), objective)


def test_an_engine_with_other_running_statistics_is_refused(recorder, monkeypatch):
    oracle, block = looked_at(convolutions(nn.BatchNorm2d(2)).double(), (1, 4, 4), "sequential")
    wrong = OwnStatistics(oracle.runner)
    right = UnrolledEngine(oracle.runner)
    right.name = "right"
    monkeypatch.setattr(timing, "candidates", lambda engine, clients: iter([wrong, right]))
    with torch.no_grad():
        chosen = fastest_engine(oracle.engine, block)
    assert list(chosen.refused) == ["own statistics"]
    assert "right" in chosen.milliseconds


class Following(nn.Module):
    """Divides values by a scale that follows their sizes slowly."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        if self.training:
            self.scale.lerp_(x.detach().abs().mean(0, keepdim=True).mean(1), 0.01)
        return x / self.scale


def test_statistics_are_compared_by_their_moves(recorder, monkeypatch):
    """A hundredth of the way to another value: what they are then is about what they were."""
    network = nn.Sequential(Following(), nn.Linear(4, 3)).double()
    oracle, block = looked_at(network, (4,), "sequential")
    wrong = OwnStatistics(oracle.runner)
    monkeypatch.setattr(timing, "candidates", lambda engine, clients: iter([wrong]))
    with torch.no_grad():
        chosen = fastest_engine(oracle.engine, block)
    assert list(chosen.refused) == ["own statistics"]


def test_nothing_is_chosen_for_private_gradients(recorder):
    oracle, block = looked_at(nn.Linear(4, 3).double(), (4,))
    oracle.make_private(1.0, 1.0, 4, Seeded(0))
    assert_nothing_is_chosen(oracle, block)


def test_a_choice_is_said_in_one_line(recorder, caplog):
    oracle, block = looked_at(nn.Linear(4, 3).double(), (4,))
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        oracle.choose_fastest(block)
    assert isinstance(oracle.timing, Timing)
    assert oracle.engine is oracle.timing.engine
    assert oracle.chosen == oracle.engine.name
    assert [r.message for r in caplog.records] == [oracle.timing.describe()]
    oracle.inspect(block.inputs[:2], block.targets[:2])  # of another run
    assert oracle.chosen is None and oracle.timing is None


def test_the_engine_of_an_interrupted_run_is_not_timed(recorder, clock):
    oracle, block = looked_at(nn.Linear(4, 3).double(), (4,))
    for name in ("CUDA graph of unrolled", "sequential", NAMES[-1], "CUDA graph of vmap"):
        oracle.choose_fastest(block, name)
        assert oracle.chosen == oracle.engine.name == name and oracle.timing is None
    assert recorder.count == 0
    oracle.choose_fastest(block, "an engine of a later version")
    assert oracle.timing is not None


# ---- runs ---------------------------------------------------------------------------------------


def train(root, method, rounds, data, checkpoint=None):
    trainer = quiet(root, rounds, precision="64-true", enable_checkpointing=False)
    loop = FederatedLoop(data, clients_per_round=4, evaluate=())
    trainer.fit(method, datamodule=loop, ckpt_path=checkpoint)
    return trainer


def federated(engine="auto"):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), *MLP(64, (6,)).body, nn.Dropout(0.2), nn.Linear(6, 10))
    return FedAvg(network, lr=0.05, batch_size=20, engine=engine)


def test_a_run_keeps_its_engine_when_it_is_resumed(tmp_path, recorder):
    """Two rounds, and two rounds more with each engine that the first two might have had."""
    data = DigitsDataModule(None, Sizes([90, 70, 50, 41, 30]))
    whole = federated("sequential")
    train(tmp_path / "whole", whole, 4, data)
    assert whole.oracle.chosen is None
    first = federated()
    trainer = train(tmp_path / "first", first, 2, data)
    path = tmp_path / "first" / "run" / "checkpoints" / "saved.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    names = {f"CUDA {name}" for name in NAMES[:-1]} | {NAMES[-1], "sequential"}
    assert saved["federated"]["engine"] == first.oracle.chosen == first.oracle.engine.name
    assert first.oracle.chosen in names and first.oracle.timing is not None
    for name in sorted(names):
        changed = copy.deepcopy(saved)
        changed["federated"]["engine"] = name
        torch.save(changed, path)
        resumed = federated()
        trainer = train(tmp_path / "first", resumed, 4, data, path)
        assert resumed.oracle.engine.name == resumed.oracle.chosen == name
        assert resumed.oracle.timing is None
        torch.testing.assert_close(resumed.global_model, whole.global_model, rtol=1e-10, atol=1e-12)
        trainer.save_checkpoint(tmp_path / "again.ckpt")
        again = torch.load(tmp_path / "again.ckpt", weights_only=True)
        assert again["federated"]["engine"] == name


def test_a_run_of_a_named_engine_saves_no_choice(tmp_path, recorder):
    method = federated("vmap")
    trainer = train(tmp_path, method, 1, DigitsDataModule(None, Sizes([40, 30, 20, 20])))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert "engine" not in torch.load(tmp_path / "one.ckpt", weights_only=True)["federated"]


def test_a_run_on_cpus_records_nothing(tmp_path):
    method = federated()
    train(tmp_path, method, 1, DigitsDataModule(None, Sizes([40, 30, 20, 20])))
    assert method.oracle.chosen is None
    assert not isinstance(method.oracle.engine, GraphEngine)
