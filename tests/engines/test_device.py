"""Training on a device other than the CPU: the same numbers, and nothing that waits in every step.

`tests.device` says which device this is on a machine without one.
"""

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, LeastSquares, Sizes
from models import MLP, HalfSquaredError, LinearRegression
from pfl.algorithms import FedACS, FedAgg, FedAvg, FedCLUP, FedPD, FedSLR
from pfl.callbacks import LocalBaseline, Optimality
from pfl.clients import store
from pfl.clients.memory_tiers import Tiers
from tests.algorithms.methods import METHODS, small_network, small_world
from tests.device import CPU, DEVICE, OtherDevice, on_device
from tests.problems import run

SIZES = Sizes([150, 90, 70, 50, 30])  # few samples, as an imitated device is slow


def fit(root, algorithm, data, callbacks=(), **arguments):
    """Train for two rounds, and test where there are test samples; the rows of metrics."""
    built = [make() for make in callbacks]
    run(algorithm, data, 2, root=root, callbacks=built, evaluate=(), **arguments)
    trainer, scores = algorithm.trainer, []
    if data.partition.test.sizes.any():
        scores = trainer.test(algorithm, datamodule=trainer.datamodule, verbose=False)
    return [*trainer.recorder.rows, *scores]


def on_device_alone(root, make, data, **arguments):
    """A run on the other device: the method, its rows, and how often the device was waited for."""
    with OtherDevice() as device:
        torch.manual_seed(0)
        method = make()
        rows = fit(root, method, data, strategy=on_device(), **arguments)
    return method, rows, Counter(device.waits)


def on_both(root, make, data, **arguments):
    """The same run on the CPU and on the other device; how often the latter was waited for."""
    torch.manual_seed(0)
    expected = make()
    rows = fit(root, expected, data, **arguments)
    actual, other_rows, waits = on_device_alone(root, make, data, **arguments)
    torch.testing.assert_close(actual.global_model, expected.global_model, rtol=0, atol=1e-12)
    for one, other in zip(rows, other_rows, strict=True):
        assert other == pytest.approx(one, rel=1e-9, nan_ok=True)
    return waits


def in_every_step(few, many):
    """Whose number of waits grows with the number of local steps: the modules."""
    return {place.rpartition(" in ")[2] for place in few | many if few[place] != many[place]}


# Singular values in every step: cuSOLVER answers to the processor.
IN_EVERY_STEP = {name: {"pfl/proximal.py"} for name in ("LPGD", "FedSLR, S+LR")}
# Which clients still learn their weights is decided on the processor.
IN_EVERY_STEP["FedALA"] = {"pfl/algorithms/mixtures/fedala.py"}

# Labels and noise for the generator are drawn by NumPy.
IN_EVERY_STEP |= {
    name: {"pfl/algorithms/distillation/fedgen.py"} for name in ("FedGen", "FedGen, head")
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_numbers_of_the_cpu(tmp_path, name):
    """Once, and then waits are counted with every sample twice: twice as many local steps."""

    def make():
        return METHODS[name].make(small_network(), lr=0.2, batch_size=1)

    classes = METHODS[name].classes
    few = on_both(tmp_path, make, small_world(classes=classes))
    many = on_device_alone(tmp_path, make, small_world(2, classes=classes))[-1]
    assert few.total() > 0
    assert in_every_step(few, many) == IN_EVERY_STEP.get(name, set())


def convolutions(*layers):
    return nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def mlp(*layers):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), *layers, nn.Linear(6, 10))


RUNS = {
    "chain": (lambda: MLP(64, (6,)), FedAvg, {}, {}),
    "vmap": (convolutions, FedAvg, {}, {}),
    "loop": (convolutions, FedAvg, {"engine": "sequential"}, {}),
    "BatchNorm": (lambda: convolutions(nn.BatchNorm2d(4)), FedAvg, {}, {}),
    "own BatchNorm": (lambda: convolutions(nn.BatchNorm2d(4)), FedAvg, {"buffers": "local"}, {}),
    "dropout": (lambda: mlp(nn.Dropout(0.5)), FedAvg, {}, {}),
    "Adam": (mlp, FedAvg, dict.fromkeys(("optimizer", "server_optimizer"), torch.optim.Adam), {}),
    "weights of classes": (
        *(mlp, FedAvg, {"loss": nn.CrossEntropyLoss(weight=torch.arange(1.0, 11.0))}, {}),
    ),
    "chunks": (
        *(mlp, FedSLR, {"low_rank_penalty": 0.01}),
        {"clients_at_once": 2, "clients_per_round": 4},
    ),
    "16 bits of state": (convolutions, FedCLUP, {"penalty": 0.1}, {"state_dtype": "float16"}),
    "all known": (mlp, FedACS, {"candidates": "all"}, {"clients_per_round": 3}),
    "fixed point": (mlp, FedAgg, {"mean_field": "fixed_point"}, {"clients_per_round": 3}),
    "tolerance": (mlp, FedPD, {"batch_size": None, "residual_tolerance": 1e-3}, {}),
}
# Which clients go on is decided on the processor; an epoch of FedAgg has its rate.
PER_EPOCH = {
    "tolerance": {"pfl/algorithms/papers/fedpd.py"},
    "fixed point": {"pfl/algorithms/papers/fedagg.py"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_networks_and_options_give_the_numbers_of_the_cpu(tmp_path, name):
    """Handwritten digits, dealt unequally to five clients; with one local epoch and with two."""
    network, kind, arguments, loop = RUNS[name]
    data = DigitsDataModule(None, SIZES)
    train = {"lr": 0.05, "batch_size": 32, **arguments}

    def waits(epochs):
        def make():
            return kind(network(), local_epochs=epochs, **train)

        return on_both(tmp_path, make, data, **loop)

    few, many = waits(1), waits(2)
    assert in_every_step(few, many) == PER_EPOCH.get(name, set())


@pytest.mark.parametrize("name", ["FedPD, VR", "FedCLUP", "FedACS, quantile 1"])
def test_states_on_the_device_and_beyond(tmp_path, monkeypatch, name):
    """There is room for a row of 26 float64 on the device, two in memory; the rest is a file."""
    stores = []

    class Small(Tiers):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            if self.device == DEVICE:
                self.limit.update(device=26 * 8, memory=2 * 26 * 8)
                stores.append(self)

    monkeypatch.setattr(store, "Tiers", Small)
    monkeypatch.setattr(store.ClientStore, "prefetch", lambda *_: None)  # modes are a thread's own

    def make():
        return METHODS[name].make(small_network(), loss=HalfSquaredError(), lr=0.2, batch_size=2)

    on_both(tmp_path, make, small_world(), clients_at_once=3)
    assert all(tiers.used[tier] for tiers in stores for tier in ("device", "memory", "file"))
    assert stores[0].used["device"] == 26 * 8


def test_the_local_baseline_gives_the_numbers_of_the_cpu(tmp_path):
    data, baselines = DigitsDataModule(None, SIZES), []

    def alone():
        baselines.append(LocalBaseline())
        return baselines[-1]

    on_both(tmp_path, lambda: FedSLR(mlp(), batch_size=32), data, callbacks=[alone])
    expected, actual = (callback.scores for callback in baselines)
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=1e-9)


def test_a_device_that_does_not_hold_what_clients_remember(tmp_path):
    """Of a chunk of seven clients: they are taken in smaller groups, to the same end."""

    class Short(FedSLR):
        attached: ClassVar[list[int]] = []

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            read = self.states.read

            def short(clients):
                self.attached.append(len(clients))
                if self.device == DEVICE and len(clients) > 2:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                read(clients)

            self.states.read = short

    with pytest.warns(UserWarning, match="does not hold"):
        data = DigitsDataModule(None, Sizes([40] * 7))
        on_both(tmp_path, lambda: Short(mlp(), batch_size=16), data)
    assert 7 in Short.attached[1:]


def test_optimality_gives_the_numbers_of_the_cpu(tmp_path):
    data = LeastSquares(4, 12, 3)

    def make():
        return FedCLUP(LinearRegression(3), penalty=0.1, lr=0.01, batch_size=None)

    on_both(tmp_path, make, data, callbacks=[Optimality])


# ---- the device itself --------------------------------------------------------------------------


def test_the_imitated_device_computes_as_the_cpu():
    with OtherDevice():
        x = torch.arange(6.0, device=DEVICE).view(2, 3)
        row = x[1]
        row += 1  # a view: x changes too
        assert x.to(CPU).tolist() == [[0, 1, 2], [4, 5, 6]]
        weight = nn.Parameter(torch.ones(3, device=DEVICE))
        (x @ weight).square().sum().backward()
        assert weight.grad.to(CPU).tolist() == [120, 156, 192]  # 2 (3 x_0 + 15 x_1)


def test_the_device_refuses_tensors_of_two_devices():
    with OtherDevice():
        x = torch.ones(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="two devices"):
            x + torch.ones(3)
        assert (x + torch.tensor(1.0)).to(CPU).tolist() == [2, 2, 2]  # as a GPU allows


@pytest.mark.parametrize(
    ("waits", "operation"),
    [
        (1, lambda x: float(x.sum())),
        (1, lambda x: x.cpu()),
        (1, lambda x: x[x > 0]),
        (1, lambda x: x[torch.tensor([0])]),
        (1, lambda x: torch.ones(2).to(x.device)),
        (1, lambda x: torch.tensor([1, 2], device=x.device)),
        (0, lambda x: torch.ones(2).to(x.device, non_blocking=True)),
        (0, lambda x: x.softmax(0).cumsum(0)[1:].clamp_min(0.5)),
        (0, lambda x: torch.where(x > 0, x, 0.0)),
    ],
)
def test_the_imitated_device_counts_waits(waits, operation):
    with OtherDevice() as device:
        x = torch.ones(3, device=DEVICE)
        device.waits.clear()
        operation(x)
    assert len(device.waits) == waits
