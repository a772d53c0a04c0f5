"""Running statistics go where the parameters of their model go: every method, both `buffers` modes.

The network of these tests has a statistic that says on whose samples its model was trained: the
number of local steps with the samples of each of the four clients. It is a whole number of the own
client's steps for a model that a client keeps, and has the weights of a mean in a mean of models.
"""

import csv

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import SharedTest
from models import HalfSquaredError
from pfl.algorithms import (
    APFL,
    IFCA,
    L2GD,
    MRMTL,
    Ditto,
    FedACS,
    FedAvg,
    FedBABU,
    FedCLUP,
    FedPD,
    FedSLR,
    HeurFedAMP,
    LocalTrain,
    PerFedAvg,
    pFedMe,
)
from pfl.method import Joined, ModelMixtures
from tests.algorithms.methods import (
    BATCHES,
    METHODS,
    SIZES,
    normalized_network,
    small_world,
    tables,
)
from tests.problems import owned
from tests.refusal import refused

KEEP = (FedCLUP, FedPD, L2GD, MRMTL, ModelMixtures)  # whose clients keep a model of their own
M = len(SIZES)
STEPS = np.array([-(-size // BATCHES["batch_size"]) for size in SIZES])  # of an epoch
TRACE = [[0, 1], [1, 2, 3], [0, 2]]


class Steps(nn.Module):
    """Counts local steps by client: the first inputs of a sample say whose it is.

    Evaluation shows the statistic in the outputs, training does not.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("runs", torch.zeros(M, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.runs += x[:, :M].mean(0)
            return x
        return x + nn.functional.pad(0.3 * self.runs, (0, x.shape[1] - M))


def network():
    layers = Steps(), nn.Linear(M + 3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)
    network = nn.Sequential(*layers).double()
    count = sum(p.numel() for p in network.parameters())
    values = torch.from_numpy(0.6 * np.random.default_rng(3).normal(size=count))
    nn.utils.vector_to_parameters(values, network.parameters())
    return network


def world(classes):
    rng, owners = np.random.default_rng(5), np.repeat(np.arange(M), SIZES)
    x, y = (torch.from_numpy(rng.normal(size=(len(owners) + 3, n))) for n in (3, 2))
    if classes:
        y = (y[:, 0] > 0).long()
    whose = nn.functional.one_hot(torch.from_numpy(owners), M)
    train = torch.cat([whose, x[:-3]], 1)
    test = torch.cat([torch.zeros(3, M), x[-3:]], 1)
    return owned(owners, train, y[:-3], test, y[-3:], protocol=SharedTest(validation=0.0))


def modes(method):
    """The values of `buffers` that a method takes; it may fix one, or refuse one."""
    try:
        method.make(network(), buffers="average")
    except TypeError:
        return [method.make(network()).buffer_policy]
    skips = method.arguments.get("skip_probability") or "communication_period" in method.arguments
    return ["local"] if skips else ["average", "local"]


CASES = {f"{name}, {mode}": (m, mode) for name, m in METHODS.items() for mode in modes(m)}


def besides(algorithm):
    """Local steps [M] a round of a personalized model that is trained beside the one sent."""
    epochs = BATCHES["local_epochs"]
    if isinstance(algorithm, pFedMe):
        epochs *= algorithm.personal_steps - 1
    return STEPS * getattr(algorithm, "personal_epochs", epochs)


def adaptation(algorithm):
    """Local steps [M] of a personalized model that is trained for an evaluation."""
    if isinstance(algorithm, FedBABU):
        return STEPS * algorithm.finetune_epochs
    return np.full(M, algorithm.adaptation_steps if isinstance(algorithm, PerFedAvg) else 0)


def of_table(algorithm, name):
    rows = csv.DictReader(tables(algorithm)[name].splitlines())
    return [{key: float(value) for key, value in row.items()} for row in rows]


def pull(algorithm, number):
    """L2GD: how far the averaging steps of a round take the models to their mean."""
    return 1 - (1 - algorithm.averaging_step(number)) ** algorithm.runs(number)[1]


def expected(method, algorithm, trace):
    """The steps of the global model [M, M] and of the personalized ones, as every client has them.

    Statistics are averaged, mixed and chosen as the parameters are.
    """
    local = algorithm.buffer_policy == "local"
    shared, kept = np.zeros(M), np.zeros((M, M))
    beside = np.full((M, M), np.nan if isinstance(algorithm, FedSLR) else 0.0)
    clusters = np.zeros((getattr(algorithm, "clusters", 1), M))
    size = np.array(SIZES if algorithm.weighting == "samples" else np.ones(M))
    for number, cohort in enumerate(trace):
        start = kept.copy() if local or isinstance(algorithm, KEEP) else np.tile(shared, (M, 1))
        if isinstance(algorithm, ModelMixtures) and not local:
            start = np.zeros((M, M))
            for row in of_table(algorithm, "collaboration"):
                if row["round"] == number + 1:
                    start[int(row["client"])] += row["weight"] * kept[int(row["partner"])]
        steps = STEPS * (BATCHES["local_epochs"] + method.more_epochs)
        if isinstance(algorithm, L2GD):
            steps = np.full(M, algorithm.runs(number)[0])
            if number and not local:
                start += pull(algorithm, number - 1) * (shared - start)
        choice = np.zeros(M, int)
        if isinstance(algorithm, IFCA) and not local:
            for row in of_table(algorithm, "clusters"):
                if row["round"] == number + 1:
                    choice[int(row["client"])] = row["cluster"]
            start = clusters[choice]
        end = start + np.diag(steps)
        beside[cohort] = np.where(np.isnan(beside), start, beside)[cohort]
        beside[cohort] += np.diag(besides(algorithm))[cohort]
        kept[cohort] = end[cohort]
        shared = np.average(end[cohort], axis=0, weights=size[cohort])
        for j in set(choice[cohort]):
            own = [i for i in cohort if choice[i] == j]
            clusters[j] = np.average(end[own], axis=0, weights=size[own])
    own = kept if local or isinstance(algorithm, KEEP) else np.tile(shared, (M, 1))
    if isinstance(algorithm, L2GD) and not local:
        own = own + pull(algorithm, len(trace) - 1) * (shared - own)
    if isinstance(algorithm, IFCA) and not local:
        models = algorithm.models
        w = personalized(algorithm)
        own = clusters[[int((models - row).abs().sum(1).argmin()) for row in w]]
    own = beside if algorithm.personal_buffers else own + np.diag(adaptation(algorithm))
    return kept if local else np.tile(shared, (M, 1)), own


def personalized(algorithm):
    rows = torch.zeros(M, algorithm.space.size).double()
    for clients in algorithm.iter_clients():
        rows[clients.ids] = algorithm.personalized(clients)
    return rows


def loss(w, runs, classes, algorithm):
    """The test loss of a model with a statistic, by a plain network, or by one of several parts."""
    model, data = network(), world(classes)
    bodies = [model]
    if algorithm.wrapper is not None:
        model = algorithm.wrapper(model)
        bodies = [model.body]
    elif isinstance(algorithm.network, Joined):  # both see the same mini-batches
        model = type(algorithm).joint(model, network())
        bodies = [model.own, model.messenger]
    model.eval()
    data.setup()
    nn.utils.vector_to_parameters(w.clone(), model.parameters())
    for body in bodies:
        body[0].runs.copy_(torch.from_numpy(runs))
    inputs, targets = data.samples.gather(torch.from_numpy(data.partition.test[0]))
    error = nn.CrossEntropyLoss() if classes else HalfSquaredError()
    with torch.no_grad():
        return float(error(model(inputs), targets).mean())


@pytest.mark.parametrize("case", CASES)
def test_statistics_follow_their_model(fit, case):
    """Every model is scored with its own, whose values are derived round by round."""
    method, mode = CASES[case]
    chosen = {"buffers": mode} if len(modes(method)) > 1 or "FedPD" in case else {}
    algorithm = method.make(network(), **BATCHES, **chosen)
    trace = [list(range(M))] * 3 if method.everyone else TRACE
    fit(algorithm, world(method.classes), len(trace), trace=trace, evaluate=("test",))
    shared, own = expected(method, algorithm, trace)
    if method.pooled:  # every batch of two samples counts half a step for each
        shared = np.tile(3 * BATCHES["local_epochs"] * np.array(SIZES) / 2, (M, 1))
    scores = algorithm.evaluation.scores
    models = {"global": (algorithm.global_model.expand(M, -1), shared)}
    if algorithm.has_personalized:
        models["personalized"] = personalized(algorithm), own
    if not algorithm.has_global:
        del models["global"]
    assert {kind for _, kind in scores} == models.keys()
    for kind, (w, runs) in models.items():
        expected_losses = [loss(w[i], runs[i], method.classes, algorithm) for i in range(M)]
        np.testing.assert_allclose(
            scores["test", kind]["loss"], expected_losses, rtol=1e-9, err_msg=kind
        )
        assert runs.any(1).all()


# ---- a client that is alone has the statistics of a client that is alone ------------------------

ALONE = {
    "FedCLUP": (FedCLUP, {"penalty": 0.0}),
    "APFL": (APFL, {"alpha": 1.0}),
    "L2GD": (L2GD, {"penalty": 0.0}),
    "FedACS": (FedACS, {"quantile": 1.0}),
    "HeurFedAMP": (HeurFedAMP, {"own_weight": 1.0, "penalty": 0.0}),
    "Ditto": (Ditto, {"penalty": 0.0, "personal_epochs": 2}),
}


class DrawnSteps(LocalTrain):
    """LocalTrain with as many local steps in a round as L2GD draws."""

    def local_sgd(self, clients, start, **kwargs):
        steps = L2GD.runs(self, clients.round)[0]
        return super().local_sgd(clients, start, steps=steps, **kwargs)


@pytest.mark.parametrize("mode", ["average", "local"])
@pytest.mark.parametrize("name", ALONE)
def test_without_collaboration_it_is_local_training_bit_for_bit(fit, name, mode):
    """Scores, models and statistics. Ditto takes its personal steps in another order of samples,
    so that its batches are all of a client's samples."""
    kind, arguments = ALONE[name]
    settings = {**BATCHES, "batch_size": None if name == "Ditto" else BATCHES["batch_size"]}
    if name == "L2GD":
        del settings["local_epochs"]
    trace = [list(range(M))] * 3 if name == "L2GD" else TRACE

    def run(algorithm):
        return fit(algorithm, small_world(), len(trace), trace=trace, evaluate=("test",))

    start, common = normalized_network, dict(loss=HalfSquaredError(), **settings)
    actual = run(kind(start(), buffers=mode, **arguments, **common))
    alone = DrawnSteps if name == "L2GD" else LocalTrain
    reference = alone(start(), **common)
    reference.averaging_probability = getattr(actual, "averaging_probability", None)
    reference = run(reference)
    everyone = np.arange(M)
    held = "personal_buffers" if actual.personal_buffers else "buffers"
    statistics = reference.client_rows("buffers", everyone)
    assert torch.equal(actual.client_rows(held, everyone), statistics)
    assert not torch.equal(statistics[0], statistics[1])
    for number, values in reference.evaluation.scores["test", "personalized"].items():
        own = actual.evaluation.scores["test", "personalized"][number]
        np.testing.assert_array_equal(own, values, err_msg=number)


# ---- a method of one's own ----------------------------------------------------------------------


class OwnStarts(FedAvg):
    """Its server forms a model for each client, and forgets the statistics."""

    def download(self):
        return {}

    def download_for(self, ids):
        return self.global_model.repeat(len(ids), 1)


def test_models_without_statistics_are_refused(fit):
    with refused("model.buffers: average; OwnStarts sends its clients no model", "use local"):
        fit(OwnStarts(normalized_network(), loss=HalfSquaredError(), **BATCHES), small_world(), 1)
