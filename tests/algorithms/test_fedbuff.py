"""FedBuff and FedAsync against a simulation of all clients; identities, resume, refusals."""

import numpy as np
import pytest
import torch

from models import HalfSquaredError
from pfl import FederatedLoop
from pfl.algorithms import FedAsync, FedAvg, FedBuff
from pfl.rounds.clock import Clock
from tests.algorithms.methods import differing, everything
from tests.problems import History, least_squares, quiet
from tests.refusal import refused

SIZES = (4, 2, 3, 5, 1)
SECONDS = np.array([1.0, 2.75, 1.6, 4.3, 0.7])
PLAIN = {"lr": 0.2, "local_steps": 2, "batch_size": None, "loss": HalfSquaredError()}


def pace(seconds=SECONDS):
    """Clients of which each takes these seconds: a half for the messages, the rest for 2 n_i."""
    return Clock(clients=[[2 * n / (s - 0.5), 0.5] for n, s in zip(SIZES, seconds, strict=True)])


def trained(problem, i, w, rho=0.0):
    v = w.copy()
    for _ in range(2):
        v = v - 0.2 * (problem.gradient(i, v) + rho * (v - w))
    return v


def slow(problem, buffer, rounds, move, rho=0.0, seconds=SECONDS):
    """w and the end of each round: everyone trains, or waits until its message has been used.

    `move(w, messages)` is the server's step on [(client, its first model, its last, age)].
    """
    w, waiting, history = np.full(problem.size, 0.5), [], []
    training = {i: (s, w, 0) for i, s in enumerate(seconds)}  # end, first model, server's moves
    while len(history) < rounds:
        now = min(end for end, *_ in training.values())
        idle = []
        for i in [i for i, (end, *_) in training.items() if end == now]:
            _, begun, moves = training.pop(i)
            waiting.append((i, begun, trained(problem, i, begun, rho), len(history) - moves))
            if len(waiting) == buffer:
                w = move(w, waiting)
                history.append((w, now))
                idle += [i for i, *_ in waiting]
                waiting = []
        training |= {i: (now + seconds[i], w, len(history)) for i in idle}
    return history[:rounds]


def run(root, method, problem, rounds, ckpt_path=None, **loop):
    history, loop = History(), FederatedLoop(problem.datamodule, **{"clock": pace(), **loop})
    trainer = quiet(root, rounds, history, precision="64-true")
    trainer.fit(method, datamodule=loop, ckpt_path=ckpt_path)
    return method, history


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("buffer", [1, 2, 4])
def test_fedbuff_equals_the_simulation(tmp_path, buffer, weighting):
    """In ten rounds, with messages of several ages."""
    problem, ages = least_squares(SIZES), []

    def move(w, messages):
        weights = [1 if weighting == "uniform" else SIZES[i] for i, *_ in messages]
        ages.append([age for *_, age in messages])
        terms = [(y - x) / np.sqrt(1 + age) for _, x, y, age in messages]
        return w + 0.7 * np.average(terms, axis=0, weights=weights)

    expected = slow(problem, buffer, 10, move)
    assert max(map(max, ages)) > 0

    def rate(parameters):
        return torch.optim.SGD(parameters, lr=0.7)

    arguments = dict(buffer_size=buffer, weighting=weighting, server_optimizer=rate)
    method = FedBuff(problem.network(0.5), **arguments, **PLAIN)
    method, history = run(tmp_path, method, problem, 10)
    np.testing.assert_allclose(history["w"], [w for w, _ in expected], rtol=0, atol=1e-12)
    assert method.row["virtual_seconds"] == pytest.approx(expected[-1][1], rel=1e-12)
    assert method.row["staleness"] == np.mean(ages[9])
    assert (
        method.progress.ledger.uplink.sum()
        == method.progress.ledger.downlink.sum()
        == 10 * buffer * 8 * len(problem.network().weight.flatten())
    )


@pytest.mark.parametrize(
    ("arguments", "trust"),
    [
        ({"staleness": "constant"}, lambda t: 1.0),
        ({"exponent": 0.8}, lambda t: (t + 1) ** -0.8),
        ({"staleness": "hinge", "slope": 2.0, "delay": 1}, lambda t: 1 / (2 * max(t - 1, 0) + 1)),
    ],
)
def test_fedasync_equals_the_simulation(tmp_path, arguments, trust):
    problem = least_squares(SIZES)

    def move(w, messages):
        ((_, _, y, age),) = messages
        return (1 - 0.6 * trust(age)) * w + 0.6 * trust(age) * y

    expected = [w for w, _ in slow(problem, 1, 12, move, rho=0.3)]
    method = FedAsync(problem.network(0.5), proximal_weight=0.3, **arguments, **PLAIN)
    _, history = run(tmp_path, method, problem, 12)
    np.testing.assert_allclose(history["w"], expected, rtol=0, atol=1e-12)


def test_equal_speeds_and_a_buffer_for_all_are_fedavg(tmp_path):
    """Also with two of five clients at a time, where the cohorts are FedBuff's own."""
    for number, count in ((5, None), (2, 2)):
        problem = least_squares(SIZES)
        method = FedBuff(problem.network(0.5), buffer_size=number, **PLAIN)
        loop = {"clients_per_round": count, "clock": pace(np.full(5, 3.0))}
        method, ours = run(tmp_path / f"{number}", method, problem, 4, **loop)
        assert method.row["virtual_seconds"] == 12.0 and method.row["staleness"] == 0.0
        plain = FedAvg(problem.network(0.5), weighting="uniform", **PLAIN)
        trace = {"trace": ours.participants()}
        _, theirs = run(tmp_path / f"{number} plain", plain, problem, 4, **trace)
        np.testing.assert_allclose(ours["w"], theirs["w"], rtol=0, atol=1e-13)
    assert len({tuple(cohort) for cohort in ours.participants()}) > 1


def test_the_least_values_of_fedasync_are_allowed():
    zeros = dict.fromkeys(("exponent", "slope", "proximal_weight"), 0.0)
    assert FedAsync(least_squares(SIZES).network(0.5), delay=0, **zeros).proximal_weight == 0


@pytest.mark.parametrize("kind", [FedBuff, FedAsync])
def test_a_resumed_run_is_the_same(tmp_path, kind):
    """Bit for bit, from every round, with three of five clients at a time and mini-batches."""
    problem, arguments = least_squares(SIZES), {"buffer_size": 2} if kind is FedBuff else {}

    def begin(name, rounds, ckpt_path=None):
        settings = {**PLAIN, "batch_size": 2, **arguments}
        method = kind(problem.network(0.5), **settings)
        loop = {"clients_per_round": 3, "dropout": 0.2}
        return run(tmp_path / name, method, problem, rounds, ckpt_path, **loop)[0]

    whole = everything(begin("whole", 5))
    for rounds in (1, 2, 3, 4):
        first = begin(f"part {rounds}", rounds)
        last = first.trainer.run_dir / "checkpoints" / "last.ckpt"
        assert differing(everything(begin(f"part {rounds}", 5, last)), whole) == set()


@pytest.mark.parametrize(
    ("loop", "arguments"),
    [
        ({"clients_per_round": 4}, {}),
        ({"clients_per_round": 2}, {}),
        ({"unseen": [4]}, {}),
        ({"clock": pace(SECONDS[::-1])}, {}),
        ({"clock": pace(2 * SECONDS)}, {}),  # the same messages, at other times
        ({}, {"buffer_size": 3}),
        ({}, {"local_steps": 9}),
    ],
)
def test_a_run_does_not_go_on_with_other_arrivals(tmp_path, loop, arguments):
    """The models with which clients have begun would be other ones, or missing."""
    problem = least_squares(SIZES)

    def begin(rounds, ckpt_path=None, loop=(), arguments=()):
        settings = {**PLAIN, "buffer_size": 2, **dict(arguments)}
        method = FedBuff(problem.network(0.5), **settings)
        own = {"clients_per_round": 3, **dict(loop)}
        return run(tmp_path, method, problem, rounds, ckpt_path, **own)[0]

    last = begin(3).trainer.run_dir / "checkpoints" / "last.ckpt"
    with refused("ckpt_path: with this run's settings other messages would have come in the"):
        begin(6, last, loop, arguments)


def test_a_message_that_is_lost_takes_a_place_and_is_in_no_mean(tmp_path):
    """Clients 4 and 0 end the first round, at 1 second; then come 2, which began before it, and 4
    again, at 1.6 and 1.7 seconds. Client 4 fails: what is left is client 2's change of age 1."""
    problem = least_squares(SIZES)
    method = FedBuff(problem.network(0.5), buffer_size=2, **PLAIN)
    _, history = run(tmp_path, method, problem, 2, dropout=[[], [4]])
    assert history.participants() == [[0, 4], [2, 4]]
    w = history["w"][0]
    y = trained(problem, 2, np.full(problem.size, 0.5)) - 0.5
    np.testing.assert_allclose(history["w"][1], w + y / np.sqrt(2), atol=1e-12)


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        ({}, "model.buffer_size: 6; it must be at most 5"),
        ({"sampling": "weighted"}, "loop.sampling: weighted; FedBuff draws one client"),
        ({"stragglers": 0.5}, "loop.stragglers: clients of FedBuff are slow by loop.clock"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path, loop, says):
    problem = least_squares(SIZES)
    method = FedBuff(problem.network(0.5), buffer_size=5 if loop else 6, **PLAIN)
    with refused(says):
        run(tmp_path, method, problem, 1, **loop)
