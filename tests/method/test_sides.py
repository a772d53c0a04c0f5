"""What a client's code may read, and what the server's may; with the name of what was read."""

import gc
import weakref

import pytest
import torch

from pfl.algorithms import FedAvg
from pfl.cli import main
from pfl.engines.debug import DebugError
from pfl.errors import ConfigError
from tests.problems import least_squares, run
from tests.refusal import refused


class Reader(FedAvg):
    """FedAvg whose clients, or whose server, read something in passing."""

    tables = ("numbers",)
    on_client = on_server = staticmethod(lambda method, clients: None)

    def __init__(self, network, **kwargs):
        super().__init__(network, **kwargs)
        self.add_client_state("own")
        self.add_server_state("total", torch.zeros(2))
        self.add_constant("mask", torch.ones(2))
        self.keep_messages("last")

    def begin_round(self, round_index):
        self.plan = [round_index]
        self.on_server(self, None)

    def client_update(self, clients, w):
        self.on_client(self, clients)
        return {"w": self.local_sgd(clients, w), "last": self.local_sgd(clients, w, name="last")}


def train(root, engine="auto", strict=False, **reads):
    problem = least_squares((4, 3, 5))
    method = Reader(problem.network(), lr=0.1, engine=engine)
    for name, read in reads.items():
        setattr(method, name, read)
    if strict:
        method.refuse_all_reads()
    return run(method, problem, 2, root=root)


def refused_by(engine, name):
    """The engine debug adds whose code it was."""
    words = rf"Reader.client_update reads self.{name}, which .*download\(\)"
    if engine == "debug":
        return pytest.raises(DebugError, match=rf"^client \d in round 1: .*{words}")
    return pytest.raises(ConfigError, match=rf"^model: {words}")


# What only the server has: refused with every engine, and, below, where each read is checked.
ALWAYS = {
    "total": lambda method, clients: method.total,
    "global_model": lambda method, clients: method.global_model,
    "cohort": lambda method, clients: method.cohort(0),
    "kept_rows": lambda method, clients: method.kept_rows("last", clients.ids),
    "kept_ids": lambda method, clients: method.kept_ids("last"),
    "kept_mean": lambda method, clients: method.kept_mean("last"),
    "client_rows": lambda method, clients: method.client_rows("own", clients.ids),
}
STRICT = {
    "plan": lambda method, clients: method.plan,
    "rounds": lambda method, clients: method.rounds,
    "participants": lambda method, clients: method.participants,
    "store": lambda method, clients: method.store.read("own", clients.ids),
    "trainer": lambda method, clients: method.trainer.max_epochs,
    "row": lambda method, clients: method.row,
    "progress": lambda method, clients: method.progress.bytes_up,
}


@pytest.mark.parametrize("engine", ["auto", "sequential", "vmap", "debug"])
@pytest.mark.parametrize("name", ALWAYS)
def test_a_client_cannot_read_what_the_server_has(tmp_path, name, engine):
    with refused_by(engine, name):
        train(tmp_path, engine, on_client=ALWAYS[name])


@pytest.mark.parametrize("engine", ["sequential", "vmap", "debug"])
@pytest.mark.parametrize("name", STRICT)
def test_every_read_of_what_the_server_has_set_is_refused(tmp_path, name, engine):
    strict = engine != "debug"  # which checks every read anyway
    with refused_by(engine, name):
        train(tmp_path, engine, strict, on_client=STRICT[name])


def test_a_client_reads_constants_and_what_it_has_received(tmp_path):
    seen = []

    def read(method, clients):
        constants = (method.mask.sum().item(), method.num_clients, method.max_rounds, method.lr)
        seen.append((*constants, clients.received["w"].shape == (6,), clients.round))

    train(tmp_path, "debug", on_client=read)
    assert set(seen) == {(2.0, 3, 2, 0.1, True, 0), (2.0, 3, 2, 0.1, True, 1)}


@pytest.mark.parametrize("name", ["client_rows", "iter_clients"])
def test_the_server_cannot_read_a_client_s_states(tmp_path, name):
    reads = {
        "client_rows": lambda method, _: method.client_rows("own", method.population),
        "iter_clients": lambda method, _: next(method.iter_clients()),
    }
    with refused(f"Reader.begin_round reads self.{name}", "keep_messages"):
        train(tmp_path, on_server=reads[name])


def test_a_class_that_was_checked_is_not_kept_alive(tmp_path):
    """The command line would find it beside a class of the same name that was defined later."""
    problem = least_squares((4, 3, 5))

    def trained():
        kind = type("Own", (FedAvg,), {})
        run(kind(problem.network(), lr=0.1), problem, 1, root=tmp_path)
        return weakref.ref(kind)

    own = trained()
    gc.collect()
    assert own() is None


def test_the_command_line_parses_beside_a_method_of_a_file_that_nothing_can_import(tmp_path):
    """It looks at all subclasses, and a class that it cannot import is a warning."""
    problem = least_squares((4, 3, 5))
    own = type("Own", (FedAvg,), {"__module__": "loaded_by_its_path"})
    run(own(problem.network(), lr=0.1), problem, 1, root=tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config=quickstart", "--print_config"])
    assert ended.value.code == 0
