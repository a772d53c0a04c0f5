"""A checkpoint that was changed is refused in one line that names it, and so are flipped bits."""

import copy
import random
from functools import partial
from typing import Any

import pytest
import torch

from datamodules import ConfigError, DigitsDataModule
from models import MLP
from pfl import FederatedLoop
from pfl.algorithms import FedAvg
from pfl.callbacks import LocalBaseline, RoundCheckpoint
from pfl.method import dense
from tests.algorithms.methods import differing, everything
from tests.problems import quiet

CLIENTS = 4
OTHERS: tuple[Any, ...] = ("x", -1.5, None, [], {}, torch.zeros(2, 2, dtype=torch.int32))


class Keeps(FedAvg):
    """FedAvg with a dense and a sparse client state and a server state, which all count."""

    def __init__(self, network, **kwargs):
        super().__init__(network, **kwargs)
        self.add_client_state("model", lambda: self.global_model)
        self.add_client_state("large", sparse=True)
        self.add_server_state("last", torch.zeros_like(self.global_model))

    def download(self):
        return {"w": dense(self.global_model), "last": dense(self.last)}

    def client_update(self, clients, w):
        start = (w + clients.received["last"] + clients.state["model"] + clients.state["large"]) / 3
        models = self.local_sgd(clients, start)
        clients.state["model"] = models
        clients.state["large"] = torch.where(models > models.mean(), models, 0)
        return models

    def server_update(self, mean):
        super().server_update(mean)
        self.last.copy_(mean["w"])


def fit(root, rounds, ckpt_path=None):
    """Trains a method that keeps something of every kind."""
    torch.manual_seed(0)
    algorithm = Keeps(MLP(64, [2]), server_optimizer=partial(torch.optim.Adam, lr=0.1))
    trainer = quiet(
        root, rounds, RoundCheckpoint(every_seconds=0), LocalBaseline(), limit_val_batches=0
    )
    loop = FederatedLoop(DigitsDataModule(CLIENTS), clients_per_round=None)
    trainer.fit(algorithm, datamodule=loop, ckpt_path=ckpt_path)
    return algorithm


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What is left in memory, and the rows of metrics, of an uninterrupted run."""
    algorithm = fit(tmp_path_factory.mktemp("whole"), 2)
    return everything(algorithm), algorithm.trainer.recorder.rows


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoint of the first round."""
    root = tmp_path_factory.mktemp("saved")
    fit(root, 1)
    return torch.load(root / "run" / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.fixture
def attempt(tmp_path, expected):
    """Goes on from a checkpoint; returns whether it was refused. Otherwise the run is whole."""
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    (path.parent / "previous.ckpt").touch()

    def go_on(content, what):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        try:
            algorithm = fit(tmp_path, 2, path)
        except ConfigError as error:
            line = str(error)
            assert line.startswith(("ckpt_path: ", "trainer.callbacks: LocalBaseline")), (
                what,
                line,
            )
            assert "\n" not in line and len(line) < 700, (what, line)
            if line.startswith(f"ckpt_path: {path}"):
                assert "the one before is" in line, (what, line)
            return True
        assert differing(everything(algorithm), expected[0]) == set(), what
        assert algorithm.trainer.recorder.rows == expected[1], what
        return False

    return go_on


def paths(content, depth=2):
    """The keys that lead to each value of nested dictionaries and lists."""
    if not isinstance(content, dict | list) or depth == 0:
        return
    for key in content if isinstance(content, dict) else range(len(content)):
        yield (key,)
        yield from ((key, *rest) for rest in paths(content[key], depth - 1))


def inner(content, path):
    """The container of the last key."""
    for key in path[:-1]:
        content = content[key]
    return content


def with_other(saved, path, value):
    content = copy.deepcopy(saved)
    inner(content, path)[path[-1]] = value
    return content


def without(saved, path):
    content = copy.deepcopy(saved)
    del inner(content, path)[path[-1]]
    return content


def other(value, number):
    """A value of another type."""
    others = [one for one in OTHERS if type(one) is not type(value)]
    return others[number % len(others)]


PARTS = ["callbacks", "federated", "loops", "optimizer_states", "state_dict", "the rest"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*metrics.csv was changed or removed")  # only the file is there
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_missing_or_of_another_type(saved, attempt, part):
    refused = []
    depth = {"loops": 3, "optimizer_states": 4, "callbacks": 3, "federated": 3}.get(part, 2)
    for number, path in enumerate(paths(saved, depth)):
        if path[0] == part or (part == "the rest" and path[0] not in PARTS):
            name = " ".join(map(str, path))
            refused.append(attempt(without(saved, path), f"without {name}"))
            value = other(inner(saved, path)[path[-1]], number)
            refused.append(attempt(with_other(saved, path, value), f"{name} is {value!r}"))
    assert any(refused) or part == "the rest"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*metrics.csv was changed or removed")
def test_a_flipped_bit_is_refused_or_changes_nothing(saved, attempt, tmp_path):
    """Padding and dates of the archive may change: nothing reads them."""
    torch.save(saved, tmp_path / "whole.ckpt")
    whole, rng = (tmp_path / "whole.ckpt").read_bytes(), random.Random(0)
    refused = 0
    for _ in range(100):
        flipped, place = bytearray(whole), rng.randrange(8 * len(whole))
        flipped[place // 8] ^= 1 << place % 8
        refused += attempt(bytes(flipped), f"bit {place}")
    assert refused > 30
