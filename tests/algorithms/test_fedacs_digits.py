"""FedACS on handwritten digits: where it is local training, and what must not matter."""

import numpy as np
import pytest
import torch

from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl import FederatedLoop
from pfl.algorithms import FedACS, LocalTrain
from pfl.callbacks import RoundCheckpoint
from tests.algorithms.reference_agg_acs import table
from tests.problems import quiet


@pytest.fixture(scope="module")
def digits():
    """Six clients of unequal sizes."""
    return DigitsDataModule(num_clients=6, partition=Dirichlet(0.4), seed=3)


def network(seed=0):
    torch.manual_seed(seed)
    return MLP(64, (8,))


@pytest.mark.parametrize("quantile", [1.0, 1 - 1 / 6])
def test_a_high_quantile_is_local_training(fit, digits, quantile):
    """p >= 1 - 1/n: the threshold lies above every cosine but the diagonal's."""
    settings = dict(lr=0.1, batch_size=16, local_epochs=2)
    algorithm, alone = (
        FedACS(network(), quantile=quantile, **settings),
        LocalTrain(network(), **settings),
    )
    for method in (algorithm, alone):
        fit(method, digits, 3, evaluate=())
    models = [method.store.read("w", np.arange(6)) for method in (algorithm, alone)]
    torch.testing.assert_close(models[0], models[1], rtol=0, atol=1e-13)
    assert all(row["collaborators"] == 0 for row in algorithm.trainer.recorder.rows)
    assert all(i == j for weights in table(algorithm).values() for i, j in weights)


def test_just_below_somebody_collaborates(fit, digits):
    """The largest pair is chosen once p (n² - 1) < n² - n - 2: here p < 28 / 35."""
    for quantile, some in ((0.79, True), (0.81, False)):
        algorithm = FedACS(network(), quantile=quantile, lr=0.1, batch_size=None)
        fit(algorithm, digits, 3, evaluate=())
        later = [row["collaborators"] for row in algorithm.trainer.recorder.rows[1:]]
        assert all((value > 0) == some for value in later)


# ---- what must not matter -----------------------------------------------------------------------


def trained(root, digits, rounds, ckpt_path=None, seed=0, engine="auto", loop=None, **kwargs):
    algorithm = FedACS(network(seed), lr=0.1, batch_size=32, quantile=0.4, engine=engine, **kwargs)
    trainer = quiet(root, rounds, RoundCheckpoint(every_seconds=0), limit_val_batches=0)
    data = FederatedLoop(digits, clients_per_round=4, **(loop or {}))
    trainer.fit(algorithm, datamodule=data, ckpt_path=ckpt_path)
    return algorithm


@pytest.mark.parametrize("candidates", ["participants", "all"])
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, digits, candidates):
    expected = trained(tmp_path / "straight", digits, 4, candidates=candidates)
    trained(tmp_path / "parts", digits, 2, candidates=candidates)
    last = tmp_path / "parts" / "run" / "checkpoints" / "last.ckpt"
    resumed = trained(tmp_path / "parts", digits, 4, ckpt_path=last, seed=1, candidates=candidates)
    assert resumed.store.names == expected.store.names
    for name in expected.store.names:
        rows = [method.store.read(name, np.arange(6)) for method in (resumed, expected)]
        assert torch.equal(*rows), name
    for name in ("collaboration.csv", "metrics.csv"):
        one, other = (tmp_path / part / "run" / name for part in ("parts", "straight"))
        assert one.read_bytes() == other.read_bytes(), name


@pytest.mark.parametrize("candidates", ["participants", "all"])
def test_engines_and_chunks_agree(tmp_path, digits, candidates):
    """Who collaborates does not depend on who is trained together."""

    def run(engine, at_once):
        loop = dict(clients_at_once=at_once)
        algorithm = trained(tmp_path, digits, 3, engine=engine, loop=loop, candidates=candidates)
        return algorithm.store.read("w", np.arange(6)), table(algorithm)

    models, weights = run("sequential", 1)
    for engine, at_once in (("sequential", 4), ("vmap", 2)):
        actual, other = run(engine, at_once)
        assert (actual - models).norm() < 1e-5 * models.norm()
        for t, own in weights.items():
            assert other[t].keys() == own.keys()
            values = [other[t][pair] for pair in own]
            np.testing.assert_allclose(values, list(own.values()), rtol=0, atol=1e-5)
