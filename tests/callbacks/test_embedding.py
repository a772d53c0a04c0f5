"""The t-SNE figure of one client: which model gives the places, and which one the classes."""

import numpy as np
import pytest
import torch

from datamodules import DigitsDataModule, SplitOwn
from models import MLP
from pfl import FederatedLoop
from pfl.algorithms import Ditto, FedAvg
from pfl.callbacks import EmbeddingFigure, embedding
from tests.commands import table
from tests.problems import quiet
from tests.refusal import refused

CLIENT = 4


def fit(tmp_path, method=Ditto, client=CLIENT, test=0.5, clients=6, unseen=None):
    """A trained method, the run's folder and the samples of the client's test set."""
    torch.manual_seed(0)
    algorithm = method(MLP(64, (4,)), lr=0.1)
    data = DigitsDataModule(clients, protocol=SplitOwn(test=test, validation=0.0), seed=0)
    trainer = quiet(tmp_path, 3, EmbeddingFigure(client=client))
    trainer.fit(algorithm, datamodule=FederatedLoop(data, unseen=unseen))
    return algorithm, trainer.run_dir, trainer.datamodule


def forward(w, inputs):
    """The hidden layer and the outputs of MLP(64, (4,)): ReLU between two linear layers."""
    a, b, c, d = np.split(w, np.cumsum([64 * 4, 4, 4 * 10]))
    hidden = np.maximum(inputs @ a.reshape(4, 64).T + b, 0)
    return hidden, hidden @ c.reshape(10, 4).T + d


def test_panels_pair_extractors_with_classifiers(tmp_path, monkeypatch):
    """Against NumPy; the last 4 * 10 + 10 values of a model are its classifier."""
    seen = []
    monkeypatch.setattr(embedding, "_in_the_plane", lambda z: seen.append(z) or z[:, :2])
    algorithm, _, loop = fit(tmp_path)
    seen.clear()
    with torch.no_grad():
        panels, targets = embedding.embeddings(algorithm, loop, CLIENT)
    index = torch.as_tensor(loop.datamodule.partition.test[CLIENT])
    inputs, labels = (values.numpy() for values in loop.datamodule.samples.gather(index))
    inputs = inputs.reshape(len(index), -1)
    models = {
        "personalized": algorithm.store.read("v", np.array([CLIENT])).numpy()[0],
        "global": algorithm.global_model.numpy(),
    }
    assert not np.allclose(models["personalized"], models["global"])
    np.testing.assert_array_equal(targets, labels)
    assert list(panels) == [(a, b) for a in models for b in models]
    for (extractor, classifier), (_, predicted) in panels.items():
        w = np.concatenate([models[extractor][:-50], models[classifier][-50:]])
        np.testing.assert_array_equal(predicted, forward(w, inputs)[1].argmax(1))
    assert len(seen) == 2  # one for each extractor
    for z, w in zip(seen, models.values(), strict=True):
        np.testing.assert_allclose(z, forward(w, inputs)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method, count", [(Ditto, 4), (FedAvg, 1)])
def test_the_figure_is_written_and_says_the_accuracies_of_the_run(
    tmp_path, monkeypatch, method, count
):
    from pfl.report import figures

    drawn, make = [], figures.embedding_figure
    monkeypatch.setattr(
        figures, "embedding_figure", lambda *args: drawn.append(make(*args)) or drawn[-1]
    )
    _, folder, _ = fit(tmp_path, method)
    assert (folder / "embedding.png").stat().st_size > 1000
    titles = [plot.title for plot in drawn[0].plots]
    row = table(folder / "clients.csv")[CLIENT]
    expected = float(row["test/global/accuracy"])
    assert len(titles) == count and titles[-1].endswith(f"accuracy {expected:.4f}")
    if count == 4:
        assert titles[0].endswith(f"accuracy {float(row['test/personalized/accuracy']):.4f}")


def test_a_client_that_never_trains_has_a_newcomers_model(tmp_path):
    """Ditto's newcomers begin with the global model; the client's own is as it was at first."""
    algorithm, _, loop = fit(tmp_path, unseen=[CLIENT])
    with torch.no_grad():
        panels, _ = embedding.embeddings(algorithm, loop, CLIENT)
    alone = panels["global", "global"][1]
    np.testing.assert_array_equal(panels["personalized", "personalized"][1], alone)


def test_a_client_with_few_samples_gets_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="client 4 has .* test samples, too few"):
        fit(tmp_path, test=0.01)


def test_equal_features_have_places(tmp_path):
    """As those of a layer whose units are all off; scikit-learn would end the process."""
    torch.manual_seed(0)
    network = MLP(64, (4,))
    network.body.linear1.bias.data.fill_(-1000.0)
    data = DigitsDataModule(6, protocol=SplitOwn(test=0.2, validation=0.0), seed=0)
    trainer = quiet(tmp_path, 1, EmbeddingFigure())
    trainer.fit(FedAvg(network), datamodule=FederatedLoop(data))
    assert {"embedding.png", "summary.json"} <= {path.name for path in trainer.run_dir.iterdir()}


def test_an_unknown_client_is_refused(tmp_path):
    with refused("EmbeddingFigure.client: 6", "below 6"):
        fit(tmp_path, client=6)
    with refused("EmbeddingFigure.client: -1"):
        EmbeddingFigure(client=-1)
