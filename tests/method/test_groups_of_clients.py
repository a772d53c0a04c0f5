"""Clients that train in one group must not influence each other; the engine debug compares."""

import pytest
import torch

from datamodules import DigitsDataModule
from models import SmallCNN
from pfl.algorithms import FedAvg
from pfl.method import Message, dense
from tests.problems import run
from tests.refusal import refused


class Correct(FedAvg):
    """FedAvg with a client state and a second message."""

    def __init__(self, network, **kwargs):
        super().__init__(network, **kwargs)
        self.add_client_state("steps", lambda: torch.zeros(1))

    def client_update(self, clients, w):
        v = w.repeat(len(clients), 1)
        for batch in clients.batches(self.local_schedule):
            loss, g = self.oracle.gradient(v, batch, clients.buffers)
            self.move(v, g, batch)
            self.log_loss("train", loss, batch.counts)
        steps = torch.from_numpy(clients.steps_of(self.local_schedule)).to(w)[:, None]
        clients.state["steps"] = self.kept(steps)
        return {"w": dense(v), "steps": self.message(steps)}

    def move(self, v, g, batch):
        v[: batch.clients] -= self.lr * (g + 0.1 * v)[: batch.clients]

    def kept(self, steps):
        return steps

    def message(self, steps):
        return dense(steps)


class MovesAll(Correct):
    """A method whose steps also move the clients whose data are used up."""

    def move(self, v, g, batch):
        v -= self.lr * (g + 0.1 * v)


class Mixes(Correct):
    """What each client keeps depends on the group: a column became a row."""

    def kept(self, steps):
        return steps + steps.squeeze(1).mean()


class Bytes(Correct):
    """A message counts the bytes of the whole group."""

    def message(self, steps):
        return Message(steps, 4 * len(steps))


FAULTS = {
    MovesAll: "the message 'w' of client",
    Mixes: "clients.state['steps'] of client",
    Bytes: "the message 'steps' of client",
}


def train(root, kind, engine):
    torch.manual_seed(0)
    method = kind(SmallCNN(width=2), lr=0.05, batch_size=16, engine=engine)
    sizes = {"clients_per_round": 4, "clients_at_once": 4, "seed": 1}
    return run(method, DigitsDataModule(6, seed=0), 1, root=root, **sizes)


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_debug_finds_a_client_that_depends_on_its_group(tmp_path, kind):
    """A network with convolutions: on a CPU its clients train one by one, with the other engines
    as well, so that the mistake shows nowhere else."""
    with refused(f"model: {kind.__name__}.client_update", FAULTS[kind]):
        train(tmp_path, kind, "debug")


def test_a_correct_method_is_not_changed_by_the_comparison(tmp_path):
    models = [train(tmp_path, Correct, e).global_model for e in ("debug", "sequential")]
    assert torch.equal(*models)


@pytest.mark.parametrize("at_once", [1, 2, 20])
def test_the_bytes_of_a_column_do_not_depend_on_the_grouping(tmp_path, at_once):
    """20 clients send a model of 610 values and one number: 20 * 4 * 611 bytes."""
    from models import MLP

    method = Correct(MLP(64, (8,)), lr=0.05)
    sizes = {"clients_per_round": 20, "clients_at_once": at_once}
    data = DigitsDataModule(20, seed=0)
    run(method, data, 1, root=tmp_path, precision="32-true", **sizes)
    assert method.progress.bytes_up == 20 * 4 * 611
