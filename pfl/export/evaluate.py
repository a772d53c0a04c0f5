"""`pfl evaluate`: the models of a finished run on the samples of any clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pfl import files
from pfl.clients import ClientData
from pfl.configuration.app import DataCLI
from pfl.datamodules import FederatedDataModule
from pfl.engines.runner import ModelRunner
from pfl.errors import ConfigError
from pfl.export.run import POOL, RestoredRun
from pfl.method.exported import (
    client_network,
    finetuned_network,
    global_network,
    has_own_models,
)
from pfl.report.figures import matrix_figure
from pfl.report.matplotlib_drawer import draw
from pfl.report.table import Column, Table, text
from pfl.scores.evaluation import ClientScores

Split = Literal["train", "val", "test", "all"]
SPLITS = ("train", "val", "test", "all")


class Model(NamedTuple):
    """A model of a run.

    Attributes:
        kind: "global", "personalized", "newcomer", or after k steps "finetuned/<k>", "unseen/<k>".
        client: Whose it is; None for the global model.
        network: The network with this model.
    """

    kind: str
    client: int | None
    network: nn.Module


class Sites:
    """Clients on whose samples models are scored.

    Args:
        run: The run of the models.
        data: Whose clients they are; None: the run's own.
        split: Which of their samples count.
    """

    def __init__(self, run: RestoredRun, data: FederatedDataModule | None, split: Split) -> None:
        own = run.datamodule.datamodule
        module = own
        if data is not None:
            data.read_like(own)
            data.setup()
            module = data
            for line in data.conversions:
                print(f"data: {line}")
        self._own = own
        self._module = module
        self._data = ClientData(module)
        self._dtype = run.model.global_model.dtype
        self._numbers: Tensor | None = None
        self.names = module.names_or_numbers
        self._units = module
        self._scale_targets = False  # by the numbers of a client of the run
        self._seen_as = list(range(len(self.names)))  # the client of the run that a site is
        if data is not None:
            self._take_over(own, data)
        self.indices = [_samples_of(module, number, split) for number in range(len(self.names))]
        # Numbers of other data's clients are not those of the run's clients.
        known = data is None or (own.client_names and module.client_names)
        self.own: dict[str, int] = {}
        if known:
            self.own = {name: number for number, name in enumerate(self.names)}

    def _take_over(self, own: FederatedDataModule, other: FederatedDataModule) -> None:
        """Shows other data as the run's models have seen theirs; refuses what does not fit."""
        if other.scale_targets:
            raise ConfigError(
                f"evaluate: --data: scale_targets: {other.scale_targets}; leave it out, as the "
                f"run's scale is used"
            )
        if own.differs_by_client:
            known = own.names_or_numbers
            for name in self.names:
                if name not in known or other.client_names is None:
                    changes = ", ".join(map(repr, own.transforms.transforms))
                    if own.scale_targets == "client":
                        changes = "data.scale_targets"
                    raise ConfigError(
                        f"evaluate: --data: {changes} of the run differs by client, and has "
                        f"nothing for the client {name!r}, which was not in the run; leave it out"
                    )
            self._seen_as = [known.index(name) for name in self.names]
        self._units = own
        self._scale_targets = own.scale_targets == "client"
        self._data.transforms = own.transforms
        for what in ("feature_names", "class_names"):
            mine = getattr(own, what)
            theirs = getattr(other, what)
            if what == "class_names" and mine and theirs and mine != theirs:
                self._numbers = _numbers_of(theirs, mine)
            elif mine != theirs and mine and theirs:
                raise ConfigError(
                    f"evaluate: --data: its columns are {', '.join(theirs)}; the run's are "
                    f"{', '.join(mine)}"
                )
        kinds = [_kind_of_targets(one) for one in (own, other)]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"evaluate: --data: its targets are {kinds[1]}; the run's are {kinds[0]}"
            )
        shapes = [list(one.samples.input_shape) for one in (own, other)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"evaluate: --data: its inputs are {shapes[1]}; the run's are {shapes[0]}"
            )

    def own_unit(self, site: int, values: Tensor) -> Tensor:
        """Returns values of a client in the unit of the file's targets."""
        return self._units.own_unit(self._seen_as[site], values)

    def training_targets(self, site: int) -> Tensor:
        """Returns the targets of a client's training samples [n, ...], in the order of time.

        Those are the samples of the run, if the client was in it.
        """
        known = self._own.names_or_numbers
        name = self.names[site]
        if name in self.own and name in known:
            return torch.from_numpy(self._own.training_targets(known.index(name)))
        return torch.from_numpy(self._module.training_targets(site))

    def batches(self, site: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the inputs and targets of a client's samples, as the run's models get them."""
        if not len(self.indices[site]):  # networks and transforms may not take an empty batch
            return
        for index in torch.from_numpy(self.indices[site]).split(POOL):
            owners = np.full(len(index), self._seen_as[site])
            inputs, targets = self._data.gather(index, self._dtype, owners)
            if self._numbers is not None:
                targets = self._numbers[targets]
            if self._scale_targets:
                scale = self._units.scale_of(self._seen_as[site])
                assert scale is not None
                targets = scale(targets)
            yield inputs, targets


def _kind_of_targets(data: FederatedDataModule) -> str:
    """Returns in words what a sample's target is: a class, several of them, or numbers."""
    target = data.samples.gather(torch.zeros(1, dtype=torch.int64))[1][0]
    if target.is_floating_point():
        return f"floating numbers, {target.numel()} of a sample"
    return f"classes of shape {list(target.shape)}"


def _samples_of(data: FederatedDataModule, client: int, split: Split) -> np.ndarray:
    """Returns the indices of a client's samples in a split, or in all of them."""
    splits = data.partition.splits
    if split != "all":
        return np.asarray(splits[split][client], np.int64)
    return np.unique(np.concatenate([np.asarray(one[client], np.int64) for one in splits.values()]))


def _numbers_of(theirs: Sequence[str], mine: Sequence[str]) -> Tensor:
    """Returns the number that each of other data's classes has in the run."""
    unknown = [name for name in theirs if name not in mine]
    if unknown:
        raise ConfigError(
            f"evaluate: --data: the class {unknown[0]!r} is none of the run's, which are "
            f"{', '.join(mine)}"
        )
    return torch.tensor([mine.index(name) for name in theirs])


def models_of(run: RestoredRun, clients: Sequence[int]) -> Iterator[Model]:
    """Yields the models of a run: the global one, and those of some clients."""
    method = run.model
    statistics = method.oracle.buffers.size > 0 and method.buffer_policy == "local"
    if method.has_global and not statistics:
        yield Model("global", None, global_network(method))
    unseen = set(method.unseen_clients.tolist())
    if has_own_models(method):
        for client in clients:
            kind = "personalized"
            if client in unseen:
                kind = "newcomer"
            yield Model(kind, client, client_network(method, client))
    for steps in run.datamodule.finetuning.steps:
        for client in clients:
            kind = f"finetuned/{steps}"
            if client in unseen:
                kind = f"unseen/{steps}"
            yield Model(kind, client, finetuned_network(method, client, steps))


def score(run: RestoredRun, network: nn.Module, sites: Sites) -> dict[str, np.ndarray]:
    """Returns accuracy, loss, count and metrics of a network on each client's samples, [n]."""
    runner = run.model.oracle.runner
    metrics = run.datamodule.metrics
    count = len(sites.names)
    series = sites.training_targets
    scores = ClientScores(count, metrics, series, sites.names.__getitem__, sites.own_unit)
    for site in range(len(sites.names)):
        for inputs, targets in sites.batches(site):
            outputs = network(inputs)
            _check_classes(runner, outputs, targets, sites.names[site])
            losses, correct = runner.scores(outputs, targets)
            counts = runner.target_counts(targets)
            if counts is None:
                counts = torch.ones(len(losses))
            owner = torch.full((len(losses),), site)
            scores.update(owner, losses * counts, correct * counts, counts)
            if metrics:
                scores.keep(np.array([site]), [runner.predicted(outputs, targets)])
        scores.finish()
    return scores.compute()


def _check_classes(runner: ModelRunner, outputs: Tensor, targets: Tensor, site: str) -> None:
    """Raises a ConfigError if a target of a client is a class for which there is no output."""
    if targets.is_floating_point():
        return
    known = targets[targets != runner.ignored]
    if len(known) and known.max() >= outputs.shape[1]:
        raise ConfigError(
            f"evaluate: --data: the class {int(known.max())} of client {site!r}; the run's models "
            f"know the classes 0 to {outputs.shape[1] - 1}"
        )


def evaluate(
    checkpoint: Path,
    out: Path | None = None,
    data: Path | None = None,
    split: Split | None = None,
    clients: Sequence[str] | None = None,
    metric: str | None = None,
) -> list[Path]:
    """Scores each model of a run on each client's samples; returns the files that it writes.

    `scores.csv` has a row for each model and client, `matrix.csv` and `matrix.png` one score: a row
    for each model, a column for each client. Fine-tuned models are those of the run's
    `loop.finetune`, trained on samples of the run.

    Args:
        checkpoint: The folder of a run, for its last checkpoint; or a checkpoint in it.
        out: The folder of the files; None: `evaluation` in the run's folder.
        data: A configuration file whose `data` have other clients, or other samples; None: the
            run's own. Its samples are read as the run has read its own: columns, levels, classes,
            and transforms with the run's numbers.
        split: Whose samples count: "train", "val", "test" or "all"; None: "all" of other data,
            "test" of the run's own.
        clients: Names or numbers of the clients whose models are scored; None: all.
        metric: The score of the matrix; None: the accuracy, or the loss where there is none.

    Raises:
        ConfigError: There is no such run, client or score, or the data do not fit the models.
    """
    run = RestoredRun(checkpoint, "evaluate")
    with run.models_in_use():
        known = ["accuracy", "loss", *run.datamodule.metrics.names]
        if metric is not None and metric not in known:
            raise ConfigError(f"evaluate: --metric: {metric}; it must be {' or '.join(known)}")
        other = None
        if data is not None:
            other = DataCLI(["fit", "--config", str(data)]).datamodule
        used: Split = split or ("test" if other is None else "all")
        sites = Sites(run, other, used)
        if not any(len(index) for index in sites.indices):
            raise ConfigError(f"evaluate: --split: {used}; no client has such a sample")
        chosen = list(range(run.datamodule.num_clients))
        if clients is not None:
            numbers = [run.number(client, "evaluate: --client", "") for client in clients]
            chosen = list(dict.fromkeys(numbers))  # who is given twice is scored once
        models = []
        scores = []
        for model in models_of(run, chosen):
            models.append(model._replace(network=nn.Identity()))  # its memory is free again
            scores.append(score(run, model.network, sites))
    kinds = list(dict.fromkeys(model.kind for model in models))
    order = sorted(range(len(models)), key=lambda place: kinds.index(models[place].kind))
    models = [models[place] for place in order]
    scores = [scores[place] for place in order]
    name = metric or _usual_score(scores)
    result = _Result(run, sites, models, scores, name)
    folder = out or run.folder / "evaluation"
    files.make_folder(folder, "evaluate: --out")
    result.write(folder)
    print(result.summary())
    paths = [folder / name for name in ("scores.csv", "matrix.csv", "matrix.png")]
    print(", ".join(map(str, paths)))
    return paths


def _usual_score(scores: Sequence[dict[str, np.ndarray]]) -> str:
    """Returns the accuracy, or the loss where there is none."""
    if all(np.isnan(one["accuracy"]).all() for one in scores):
        return "loss"
    return "accuracy"


class _Result:
    """The scores of models on the samples of clients, as files and as a table."""

    def __init__(
        self,
        run: RestoredRun,
        sites: Sites,
        models: Sequence[Model],
        scores: Sequence[dict[str, np.ndarray]],
        name: str,
    ) -> None:
        self._names = run.datamodule.datamodule.names_or_numbers
        self._sites = sites
        self._models = models
        self._scores = scores
        self._name = name

    def _owner(self, model: Model) -> str:
        if model.client is None:
            return ""
        return self._names[model.client]

    def write(self, folder: Path) -> None:
        """Writes `scores.csv`, `matrix.csv` and `matrix.png`."""
        rows: list[dict[str, Any]] = []
        matrix: list[dict[str, Any]] = []
        for model, scores in zip(self._models, self._scores, strict=True):
            named = {"model": model.kind, "client": self._owner(model)}
            for site, name in enumerate(self._sites.names):
                values = {what: scores[what][site] for what in scores if what != "count"}
                count = len(self._sites.indices[site])
                rows.append({**named, "site": name, "samples": count, **values})
            values = dict(zip(self._sites.names, scores[self._name], strict=True))
            matrix.append({**named, **{f"site {name}": value for name, value in values.items()}})
        files.write_records(folder / "scores.csv", rows)
        files.write_records(folder / "matrix.csv", matrix)
        labels = [f"{model.kind} {self._owner(model)}".strip() for model in self._models]
        shown = np.stack([scores[self._name] for scores in self._scores])
        figure = matrix_figure(shown, labels, self._sites.names, self._name)
        files.write_figure(folder / "matrix.png", draw(figure))

    def summary(self) -> str:
        """Returns a table: each kind of model on its own client's samples, and on all others'."""
        kinds: dict[str, tuple[list[float], list[float]]] = {}
        for model, scores in zip(self._models, self._scores, strict=True):
            own, others = kinds.setdefault(model.kind, ([], []))
            place = self._sites.own.get(self._owner(model))
            for site, value in enumerate(scores[self._name].tolist()):
                if np.isnan(value):
                    continue
                if model.client is not None and site == place:
                    own.append(value)
                else:
                    others.append(value)
        columns = [Column(f"{self._name} of"), Column("own client"), Column("other clients")]
        rows: list[list[Any]] = []
        for kind, parts in kinds.items():
            rows.append([kind, *(float(np.mean(part)) if part else None for part in parts)])
        return text(Table(columns, rows))
