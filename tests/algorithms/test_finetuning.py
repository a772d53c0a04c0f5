"""Scores after local steps of an evaluation, of clients that train and of clients that never do."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import Partitioner, SharedTest, SplitOwn, TensorDataModule
from models import HalfSquaredError
from pfl import FederatedLoop
from pfl.algorithms import (
    GPFL,
    FedACS,
    FedAMP,
    FedAvg,
    FedCP,
    FedPer,
    FedRep,
    HeurFedAMP,
    LocalTrain,
)
from pfl.algorithms.papers.fedacs import attention, cosine
from pfl.cli import main
from pfl.clients import Clients
from tests.algorithms import class_world
from tests.algorithms.methods import (
    BATCHES,
    EVERY_METHOD,
    differing,
    everything,
    normalized_network,
    small_network,
    small_world,
)
from tests.commands import table
from tests.problems import least_squares, owned, quiet
from tests.refusal import refused

STEPS = [0, 1, 3]


def begin(root, algorithm, rounds=3, data=None, ckpt_path=None, callbacks=(), **loop):
    """Trains and evaluates in float64; the algorithm."""
    trainer = quiet(root, rounds, *callbacks, precision="64-true")
    loop = FederatedLoop(small_world() if data is None else data, **loop)
    trainer.fit(algorithm, datamodule=loop, ckpt_path=ckpt_path)
    return algorithm


# ---- every method -------------------------------------------------------------------------------


@EVERY_METHOD
def test_nothing_of_an_evaluation_remains(tmp_path, method):
    """Training, states, bytes and all other scores are the same as without fine-tuning."""
    runs = []
    for name, steps in (("plain", None), ("tuned", STEPS)):
        algorithm = method.make(small_network(), lr_decay=0.9, **BATCHES)
        data, count = small_world(classes=method.classes), None if method.everyone else 2
        begin(tmp_path / name, algorithm, data=data, clients_per_round=count, finetune=steps)
        runs.append(algorithm)
    plain, tuned = map(everything, runs)
    scores = {name for name in tuned if name.startswith("row test/finetuned/")}
    assert {name.split("/")[2] for name in scores} == {"0", "1", "3"}
    assert differing(tuned, plain) == scores
    row = runs[1].row
    starts = [row[f"test/{k}/loss"] for k in ("personalized", "global") if f"test/{k}/loss" in row]
    assert pytest.approx(row["test/finetuned/0/loss"], rel=1e-12) in starts
    assert row["test/finetuned/3/loss"] != row["test/finetuned/1/loss"]


@EVERY_METHOD
def test_a_newcomer_has_a_model_and_leaves_no_trace(tmp_path, method):
    """Client 2 never trains: no bytes, no state; its scores are its own, and only in `unseen`."""
    algorithm = method.make(small_network(), **BATCHES)
    begin(tmp_path, algorithm, data=small_world(classes=method.classes), unseen=[2], finetune=[1])
    scores = {kind: s["loss"] for (_, kind), s in algorithm.evaluation.scores.items()}
    for kind, losses in scores.items():
        has = np.arange(4) == 2 if kind.startswith("unseen") else np.arange(4) != 2
        assert (np.isfinite(losses) == has).all(), kind
    assert {"unseen/0", "unseen/1", "finetuned/1"} < set(scores)
    assert algorithm.progress.ledger.downlink[2] == algorithm.progress.ledger.uplink[2] == 0
    assert all(2 not in algorithm.store.seen(name) for name in algorithm.store.names)


# ---- the steps ----------------------------------------------------------------------------------


@pytest.fixture
def trained(fit):
    """A method after two rounds on least squares with full gradients; the problem and it."""
    problem = least_squares((6, 3, 5))
    algorithm = FedAvg(
        problem.network(0.5), lr=0.1, lr_decay=0.8, batch_size=None, loss=HalfSquaredError()
    )
    fit(algorithm, problem, 2)
    return problem, algorithm


@pytest.mark.parametrize(("lr", "rate"), [(0.05, 0.05), (None, 0.1 * 0.8**2)])
def test_full_gradient_steps_have_a_closed_form(trained, lr, rate):
    """f_i is quadratic with the Hessian A: w_k = w* + (I - η A)^k (w - w*). η is that of the coming
    round where none is given."""
    problem, algorithm = trained
    w = algorithm.global_model.numpy()
    (clients,) = algorithm.iter_clients()
    for k in (0, 1, 4):
        adapted = algorithm.adapt(clients, algorithm.global_model, steps=k, lr=lr).numpy()
        for row, i in enumerate(clients.ids):
            basis = np.eye(len(w))
            at_zero = problem.gradient(i, np.zeros(len(w)))
            hessian = np.stack([problem.gradient(i, e) - at_zero for e in basis], 1)
            optimum = np.linalg.solve(hessian, -at_zero)
            left = np.linalg.matrix_power(np.eye(len(w)) - rate * hessian, k)
            np.testing.assert_allclose(adapted[row], optimum + left @ (w - optimum), atol=1e-12)


def test_scores_are_those_of_the_adapted_models(tmp_path):
    """One weight, all samples (1, c_i): f_i = (w - c_i)^2 / 2, so that the test loss after k steps
    is ((1 - η)^k (w - c_i))^2 / 2; 5 clients, of which 1 never trains."""
    optima, eta = np.array([1.0, 2.0, 4.0, -1.0, 3.0]), 0.25
    data = owned(
        np.repeat(np.arange(5), 4),
        torch.ones(20, 1, dtype=torch.float64),
        torch.from_numpy(np.repeat(optima, 4)[:, None]),
        protocol=SplitOwn(test=0.5, validation=0.0),
    )
    network = nn.Linear(1, 1, bias=False).double()
    algorithm = FedAvg(network, lr=eta, batch_size=None, loss=HalfSquaredError())
    begin(tmp_path, algorithm, 2, data, unseen=[4], finetune=STEPS)
    w = float(algorithm.global_model)
    losses = {k: ((1 - eta) ** k * (w - optima)) ** 2 / 2 for k in STEPS}
    for k in STEPS:
        row = algorithm.row
        assert row[f"test/finetuned/{k}/loss"] == pytest.approx(losses[k][:4].mean(), rel=1e-12)
        assert row[f"test/finetuned/{k}/loss_std"] == pytest.approx(losses[k][:4].std(), rel=1e-12)
        assert row[f"test/unseen/{k}/loss"] == pytest.approx(losses[k][4], rel=1e-12)
    assert row["test/global/loss"] == pytest.approx(losses[0][:4].mean(), rel=1e-12)
    folder = algorithm.trainer.run_dir
    clients = table(folder / "clients.csv")
    assert [row["unseen"] for row in clients] == ["0", "0", "0", "0", "1"]
    assert float(clients[4]["test/unseen/3/loss"]) == pytest.approx(losses[3][4], rel=1e-12)


def test_steps_begin_anew_for_each_number(tmp_path):
    """Momentum, mini-batches: the score after 3 steps does not depend on the other numbers."""
    rows = []
    for number, steps in enumerate([[3], [0, 1, 2, 3]]):
        momentum = partial(torch.optim.SGD, momentum=0.9)
        algorithm = FedAvg(small_network(), optimizer=momentum, loss=HalfSquaredError(), **BATCHES)
        rows.append(begin(tmp_path / str(number), algorithm, finetune=steps).row)
    name = "test/finetuned/3/loss"
    assert rows[0][name] == rows[1][name] != rows[1]["test/finetuned/0/loss"]


def test_the_samples_come_in_the_same_order_for_every_method(tmp_path):
    """Two methods whose models are equal have equal scores after mini-batch steps."""
    scores = []
    for name, kind in (("a", FedAvg), ("b", LocalTrain)):
        algorithm = kind(small_network(), loss=HalfSquaredError(), **BATCHES)
        begin(tmp_path / name, algorithm, 1, trace=[[]], finetune=[2])
        scores.append(algorithm.evaluation.scores["test", "finetuned/2"]["loss"])
    np.testing.assert_array_equal(*scores)


def test_the_samples_come_in_the_same_order_after_every_round(fit):
    """The same start and rate give the same models after one round and after two."""
    models = []
    for rounds in (1, 2):
        algorithm = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
        fit(algorithm, small_world(), rounds)
        start = torch.zeros(algorithm.space.size).double()
        for clients in algorithm.iter_clients():
            models.append(algorithm.adapt(clients, start, steps=3, lr=0.5))
    assert len(models) == 2 and torch.equal(*models) and models[0].any()


def test_clients_without_training_samples_keep_their_start(tmp_path):
    """Client 1 owns nothing, and is tested on the samples that all share."""

    class TwoOfThree(Partitioner):
        def owners(self, targets, num_clients, rng):
            return np.repeat([0, 2], 3)

        def describe(self):
            return "given"

    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    rules = {"partition": TwoOfThree(), "protocol": SharedTest(0.0)}
    data = TensorDataModule(x, y, x, y, num_clients=3, **rules)
    algorithm = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
    begin(tmp_path, algorithm, 1, data, finetune=[0, 2])
    scores = algorithm.evaluation.scores
    before, after = (scores["test", f"finetuned/{k}"]["loss"] for k in (0, 2))
    assert ((before == after) == [False, True, False]).all()


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_running_statistics_adapt_too_and_are_not_kept(tmp_path, buffers):
    """BatchNorm: with a rate of (almost) 0 only the statistics move, which changes the score."""
    algorithm = FedAvg(normalized_network(), loss=HalfSquaredError(), buffers=buffers, **BATCHES)
    begin(tmp_path, algorithm, 2, finetune=[0, 2], finetune_lr=1e-300)
    row = algorithm.row
    assert row["test/finetuned/0/loss"] == row["test/global/loss"]
    assert row["test/finetuned/2/loss"] != row["test/global/loss"]


@pytest.mark.parametrize("kind", [FedPer, FedRep])
def test_a_newcomer_of_partly_personal_models_has_the_initial_head(tmp_path, kind):
    algorithm = kind(small_network(), loss=HalfSquaredError(), **BATCHES)
    begin(tmp_path, algorithm, unseen=[1])
    initial = nn.utils.parameters_to_vector(small_network().parameters())
    head, w = algorithm.personal_part, algorithm.newcomer(clients_of(algorithm, [1]))[0]
    assert torch.equal(w[head], initial[head]) and torch.equal(w, algorithm.global_model)
    assert not torch.equal(w[~head], initial[~head])


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        (FedAMP, {"alpha": 1.0, "sigma": 4.0, "penalty": 0.1}),
        (HeurFedAMP, {"own_weight": 0.4, "sigma": 2.0, "alpha": 1.0, "penalty": 0.1}),
    ],
)
def test_a_newcomer_of_fedamp_joins_the_last_cohort(tmp_path, kind, weights):
    """xi of its first local model among those of clients 0 and 2, by the formulas of the paper,
    with the α of the second and last round, 0.5; it was 1 in the first."""
    problem = least_squares((6, 3, 5, 4))
    arguments = dict(lr=0.1, batch_size=None, loss=HalfSquaredError(), alpha_decay=0.5)
    algorithm = kind(problem.network(0.5), decay_rounds=1, **arguments, **weights)
    begin(tmp_path, algorithm, 2, problem.datamodule, trace=[[0, 1, 2], [0, 2]], unseen=[3])
    initial = algorithm.global_model.numpy()
    own = initial - 0.1 * problem.gradient(3, initial)
    others = algorithm.client_rows("w", np.array([0, 2])).numpy()
    if kind is FedAMP:
        xi = 0.5 / 4 * np.exp(-((others - own) ** 2).sum(1) / 4)
    else:
        norms = np.linalg.norm(others, axis=1) * np.linalg.norm(own)
        xi = np.exp(2 * (others @ own) / norms)
        xi *= 0.6 / xi.sum()
    expected = xi @ others + (1 - xi.sum()) * own
    algorithm.begin_evaluation()
    actual = algorithm.newcomer(clients_of(algorithm, [3]))[0].numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("candidates", ["participants", "all"])
def test_a_newcomer_of_fedacs_finds_similar_clients(tmp_path, candidates):
    """Its first local model, of one step with a full gradient, and the models that the server has:
    of the last cohort, or of all. u is their mean with the attention of that model."""
    problem = least_squares((6, 3, 5, 4))
    arguments = dict(lr=0.1, batch_size=None, loss=HalfSquaredError(), candidates=candidates)
    algorithm = FedACS(problem.network(0.5), **arguments)
    begin(tmp_path, algorithm, 2, problem.datamodule, trace=[[0, 1, 2], [0, 2]], unseen=[3])
    w, initial = algorithm.client_rows("w", np.arange(3)), algorithm.global_model
    known = w if candidates == "all" else w[[0, 2]]
    first = initial - 0.1 * torch.from_numpy(problem.gradient(3, initial.numpy()))
    models = torch.cat([known, first[None]])
    expected = attention(cosine(models), algorithm.quantile)[-1] @ models
    algorithm.begin_evaluation()
    clients = clients_of(algorithm, [3])
    torch.testing.assert_close(algorithm.newcomer(clients)[0], expected, rtol=0, atol=1e-12)


def clients_of(algorithm, ids):
    """The clients `ids`, with their states."""
    clients = Clients(
        np.array(ids), algorithm.rounds, algorithm.run.loop.client_data("cpu"), "train"
    )
    algorithm.load_state(clients)
    return clients


# ---- whole runs ---------------------------------------------------------------------------------


def test_a_resumed_run_and_a_test_have_the_same_scores(tmp_path):
    arguments = {"unseen": 0.25, "finetune": STEPS}

    def make():
        return FedACS(small_network(), loss=HalfSquaredError(), lr_decay=0.9, **BATCHES)

    whole = begin(tmp_path / "whole", make(), 4, **arguments)
    first = begin(tmp_path / "parts", make(), 2, **arguments)
    last = first.trainer.run_dir / "checkpoints" / "last.ckpt"
    resumed = begin(tmp_path / "parts", make(), 4, ckpt_path=last, **arguments)
    assert resumed.row == whole.row
    again = make()
    trainer = quiet(tmp_path, 1, precision="64-true")
    trainer.test(again, FederatedLoop(small_world(), **arguments), ckpt_path=last)
    assert {name for name in again.row if name.startswith("test/unseen/")}
    for name in again.row:
        if name.startswith("test/"):
            assert again.row[name] == pytest.approx(whole.row[name], rel=1e-12), name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"finetune": -1}, "loop.finetune: -1; it must be a number of local steps of at least 0"),
        ({"finetune": [1, "a"]}, "loop.finetune: [1, 'a']"),
        ({"finetune": True}, "loop.finetune: True"),
        ({"finetune_lr": 0.0}, "loop.finetune_lr: 0.0; it must be positive"),
    ],
)
def test_impossible_numbers_are_refused(arguments, says):
    with refused(says):
        FederatedLoop(small_world(), **arguments)


@pytest.mark.cli
@pytest.mark.usefixtures("run_figures")
def test_one_line_of_the_command_line(tmp_path, capsys):
    words = ["--config", "quickstart", "--model", "FedAvg", "--trainer.max_epochs", "1"]
    words += ["--trainer.callbacks", "RunFigure", "--trainer.default_root_dir", str(tmp_path)]
    assert main(["fit", *words, "--loop.finetune", "[0,5]", "--loop.unseen", "0.2"]) == 0
    output = capsys.readouterr().out
    for words in ("finetuned/0", "finetuned/5", "unseen/0", "unseen/5"):
        assert f"\n  {words}" in output
    assert (tmp_path / "quickstart" / "report.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("kind", "still"),
    [(FedCP, ("context", "head.common.")), (GPFL, ("conditions.",))],
    ids=["FedCP", "GPFL"],
)
def test_what_no_client_trains_stays_in_fine_tuning(tmp_path, kind, still):
    """Two full steps with PyTorch from each client's model, as training moves it: not FedCP's
    received head and vector of the head's weights, and not GPFL's conditions."""
    torch.manual_seed(2)
    method = kind(class_world.network(), batch_size=None, **class_world.LOCAL)
    begin(tmp_path, method, 1, class_world.world(), finetune=[2], evaluate=("train",))
    lr = class_world.LOCAL["lr"] * class_world.LOCAL["lr_decay"]  # of the coming round
    decay = class_world.LOCAL["weight_decay"]
    losses = np.zeros(4)
    for clients in method.iter_clients("train"):
        models = method.personalized(clients)
        for client, model in zip(clients.ids.tolist(), models, strict=True):
            x, y = class_world.samples()[client]
            values = {name: v.clone() for name, v in method.space.split(model).items()}
            moving = {n: v.requires_grad_() for n, v in values.items() if not n.startswith(still)}
            assert len(moving) < len(values)
            for step in range(3):
                outputs = torch.func.functional_call(method.network, values, (x,))
                loss = nn.functional.cross_entropy(outputs, y)
                losses[client] = loss.item()
                slopes = torch.autograd.grad(loss, [*moving.values()], materialize_grads=True)
                for v, g in zip(moving.values(), slopes, strict=True):
                    v.data -= lr * (g + decay * v.data) * (step < 2)
    assert method.row["train/finetuned/2/loss"] == pytest.approx(losses.mean(), rel=1e-9)
