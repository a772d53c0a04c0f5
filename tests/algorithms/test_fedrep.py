"""FedRep against NumPy, its own statements about the two parts, and the recovery of a subspace."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch

from datamodules import DigitsDataModule, Dirichlet
from models import MLP, HalfSquaredError
from pfl.algorithms import FedPer, FedRep
from tests.algorithms import two_layers
from tests.models.test_models import NETWORKS
from tests.problems import History, Problem, matrix_problem, owned
from tests.refusal import refused

FULL = dict(batch_size=None, loss=HalfSquaredError())
HEAD, BODY = slice(two_layers.BODY, None), slice(two_layers.BODY)
TRACE = [[0, 1, 2], [0, 2], [], [2], [0, 1]]  # client 3 never takes part


def personalized(algorithm):
    """The personalized models of all clients, [M, P]."""
    models = np.full((algorithm.num_clients, algorithm.space.size), np.nan)
    for clients in algorithm.iter_clients():
        models[clients.ids] = algorithm.personalized(clients).numpy()
    return models


@pytest.mark.parametrize(
    ("head_epochs", "schedule", "body_steps"),
    [(3, {"local_epochs": 2}, 2), (1, {"local_epochs": 4}, 4), (4, {"local_steps": 3}, 3)],
)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_rounds_equal_the_numpy_loop(watch, head_epochs, schedule, body_steps, weighting):
    data, w = two_layers.problem((7, 4, 5, 3)), two_layers.start()
    settings = dict(lr=0.2, lr_decay=0.9, weight_decay=0.1)
    algorithm = FedRep(
        data.network(w),
        head_epochs=head_epochs,
        weighting=weighting,
        **schedule,
        **settings,
        **FULL,
    )
    history = watch(algorithm, data, len(TRACE), trace=TRACE)
    loops = [(HEAD, head_epochs), (BODY, body_steps)]
    uniform = weighting == "uniform"
    expected = two_layers.rounds(data, w, TRACE, loops, uniform=uniform, **settings)
    for row, (body, heads) in zip(history.rounds, expected, strict=True):
        np.testing.assert_allclose(row["w"][BODY], body, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row["head"], heads, rtol=0, atol=1e-12)
        assert np.array_equal(row["w"][HEAD], w[HEAD])  # the initial head, for whoever comes late
    body, heads = expected[-1]
    models = np.hstack([np.tile(body, (4, 1)), heads])
    np.testing.assert_allclose(personalized(algorithm), models, rtol=0, atol=1e-12)
    assert np.array_equal(personalized(algorithm)[3, HEAD], w[HEAD])
    # Sample gradients: each participant's samples, once for every step of the head and the body.
    assert algorithm.progress.samples == sum(data.sizes[c].sum() for c in TRACE if c) * (
        head_epochs + body_steps
    )


class Watched(FedRep):
    """Records the models before and after each of the two loops, and what is received."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loops, self.received, self.before = [], [], []

    def local_sgd(self, clients, start, **kwargs):
        v = super().local_sgd(clients, start, **kwargs)
        self.loops.append((kwargs.get("name", "train"), start.clone(), v.clone()))
        return v

    def client_update(self, clients, w):
        self.before.append(clients.state["head"].clone())
        self.received.append(w.clone())
        return super().client_update(clients, w)


OPTIMIZERS = {
    "plain": None,
    "momentum": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, weight_decay=0.1),
}


@pytest.mark.parametrize("engine", ["auto", "sequential", "vmap", "debug"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_part_keeps_its_bits_while_the_other_one_trains(fit, optimizer, engine):
    """Also with weight decay and momentum, which would move a part with a gradient of 0."""
    torch.manual_seed(0)
    arguments = dict(head_epochs=2, lr=0.05, weight_decay=0.1, batch_size=64, engine=engine)
    algorithm = Watched(MLP(64, (8,)), optimizer=OPTIMIZERS[optimizer], **arguments)
    data = DigitsDataModule(6, Dirichlet(1.0))
    fit(algorithm, data, 2, clients_per_round=3, clients_at_once=2, evaluate=())
    head = algorithm.personal_part
    assert {name for name, _, _ in algorithm.loops} == {"head", "train"}
    for name, start, end in algorithm.loops:
        moves = head if name == "head" else ~head
        assert torch.equal(end[:, ~moves], start[:, ~moves])
        assert (end[:, moves] != start[:, moves]).any(1).all()
    # The first loop begins at (φ, h_i) as received and kept, the second one where the first ended.
    loops = zip(algorithm.loops[::2], algorithm.loops[1::2], strict=True)
    for ((_, start, middle), (_, second, _)), kept, w in zip(
        loops, algorithm.before, algorithm.received, strict=True
    ):
        assert torch.equal(start[:, head], kept)
        assert torch.equal(start[:, ~head], w[~head].expand(len(start), -1))
        assert torch.equal(second, middle)


def test_with_objectives_that_separate_it_is_fedper(fit):
    """Where f_i is a sum over the parameters (`matrix_problem` with biases), no gradient depends on
    the other part. K steps of each part in turn are then K steps of both together."""
    rng = np.random.default_rng(0)
    optima, biases = list(rng.normal(size=(3, 2, 3))), list(rng.normal(size=(3, 2)))
    problem, histories = matrix_problem(optima, [1.0, 2.0, 0.5], [1, 3, 2], biases), []
    for kind, extra in ((FedRep, {"head_epochs": 3}), (FedPer, {})):
        histories.append(History())
        method = kind(
            problem.network(0.2), personal=["bias"], lr=0.3, local_epochs=3, **extra, **FULL
        )
        fit(method, problem, 4, callbacks=[histories[-1]], trace=[[0, 1], [2], [1, 2], [0, 2]])
    for name in ("w", "head"):
        np.testing.assert_allclose(histories[0][name], histories[1][name], rtol=0, atol=1e-12)


def test_the_subspace_of_linear_clients_is_recovered(watch):
    """The paper's linear setting: y = a_i B* x without noise, with mean x x' = I and mean x = 0.

    Then f_i = 1/2 |a B - a_i B*|^2 + 1/2 |c|^2. Heads that make it 0 exist for all clients if, and
    as the a_i together have full rank only if, B has the row space of B*. There the method must end
    (Theorem 1), at a geometric rate: every 25 rounds gain a factor.
    """
    rng = np.random.default_rng(2)
    d, k, outputs = two_layers.INPUTS, two_layers.HIDDEN, two_layers.OUTPUTS
    true = np.linalg.qr(rng.normal(size=(d, k)))[0].T
    features, targets = [], []
    for _ in range(5):
        q = np.linalg.qr(rng.normal(size=(d, d)))[0]
        features.append(np.sqrt(d) * np.concatenate([q, -q]))
        targets.append(features[-1] @ true.T @ rng.normal(size=(k, outputs)))
    problem = Problem(features, targets, two_layers.network)
    w = two_layers.start()
    algorithm = FedRep(problem.network(w), lr=0.15, head_epochs=20, local_epochs=1, **FULL)
    history = watch(algorithm, problem, 75)

    def distance(w):
        """Of the row space of B* to that of B, the sine of the largest angle."""
        space = np.linalg.qr(w[BODY].reshape(k, d).T)[0]
        return np.linalg.norm(true.T - space @ (space.T @ true.T), 2)

    distances = [distance(w), *(distance(history["w"][t]) for t in (24, 49, 74))]
    assert distances[-1] < 1e-6 < 0.1 < distances[0]
    for one, two in itertools.pairwise(distances):
        assert two < 0.1 * one


@pytest.mark.parametrize("patterns", [["tail.*"], ["head.*", "tail.*"], "tail.*"])
@pytest.mark.parametrize("kind", [FedRep, FedPer])
def test_a_pattern_that_selects_nothing_is_refused(kind, patterns):
    with refused("model.personal: 'tail.*' matches none of body.linear1.weight"):
        kind(MLP(64, (8,)), personal=patterns)


@pytest.mark.parametrize("patterns", [[], ["*"], ["body.*", "head.*"]])
@pytest.mark.parametrize("kind", [FedRep, FedPer])
def test_a_part_that_is_nothing_or_everything_is_refused(kind, patterns):
    with refused(f"model.personal: {patterns}; it must be some of the", "and not all"):
        kind(MLP(64, (8,)), personal=patterns)


def test_the_relative_cost_counts_both_loops():
    """Samples times epochs, those of the head and those of the body together."""
    sizes = np.array([10, 4, 0])
    epochs = FedRep(MLP(64, (8,)), head_epochs=5, local_epochs=2)
    assert epochs.cost(sizes).tolist() == [70, 28, 0]
    steps = FedRep(MLP(64, (8,)), head_epochs=5, local_steps=6, batch_size=4)
    # 10 samples: 3 steps an epoch, so 2 epochs; 4 samples: 1 step an epoch, so 6 epochs.
    assert steps.cost(sizes).tolist() == [10 * (5 + 2), 4 * (5 + 6), 0]


# tests/algorithms/test_networks_train.py has larger ones.
SMALL = ("LogisticRegression", "LinearRegression-affine", "MLP", "SmallCNN")
PATTERNS = {"LogisticRegression": "*.bias", "LinearRegression-affine": "*.bias"}
ONE_PARAMETER = ("LinearRegression", "PenalizedLogisticRegression")


@pytest.mark.parametrize("name", ONE_PARAMETER)
def test_a_network_of_one_parameter_has_no_parts(name):
    with refused("model.personal", "and not all"):
        FedRep(NETWORKS[name][0]())


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_train(fit, name):
    """Networks of one layer have a body where their bias is personal."""
    build, shape, classes = NETWORKS[name]
    torch.manual_seed(0)
    network = build()
    inputs = torch.rand(6, *shape)
    targets = torch.arange(6) % classes if classes > 1 else torch.rand(6, 1)
    data = owned(np.repeat([0, 1], [4, 2]), inputs, targets)
    personal = [PATTERNS.get(name, "head.*")]
    method = FedRep(network, personal=personal, lr=0.01, head_epochs=1, batch_size=2)
    start = method.global_model.clone()
    fit(method, data, 1, precision="32-true")
    head = method.personal_part
    heads = method.client_rows("head", np.arange(2))
    assert (method.global_model != start)[~head].any()
    assert (heads != start[head]).any(1).all() and heads.isfinite().all()
