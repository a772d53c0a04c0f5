"""A picture of what the global and the personalized model make of one client's samples."""
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl import files
from pfl.callbacks.recorder import RunRecorder
from pfl.clients import Clients
from pfl.datamodules.errors import require_value
from pfl.datamodules.ranges import Checked, CountOrZero
from pfl.errors import ConfigError
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.exported import own_model
from pfl.method.features import features
from pfl.method.partly_personal import select_part
from pfl.method.statistics import of_model
from pfl.rounds.loop import FederatedLoop

FEWEST = 5  # smallest number of samples worth drawing


class EmbeddingFigure(Checked, Callback):
    """Draws the features of one client's test samples in the plane, by t-SNE (`embedding.png`).

    A panel pairs the extractor (all layers but the last) of the personalized or the global model
    with the classifier (the last layer) of either, as Figure 4 of FedSLR (Huang et al., TMLR 2023)
    does. The place of a sample is t-SNE's of the features that the extractor gives; colour and
    marker are the sample's class; a black cross marks samples that the classifier gets wrong. The
    paper does not say how its panels show the classifier; crosses are our choice. A method with one
    kind of model gets one panel.

    A client that never trains (`loop.unseen`) has a newcomer's first model as its personalized one.
    The figure is drawn at the end of `fit` and of `test`.

    Args:
        client: The id of the client.

    Raises:
        ConfigError: There is no such client, or the data have no classes.

    Example:
        >>> from pfl import Trainer
        >>> trainer = Trainer(callbacks=[EmbeddingFigure(client=3)], enable_progress_bar=False)
    """

    results = ("embedding.png",)  # a resumed run writes it if it is missing

    def __init__(self, client: CountOrZero = 0) -> None:
        self.client = client

    def setup(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm, stage: str) -> None:
        loop = pl_module.run.loop
        holds = self.client < loop.num_clients
        expected = f"below {loop.num_clients}, the number of clients"
        require_value("EmbeddingFigure.client", self.client, holds, expected)
        if not loop.datamodule.has_labels:
            raise ConfigError("EmbeddingFigure: it needs classes, and the targets are numbers")

    def on_train_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        if self.client % trainer.world_size != trainer.global_rank:
            return  # another process keeps the client's states
        with torch.no_grad(), pl_module.in_full_precision():
            panels, targets = embeddings(pl_module, pl_module.run.loop, self.client)
        if not panels:
            rank_zero_warn(
                f"EmbeddingFigure: client {self.client} has {len(targets)} test samples, too few "
                f"for a figure; it needs {FEWEST}",
                category=UserWarning,
            )
            return
        from pfl.report.figures import embedding_figure
        from pfl.report.matplotlib_drawer import draw  # matplotlib is slow to import

        figure = draw(embedding_figure(panels, targets, self.client))
        files.write_figure(RunRecorder.of(trainer).folder / "embedding.png", figure)

    on_test_end = on_train_end


def embeddings(
    algorithm: FederatedAlgorithm, loop: FederatedLoop, client: int
) -> tuple[dict[tuple[str, str], tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """Returns the places and predicted classes of a client's test samples, and their classes [n].

    There are places [n, 2] and predicted classes [n] for each (extractor, classifier), of
    "personalized" and "global"; none for fewer than five samples.
    """
    (clients,) = loop.chunks(np.array([client]), "test", 1, owned=True)
    data = loop.client_data(algorithm.device)
    one = Clients(clients, algorithm.rounds, data, "test", dtype=torch.float32)
    algorithm.load_state(one)
    models = _models(algorithm, one)
    batches = [batch for _, batch in one.samples()]
    classes = [b.targets[0, : b.counts[0]].cpu().numpy() for b in batches]
    targets = np.concatenate([np.empty(0, np.int64), *classes])
    panels: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = {}
    if len(targets) < FEWEST:
        return panels, targets
    mask = select_part(algorithm.network, algorithm.space, "head", "EmbeddingFigure")
    inputs = [b.inputs[0, : b.counts[0]] for b in batches]
    for extractor, (body, buffers) in models.items():
        parts = [features(algorithm.oracle, body, b, buffers) for b in batches]
        known = [z[0, : b.counts[0]] for z, b in zip(parts, batches, strict=True)]
        places = _in_the_plane(torch.cat(known).flatten(1).cpu().numpy())
        if buffers is None:
            own = None
        else:
            own = buffers[0]
        for classifier, (last, _) in models.items():
            w = torch.where(mask, last, body)
            outputs = [algorithm.oracle.predict(w[0], x, own) for x in inputs]
            panels[extractor, classifier] = places, torch.cat(outputs).argmax(1).cpu().numpy()
    return panels, targets


def _models(algorithm: FederatedAlgorithm, one: Clients) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Returns the client's models [1, P] and their running statistics, by kind."""
    models: dict[str, tuple[Tensor, Tensor | None]] = {}
    if algorithm.has_personalized:
        models["personalized"] = own_model(algorithm, replace(one))  # it may replace statistics
    if algorithm.has_global:
        own = of_model("global", algorithm, one).buffers
        models["global"] = algorithm.global_model[None], own
    return models


def _in_the_plane(values: np.ndarray) -> np.ndarray:
    """Returns the places [n, 2] of values [n, K] by t-SNE, with a fixed seed."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(values) - 1) / 3)
    start = "random"
    if values.shape[1] >= 2 and values.std(0).any():  # equal ones have no principal components
        start = "pca"
    return TSNE(perplexity=perplexity, init=start, random_state=0).fit_transform(values)
