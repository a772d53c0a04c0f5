"""What engines have in common: groups of clients, caches, seeds, and the guard of shared values."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from pfl.engines.base import Engine
from pfl.engines.batch import Batch
from pfl.engines.sequential import SequentialEngine
from pfl.engines.threads import GROUP_FLOATS
from pfl.engines.vmap import VmapEngine
from tests.refusal import refused


class Alone(Engine):
    """An engine with the defaults of all."""

    name = "alone"

    def gradient(self, w, batch, buffers=None, objective=None):
        raise AssertionError


class Together(Alone):
    batched = True


def made(kind, size=1, device="cpu", **facts):
    """An engine for models of some size on a device."""
    space = SimpleNamespace(size=size, vector=SimpleNamespace(device=SimpleNamespace(type=device)))
    return kind(SimpleNamespace(space=space, **facts))


SMALL = GROUP_FLOATS // 8


@pytest.mark.parametrize(
    ("kind", "device", "size", "clients", "threads", "expected"),
    [
        (Alone, "cpu", 3, 10, 4, 1),
        (Alone, "cuda", 3, 10, 4, 3),
        (Alone, "cuda", 3, 0, 4, 1),
        # Ten clients on four threads are three each, unless they are so small that threads wait.
        (Together, "cuda", SMALL, 10, 4, 3),
        (Together, "cuda", SMALL // 3, 10, 4, 10),
        (Together, "cuda", SMALL // 3 + 1, 10, 4, 3),
        (Together, "cuda", SMALL, 0, 4, 1),
        (Together, "cpu", SMALL // 3 + 1, 10, 4, 3),
        # On a CPU a group's models fit into its cache.
        (Together, "cpu", GROUP_FLOATS // 2, 10, 4, 2),
        (Together, "cpu", GROUP_FLOATS // 2 + 1, 10, 4, 1),
        (Together, "cpu", 2 * GROUP_FLOATS, 10, 4, 1),
        (Together, "cuda", 2 * GROUP_FLOATS, 10, 4, 3),
        (Together, "cpu", 1, 2 * GROUP_FLOATS, 1, GROUP_FLOATS),
    ],
)
def test_clients_that_train_in_lock_step(kind, device, size, clients, threads, expected):
    assert made(kind, size, device).group_size(clients, threads) == expected


def test_samples_that_a_cache_holds():
    """Half as many where networks have feature maps; whole numbers, rounded down."""
    for kind, factor in ((Alone, 2), (Together, 1)):
        found = made(kind).samples_at_once(1000)
        assert type(found) is int
        assert found == int(GROUP_FLOATS / (1000 * factor))


def test_engines_say_what_they_can():
    assert not (SequentialEngine.batched or Alone.batched)
    assert VmapEngine.batched
    assert SequentialEngine.serves_objectives and VmapEngine.serves_objectives
    assert not (Alone.serves_objectives or Alone.keeps_inputs or Alone.strict)
    assert Alone.max_threads is None
    assert made(Alone).releases_gil() is False


def test_seeds_are_drawn_only_for_a_network_that_draws_from_them():
    batch = Batch(torch.zeros(2, 3, 1), torch.zeros(2, 3), [3, 2])
    without = made(Alone, has_keys=False).seeds_of(batch)
    assert without.tolist() == [0, 0] and without.dtype == torch.int64
    with_keys = SimpleNamespace(seeds=lambda: "seeds", clients=2)
    assert made(Alone, has_keys=True).seeds_of(with_keys) == "seeds"


def test_outputs_are_those_of_each_row_s_own_samples():
    """Rows of three and two samples; the model and the statistics of each row are added."""

    def predict(w, inputs, buffers):
        if buffers is None:
            return inputs + w
        return inputs + w + buffers

    engine = made(Alone, predict=predict)
    inputs = torch.arange(6.0).view(2, 3, 1)
    w = torch.tensor([[10.0], [20.0]])
    batch = Batch(inputs, torch.zeros(2, 3), [3, 2])
    found = engine.outputs(w, batch)
    assert found[..., 0].tolist() == [[10, 11, 12], [23, 24, 0]]
    found = engine.outputs(w, batch, torch.tensor([[100.0], [200.0]]))
    assert found[..., 0].tolist() == [[110, 111, 112], [223, 224, 0]]


def test_the_guard_finds_writes_into_what_clients_share():
    network = nn.Linear(1, 1)
    engine = made(Alone, original=network)
    shared = {"w": torch.zeros(2), "c": torch.zeros(2), "free": nn.Parameter(torch.zeros(1))}
    clients = SimpleNamespace(ids=np.array([3, 5]))
    with engine.guard(clients, lambda: shared):
        shared["w"].clone().add_(1)
    line = "model: its code changed `c` in place, but other clients use the same values"
    with refused(line), engine.guard(clients, lambda: shared):
        shared["c"][0] = 0
    line = "its code changed `self.network` in place"
    with refused(line), torch.no_grad(), engine.guard(clients, lambda: shared):
        network.bias.add_(1)
    with refused("its code changed `w`, `c` in place"), engine.guard(clients, lambda: shared):
        shared["w"].add_(1)
        shared["c"].add_(1)
    line = "model: its code changed `clients.ids` in place, from [3, 5] to [3, 0]; work on a copy"
    with refused(line), engine.guard(clients, lambda: shared):
        clients.ids[1] = 0
