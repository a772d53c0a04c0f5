"""Server states of any shape, and modules: saved, restored, moved, and hidden from clients."""

import numpy as np
import pytest
import torch
from torch import nn

from pfl import FederatedLoop
from pfl.algorithms import FedAvg
from pfl.errors import ConfigError, Diverged
from tests.problems import least_squares, quiet, run

PROBLEM = least_squares((4, 3, 5))


class Shapes(FedAvg):
    """Counts rounds in states of several shapes, of which some are made in `setup`."""

    def __init__(self, network, **kwargs):
        super().__init__(network, **kwargs)
        zeros = self.global_model.new_zeros
        self.add_server_state("number", zeros(()))
        self.add_server_state("box", zeros(2, 3, 4))
        self.add_server_state("net", self.blank())
        self.add_server_state("late_rows", lambda: zeros(self.num_clients, 2))
        self.add_server_state("late_net", self.blank)

    def blank(self):
        """A linear layer and a buffer, in float32 whatever the network has."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.BatchNorm1d(2)})

    def all_states(self):
        modules = [*self.net.state_dict().values(), *self.late_net.state_dict().values()]
        return [self.number, self.box, self.late_rows, *modules]

    def server_update(self, received):
        super().server_update(received)
        for state in self.all_states():
            state += 1


def fit(folder, rounds, precision="64-true", ckpt_path=None):
    method = Shapes(PROBLEM.network(), lr=0.1)
    trainer = quiet(folder, rounds, precision=precision, limit_val_batches=0)
    trainer.fit(method, datamodule=FederatedLoop(PROBLEM.datamodule), ckpt_path=ckpt_path)
    return method


def first_values():
    method = Shapes(PROBLEM.network(), lr=0.1)
    net = [value.double() for value in method.blank().state_dict().values()]
    return [torch.zeros(()), torch.zeros(2, 3, 4), torch.zeros(3, 2), *net, *net]


def test_they_are_saved_restored_and_in_the_precision_of_the_models(tmp_path):
    """Every round adds 1, also after the run goes on from its checkpoint."""
    early = fit(tmp_path, 2)
    last = early.trainer.run_dir / "checkpoints" / "last.ckpt"
    for method, rounds in ((early, 2), (fit(tmp_path, 5, ckpt_path=last), 5)):
        for state, first in zip(method.all_states(), first_values(), strict=True):
            assert state.shape == first.shape
            torch.testing.assert_close(state.double(), first.double() + rounds)
            assert state.dtype in (torch.float64, torch.int64)
    assert not any(parameter.requires_grad for parameter in early.net.parameters())


def test_a_checkpoint_can_be_read_before_the_data_are_known(tmp_path):
    """The states that `setup` makes then have the values of the checkpoint; a round adds 1."""
    trained = fit(tmp_path, 2)
    content = torch.load(trained.trainer.run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    method = Shapes(PROBLEM.network(), lr=0.1)
    method.on_load_checkpoint(content)
    method.load_state_dict(content["state_dict"])
    with pytest.warns(UserWarning, match="has been through 2 rounds"):
        run(method, PROBLEM, 1, root=tmp_path)
    for state, expected in zip(method.all_states(), trained.all_states(), strict=True):
        assert torch.equal(state, expected + 1)


@pytest.mark.parametrize("name", ["net", "late_net", "late_rows", "box"])
def test_clients_cannot_read_them(tmp_path, name):
    class Reads(Shapes):
        def client_update(self, clients, w):
            getattr(self, name)
            return super().client_update(clients, w)

    with pytest.raises(
        ConfigError, match=rf"Reads.client_update reads self\.{name}, which the ser"
    ):
        run(Reads(PROBLEM.network(), lr=0.1), PROBLEM, 1, root=tmp_path)


def test_a_value_of_a_module_that_is_not_finite_is_named(tmp_path):
    class Breaks(Shapes):
        def server_update(self, received):
            self.net["linear"].bias[0] = np.nan

    with pytest.raises(
        Diverged, match=r"Breaks gave values .* in round 1: self\.net\.linear\.bias$"
    ):
        run(Breaks(PROBLEM.network(), lr=0.1), PROBLEM, 1, root=tmp_path)
