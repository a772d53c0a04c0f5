"""Virtual time: how long clients and rounds take, and where a run shows it."""

import csv
import json
from contextlib import nullcontext

import numpy as np
import pytest

from models import HalfSquaredError
from pfl import FederatedLoop
from pfl.algorithms import FedAvg, PerFedAvg
from pfl.rounds.clock import Clock
from pfl.scores.runs import Run
from tests.problems import least_squares, quiet
from tests.refusal import refused


def test_a_round_takes_as_long_as_its_slowest_client(tmp_path):
    """Three clients with 4, 2 and 6 samples, two epochs, so 8, 4 and 12 sample gradients at 2, 1
    and 4 a second after 1, 0 and 2 seconds: 5, 4 and 5 seconds. In the second round client 0 is a
    straggler that takes half of its two steps, 4 gradients: 3 seconds, and client 1 still 4; in the
    third client 1 fails after its 4 seconds. PerFedAvg's steps have four gradients: 17, 16, 14."""
    pairs = [[2.0, 1.0], [1.0, 0.0], [4.0, 2.0]]
    (tmp_path / "clients.json").write_text(json.dumps(pairs))
    trace = {"trace": [[0, 1], [0, 1], [1], [], [0, 2]]}
    slow = {"stragglers": [[], [0], [], [], []], "dropout": [[], [], [1], [], []]}
    for kind, cost in ((FedAvg, [5, 9, 13, 13, 18]), (PerFedAvg, [17, 33, 49, 49, 66])):
        problem = least_squares((4, 2, 6))
        settings = {"lr": 0.1, "local_epochs": 2, "batch_size": None, "loss": HalfSquaredError()}
        clock = Clock(clients=pairs if kind is FedAvg else str(tmp_path / "clients.json"))
        loop = FederatedLoop(problem.datamodule, clock=clock, **trace, **slow)
        trainer = quiet(tmp_path / kind.__name__, 5)
        trainer.fit(kind(problem.network(0.5), **settings), datamodule=loop)
        run = Run.read("", 0, trainer.run_dir)
        assert [row["virtual_seconds"] for row in run.rows] == cost
        assert run.summary["virtual_seconds"] == cost[-1]
        assert len(run.within(("virtual_seconds", 17.0))) == (4 if kind is FedAvg else 1)


def test_a_straggler_takes_as_long_as_its_steps(tmp_path):
    """One sample gradient a second. Client 0 has 5 samples in batches of 4, so steps of 4 and 1: of
    them it takes one as a straggler. Client 1 has one step of 3, which a straggler takes whole.
    Three local steps of client 0 have 4, 1 and 4 samples, and a straggler's two have 5."""
    cases = [({"local_epochs": 1}, [[], [0], [1], [0, 1]], [5, 4, 5, 4])]
    cases.append(({"local_steps": 3}, [[], [0], [1], [0, 1]], [9, 9, 9, 6]))
    for given, slow, seconds in cases:
        problem = least_squares((5, 3))
        method = FedAvg(problem.network(0.5), batch_size=4, loss=HalfSquaredError(), **given)
        clock = Clock(clients=[[1.0, 0.0], [1.0, 0.0]])
        loop = FederatedLoop(problem.datamodule, clock=clock, stragglers=slow)
        trainer = quiet(tmp_path / str(given), 4)
        trainer.fit(method, datamodule=loop)
        ends = [row["virtual_seconds"] for row in Run.read("", 0, trainer.run_dir).rows]
        assert np.diff(ends, prepend=0).tolist() == seconds


def test_rounds_with_other_settings_keep_their_seconds(tmp_path):
    """Three rounds of 5 epochs of 4 samples take 60 seconds; two of one epoch then take 8."""
    ends = []
    for rounds, epochs, last in ((3, 5, None), (5, 1, "run/checkpoints/last.ckpt")):
        problem = least_squares((3, 4))
        method = FedAvg(problem.network(0.5), local_epochs=epochs, loss=HalfSquaredError())
        loop = FederatedLoop(problem.datamodule, clock=Clock(speed=1.0))
        trainer = quiet(tmp_path, rounds)
        with pytest.warns(UserWarning, match="epochs was 5 and is 1") if last else nullcontext():
            trainer.fit(method, datamodule=loop, ckpt_path=last and tmp_path / last)
        ends = [row["virtual_seconds"] for row in Run.read("", 0, trainer.run_dir).rows]
    assert ends == [20, 40, 60, 64, 68]


def test_speeds_are_log_normal_and_functions_of_the_seed():
    """The median of 20,001 speeds and the deviation of their logarithms, to 4 standard errors: the
    median of n normal numbers has sqrt(π / 2n), their deviation 1 / sqrt(2n)."""
    n = 20001
    ids, ones = np.arange(n), np.ones(n)
    clock = Clock(speed=5.0, spread=0.8, latency=0.25)
    logs = -np.log(clock.seconds(ids, ones, 3) - 0.25)
    assert np.median(logs) == pytest.approx(np.log(5), abs=4 * 0.8 * np.sqrt(np.pi / 2 / n))
    assert logs.std() == pytest.approx(0.8, abs=4 * 0.8 / np.sqrt(2 * n))
    few = clock.seconds(np.array([7, 2]), 3 * np.ones(2), 3)
    np.testing.assert_allclose(few - 0.25, 3 * np.exp(-logs[[7, 2]]), rtol=1e-12)
    assert (clock.seconds(ids, ones, 4) != clock.seconds(ids, ones, 3)).all()
    assert (Clock(speed=5.0).seconds(ids, ones, 3) == 0.2).all()
    assert (Clock().seconds(ids, 500 * ones, 3) == 0.5).all()  # 1,000 a second
    assert Clock(spread=1.0).seconds(ids[:0], ones[:0], 3).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"speed": 0.0}, "loop.clock.speed: 0.0"),
        ({"speed": float("inf")}, "loop.clock.speed: inf"),
        ({"spread": -1.0}, "loop.clock.spread: -1.0"),
        ({"spread": float("inf")}, "loop.clock.spread: inf"),
        ({"latency": -1.0}, "loop.clock.latency: -1.0"),
        ({"latency": float("inf")}, "loop.clock.latency: inf"),
        ({"clients": [[1.0, 0.0]]}, "loop.clock.clients: 1 pairs; the data have 2 clients"),
        ({"clients": [[1.0, 0.0], [0.0, 1.0]]}, "client 1 has [0.0, 1.0]; a speed must be above 0"),
        ({"clients": [[1.0, 0.0], [1.0, -1.0]]}, "client 1 has [1.0, -1.0]; a speed must be"),
        ({"clients": [[1.0, 0.0], [1.0, float("inf")]]}, "client 1 has [1.0, inf]; a speed must"),
        ({"clients": [[1.0, 0.0], [1.0]]}, "each client must have a pair [speed, latency]"),
        ({"clients": "nowhere.json"}, "loop.clock.clients: nowhere.json cannot be read as JSON"),
    ],
)
def test_impossible_clocks_are_refused(arguments, says):
    with refused(says):
        loop = FederatedLoop(least_squares((2, 2)).datamodule, clock=Clock(**arguments))
        loop.setup()


def test_the_clock_changes_no_model(tmp_path):
    """And there is no column without it."""
    rows = []
    for name, clock in (("with", Clock(spread=1.0)), ("without", None)):
        problem = least_squares((4, 2, 6))
        method = FedAvg(problem.network(0.5), lr=0.1, batch_size=1, loss=HalfSquaredError())
        loop = FederatedLoop(problem.datamodule, clients_per_round=2, clock=clock)
        trainer = quiet(tmp_path / name, 2)
        trainer.fit(method, datamodule=loop)
        with (trainer.run_dir / "metrics.csv").open() as file:
            rows.append(list(csv.DictReader(file)))
    assert all(float(row.pop("virtual_seconds")) > 0 for row in rows[0])
    assert rows[0] == rows[1]
