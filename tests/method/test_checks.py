"""What a method's own code returns and changes is checked, in the words of its author."""

import numpy as np
import pytest
import torch

from datamodules import DigitsDataModule
from models import MLP
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg
from pfl.method import Message
from tests.problems import run
from tests.refusal import refused

P = 64 * 2 + 2 + 2 * 10 + 10  # of MLP(64, [2])


class Own(FedAvg):
    """A method whose `client_update` is a function of (self, clients, w)."""

    def __init__(self, update):
        super().__init__(MLP(64, [2]))
        self.update = update
        self.add_client_state("kept")
        self.add_server_state("total", torch.zeros(3))

    def client_update(self, clients, w):
        return self.update(self, clients, w)


class Personal(FedAvg):
    """A method whose `personalized` is a function of (self, clients)."""

    has_personalized = True

    def __init__(self, models):
        super().__init__(MLP(64, [2]))
        self.models = models

    def personalized(self, clients):
        return self.models(self, clients)


class Served(FedAvg):
    """A method whose `server_update` returns the model."""

    def server_update(self, mean):
        return mean["w"]


def fit(root, algorithm):
    return run(algorithm, DigitsDataModule(3), 1, root=root, precision="32-true")


def writes(target):
    """A `client_update` that changes a tensor in place."""

    def update(self, clients, w):
        target(self, clients, w).add_(1)
        return w.repeat(len(clients), 1)

    return update


def undeclared(self, clients, w):
    clients.state["memory"] = w.repeat(len(clients), 1)
    return clients.state["memory"]


RETURNED = {
    "nothing": (lambda self, clients, w: None, ["returned None", f"[3, {P}]"]),
    "a list": (lambda self, clients, w: [w], ["class list", f"[3, {P}]"]),
    "one model": (lambda self, clients, w: w, [f"a tensor [{P}] of torch.float32", f"[3, {P}]"]),
    "double": (
        lambda self, clients, w: w.repeat(len(clients), 1).double(),
        ["torch.float64", "torch.float32"],
    ),
    "a name without a message": (
        lambda self, clients, w: {"w": w.repeat(len(clients), 1), "v": 3},
        ["'v'", "class int"],
    ),
    "a number of each client without a column": (
        lambda self, clients, w: {"w": w.repeat(len(clients), 1), "v": w[: len(clients)]},
        ["'v'", "a tensor [3]", "[3, 1] for one number of each"],
    ),
    "a message with three axes": (
        lambda self, clients, w: w.repeat(len(clients), 2, 1),
        [f"a tensor [3, 2, {P}]", f"[3, {P}]"],
    ),
    "another way of reducing": (
        lambda self, clients, w: Message(w.repeat(len(clients), 1), 4, reduce="median"),  # type: ignore[arg-type]
        ["'median'", "mean or rows"],
    ),
    "a message of too few": (
        lambda self, clients, w: {"w": w.repeat(len(clients), 1), "v": w[None]},
        ["'v'", f"[1, {P}]", "3 clients"],
    ),
}


@pytest.mark.parametrize("case", RETURNED)
def test_what_client_update_returns(tmp_path, case):
    update, words = RETURNED[case]
    with refused("model: Own.client_update", *words):
        fit(tmp_path, Own(update))


def test_models_that_are_not_finite(tmp_path):
    def update(self, clients, w):
        return w.repeat(len(clients), 1) / 0

    with refused(
        "clients' message w of client 0, client 1, client 2 is no longer finite in round 1"
    ):
        fit(tmp_path, Own(update))


def test_changes_in_place(tmp_path):
    with refused("`w`", "changed", "in place", "clone()"):
        fit(tmp_path, Own(writes(lambda self, clients, w: w)))


def test_the_network_is_not_trained_in_place(tmp_path):
    def update(self, clients, w):
        next(self.network.parameters()).mul_(2)
        return w.repeat(len(clients), 1)

    with refused("`self.network`", "changed", "in place", "clone()"):
        fit(tmp_path, Own(update))


DRAWS = {
    "torch": lambda w: w + torch.rand(1),
    "NumPy": lambda w: w + float(np.random.rand()),
}


@pytest.mark.parametrize("package", DRAWS)
def test_draws_from_a_global_generator(tmp_path, package):
    def update(self, clients, w):
        return DRAWS[package](w).repeat(len(clients), 1)

    with pytest.warns(UserWarning, match=r"Own\.client_update.*global generator.*self\.seed"):
        fit(tmp_path, Own(update))


def test_a_table_that_the_class_does_not_have(tmp_path):
    def update(self, clients, w):
        self.log_table("mine", client=clients.ids)
        return w.repeat(len(clients), 1)

    with refused("Own logs the table 'mine'", "tables = ('mine',)"):
        fit(tmp_path, Own(update))


def test_rows_of_a_state_that_are_gone(tmp_path):
    def update(self, clients, w):
        clients.state = {}
        return w.repeat(len(clients), 1)

    with refused("Own.client_update leaves None in clients.state['kept']", f"as [3, {P}]"):
        fit(tmp_path, Own(update))


def leaves(rows):
    """A `client_update` that leaves a function of (clients, w) as the rows of the state `seen`."""

    def update(self, clients, w):
        clients.state["seen"] = rows(clients, w)
        return w.repeat(len(clients), 1)

    return update


class Counts(Own):
    """A method with a client state of whole numbers."""

    def __init__(self, update, initial=lambda: torch.zeros(2, dtype=torch.int64)):
        super().__init__(update)
        self.add_client_state("seen", initial)


LEFT = {
    "an array": (lambda clients, w: np.zeros((len(clients), 2)), "class ndarray"),
    "parts of whole numbers": (lambda clients, w: w.new_full((len(clients), 2), 0.5), "float32"),
    "another width": (lambda clients, w: w.new_zeros(len(clients), 3), "a tensor [3, 3]"),
}


@pytest.mark.parametrize("case", LEFT)
def test_rows_of_a_state_that_cannot_be_kept(tmp_path, case):
    rows, words = LEFT[case]
    with refused("clients.state['seen']", words, "declared as [3, 2] of torch.int64"):
        fit(tmp_path, Counts(leaves(rows)))


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_the_first_row_of_a_state_is_one_row(tmp_path, shape):
    with refused("Counts declares 'seen'", f"a tensor {[*shape]}", "a tensor [width]"):
        fit(tmp_path, Counts(leaves(lambda clients, w: None), lambda: torch.zeros(shape)))


def test_a_name_is_declared_once():
    own = Own(writes)
    with refused("Own declares the client state 'kept' twice", "another name"):
        own.add_client_state("kept", lambda: torch.zeros(1))
    own.keep_messages("kept")
    with refused("Own declares the kept message 'kept' twice", "another name"):
        own.keep_messages("kept")
    for declare in (own.add_server_state, own.add_constant):
        with refused("Own declares 'lr'", "another name"):
            declare("lr", torch.zeros(1))
    assert own.server_states == {"total"}


def test_server_states_and_constants_are_tensors():
    own = Own(writes)
    with refused("Own declares the server state 'c'", "0.5", "it must be a tensor"):
        own.add_server_state("c", 0.5)
    with refused("Own declares the constant 'c' as 0.5", "it must be a tensor"):
        own.add_constant("c", 0.5)


def test_a_state_that_was_not_declared(tmp_path):
    with refused("Own writes clients.state['memory']", "add_client_state", "declared are: kept"):
        fit(tmp_path, Own(undeclared))


PERSONALIZED = {
    "nothing": (lambda self, clients: None, ["returned None"]),
    "one model": (lambda self, clients: clients.received["w"], [f"a tensor [{P}]", f"[3, {P}]"]),
    "a change of the global model": (
        lambda self, clients: clients.received["w"].mul_(2).repeat(len(clients), 1),
        ["`w`", "in place"],
    ),
}


@pytest.mark.parametrize("case", PERSONALIZED)
def test_what_personalized_returns(tmp_path, case):
    models, words = PERSONALIZED[case]
    with refused("model: ", *words):
        fit(tmp_path, Personal(models))


def test_predictions_of_models_of_another_shape(tmp_path):
    algorithm = Personal(lambda self, clients: clients.received["w"].repeat(len(clients), 1))
    fit(tmp_path, algorithm).models = lambda self, clients: clients.received["w"]
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False)
    with refused("Personal.personalized returned", f"[{P}]", f"[3, {P}]"):
        trainer.predict(algorithm, datamodule=FederatedLoop(DigitsDataModule(3)))


def test_what_server_update_returns(tmp_path):
    with refused("model: Served.server_update returned a tensor", "nothing", "copy_"):
        fit(tmp_path, Served(MLP(64, [2])))


class Assigned(FedAvg):
    """A method whose `server_update` puts another tensor in the place of the model."""

    def server_update(self, mean):
        self.global_model = mean["w"]


def test_the_global_model_is_written_into(tmp_path):
    with refused("model: Assigned assigns to self.global_model", "copy_(values)"):
        fit(tmp_path, Assigned(MLP(64, [2])))


class Nothing(FedAvg):
    has_personalized = True


def test_a_function_that_is_missing_is_told_before_training(tmp_path):
    with refused("model: Nothing has no personalized", "docs/add-a-method.md"):
        fit(tmp_path, Nothing(MLP(64, [2])))
    assert list(tmp_path.iterdir()) == []
