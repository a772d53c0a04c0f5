"""Evaluation passes over all clients, and predictions of their models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.aggregation.attacks import Backdoor
from pfl.clients import Clients
from pfl.clients.view import OrderedSamples
from pfl.distributed.collectives import gather
from pfl.engines.threads import GROUP_FLOATS
from pfl.method import checks, exchange, statistics
from pfl.method.hooks import Method
from pfl.method.neighbours import neighbour_scores
from pfl.rounds.loop import FederatedLoop
from pfl.scores.evaluation import ClientScores, Scores, client_mean, in_order, row_scores, summarize
from pfl.scores.names import ScoreName
from pfl.stages.stage import Stage

BACKDOOR = "backdoor"  # the number of a score: how often a backdoor reaches its target class
POOL = 8192  # samples in one forward pass of one model
POOL_ON_GPU = 1024  # samples that fill a GPU in a network with convolutions
FLOATS_ON_GPU = 1 << 23  # of the inputs of smaller ones; feature maps take many times as much


class Evaluation:
    """Passes over all clients that collect the scores of each split and kind of model.

    The kinds are "global" and "personalized", "knn" with a local memory (`loop.neighbours`), and
    after k steps of fine-tuning "finetuned/<k>" of clients that train, "unseen/<k>" of clients that
    never train.

    Args:
        loop: The loop, which says who never trains and how models are fine-tuned.
        device: The device of the sums.
        stages: What acts on the messages that clients receive for the evaluation.

    Attributes:
        scores: What `ClientScores.compute` returned at the end of the last complete pass, by
            (split, kind).
        numbers: The sum of the sizes of this pass's personalized models, and their number.
    """

    def __init__(
        self, loop: FederatedLoop, device: torch.device, stages: Sequence[Stage] = ()
    ) -> None:
        self.loop = loop
        self.device = device
        self.finetuning = loop.finetuning
        self.unseen = loop.unseen_clients
        self.backdoor: Backdoor | None = None
        attackers = loop.participation.attackers
        if attackers is not None and isinstance(attackers.attack, Backdoor):
            self.backdoor = attackers.attack
        self._stages = stages
        self.scores: dict[tuple[str, str], dict[str, np.ndarray]] = {}
        self._metrics: dict[tuple[str, str], ClientScores] = {}
        self._used: dict[tuple[str, str], ClientScores] = {}
        self.begin(lambda clients: None)

    def __getstate__(self) -> dict[str, Any]:
        """Has the scores alone: a method that is copied leaves out its run."""
        return {"scores": self.scores}

    def begin(self, receive: Callable[[Clients], None]) -> None:
        """Starts a pass; `scores` keeps the previous scores until the pass is finished.

        Args:
            receive: Gives clients what they receive for the evaluation.
        """
        # The metrics of the previous pass are used again. A `Metric` holds reference cycles, so
        # dropped ones, with several numbers for every client, would survive until the next garbage
        # collection.
        self._used |= self._metrics
        self._metrics = {}
        self.numbers = np.zeros(2)
        self._global_numbers: int | None = None
        self._shared: dict[str, int] = {}  # the client whose score is everyone's, by split
        self._receive = receive

    def update(self, algorithm: Method, clients: Clients) -> None:
        """Scores a chunk of clients with the kinds of model that the algorithm has."""
        if len(attackers := self.loop.participation.attacker_ids):
            clients = clients.rows(np.flatnonzero(~np.isin(clients.ids, attackers)))
        self._receive(clients)
        newcomers = clients
        if len(self.unseen):
            new = np.isin(clients.ids, self.unseen)
            newcomers, clients = (clients.rows(np.flatnonzero(rows)) for rows in (new, ~new))
        if algorithm.has_global:
            self._global_numbers = algorithm.global_size()
        self._score_models(clients.split, algorithm, clients)
        if self.backdoor is not None and clients.split == "test":
            self._score_models(BACKDOOR, algorithm, _with_backdoor(self.backdoor, clients))
        if self.finetuning.steps or self.loop.neighbours:
            self._score_adapted("finetuned", self.finetuning.steps, algorithm, clients)
        if len(self.unseen):
            self._score_adapted("unseen", self.finetuning.for_unseen, algorithm, newcomers)

    def finish(self) -> dict[str, float]:
        """Returns all reported numbers, named `<split>/<kind>/<number>`.

        Every process must call it.
        """
        row: dict[str, float] = {}
        self.scores = {key: metric.compute() for key, metric in self._metrics.items()}
        for split, kind in [key for key in self.scores if key[0] == BACKDOOR]:
            success = self.scores.pop((split, kind))["accuracy"]
            self.scores["test", kind][BACKDOOR] = success
            known = success[~np.isnan(success)]
            row |= client_mean(ScoreName("test", kind, BACKDOOR), known) if len(known) else {}
        for (split, kind), scores in self.scores.items():
            for name, value in summarize(scores, self.loop.metrics.higher_is_better).items():
                row[str(ScoreName(split, kind, name))] = value
        if self._global_numbers is not None:  # a sparse model may have 0 numbers
            row["parameters/global"] = self._global_numbers
        if any(kind == "personalized" for _, kind in self._metrics):
            total, models = np.sum(gather(self.numbers), axis=0)
            if models:  # parties may tell none
                row["parameters/personalized"] = float(total / models)
        return row

    def _metric(self, split: str, kind: str) -> ClientScores:
        if (split, kind) not in self._metrics:
            metric = self._used.pop((split, kind), None)
            if metric is None:
                metric = ClientScores(
                    self.loop.num_clients,
                    self.loop.metrics,
                    self.loop.training_targets,
                    self.loop.name_of,
                    self.loop.own_unit,
                ).to(self.device)
            metric.reset()
            metric.update(*torch.zeros(4, 0, dtype=torch.int64))  # a process may have no clients
            self._metrics[split, kind] = metric
        return self._metrics[split, kind]

    def _score_models(self, name: str, algorithm: Method, clients: Clients) -> None:
        """Scores the global and the personalized models, under the name of a split."""
        if algorithm.has_global:
            runner = algorithm.oracle.runner
            has_own_statistics = runner.buffers.size and algorithm.buffer_policy == "local"
            if has_own_statistics or runner.has_batch_norm_in_evaluation:
                self.score_own(name, "global", algorithm, clients)
            else:
                self._score_global(name, algorithm, clients)
        if algorithm.has_personalized:
            self.score_own(name, "personalized", algorithm, clients)

    def score_own(self, name: str, kind: str, algorithm: Method, clients: Clients) -> None:
        """Scores every client's own model, or the global model on each client's samples alone."""
        metric = self._metric(name, kind)
        keep = bool(self.loop.metrics)

        def score(group: Clients) -> tuple[list[float], list[Scores]]:
            with algorithm.in_full_precision():
                exchange.begin(algorithm, self._stages, group)
                numbers = [0.0, 0.0]
                if kind == "global":
                    w = algorithm.global_model.expand(len(group), -1)
                else:
                    w = algorithm.personalized(group)
                    where = f"{type(algorithm).__name__}.personalized"
                    checks.check_models(where, w, group, algorithm)
                    total = algorithm.parameters_personalized(group, w).sum()
                    numbers = [float(total), float(len(group))]
                scored = statistics.of_model(kind, algorithm, group)
                return numbers, list(row_scores(algorithm.oracle, scored, w, keep))

        size = clients_in_group(algorithm, clients)
        for _, (numbers, parts) in algorithm.groups.run(clients, score, size, "evaluation"):
            self.numbers += numbers
            for part in parts:
                metric.add(part)
            metric.finish()

    def _score_adapted(
        self, kind: str, steps: Sequence[int], algorithm: Method, clients: Clients
    ) -> None:
        """Scores models after several numbers of local steps, and with `loop.neighbours`."""
        names = {f"{kind}/{k}": k for k in steps}
        remembers = kind == "finetuned" and self.loop.neighbours is not None
        metrics = {n: self._metric(clients.split, n) for n in [*names, *["knn"] * remembers]}
        if not len(clients):  # every process has the same kinds of scores
            return
        keep = bool(self.loop.metrics)
        begin = algorithm.adaptation_start
        if kind == "unseen":
            begin = algorithm.newcomer
        first = statistics.kind_evaluated(algorithm, unseen=kind == "unseen")
        rate = self.finetuning.lr or algorithm.learning_rate(algorithm.rounds)

        def score(group: Clients) -> dict[str, list[Scores]]:
            with algorithm.in_full_precision():
                exchange.begin(algorithm, self._stages, group)
                start = begin(group)
                group = statistics.of_model(first, algorithm, group)
                scores = {}
                if remembers:
                    scores["knn"] = list(neighbour_scores(algorithm, group, start, keep))
                for model, k in names.items():
                    adapted = replace(group)  # a copy has running statistics of its own
                    v = algorithm.adapt(adapted, start, steps=k, lr=rate)
                    scores[model] = list(row_scores(algorithm.oracle, adapted, v, keep))
                return scores

        size = clients_in_group(algorithm, clients)
        for _, scores in algorithm.groups.run(clients, score, size, "evaluation"):
            for model, parts in scores.items():
                for part in parts:
                    metrics[model].add(part)
                metrics[model].finish()

    def _score_global(self, name: str, algorithm: Method, clients: Clients) -> None:
        metric = self._metric(name, "global")
        if not len(clients):
            return
        # The scale of a forecast's error is the client's own.
        if not clients.data.shared(clients.split) or self.loop.metrics.read_series:
            _score_pooled(metric, algorithm, clients)
            return
        # All clients have the same samples and the same model: the first client's score is every
        # client's score.
        ids = clients.ids
        if name not in self._shared:
            self._shared[name], ids = int(ids[0]), ids[1:]
            _score_pooled(metric, algorithm, replace(clients, ids=clients.ids[:1]))
        metric.copy(self._shared[name], torch.from_numpy(ids))


def _with_backdoor(attack: Backdoor, clients: Clients) -> Clients:
    """Returns clients whose test samples have a backdoor's mark and, as their class, its target."""
    data = clients.data.with_backdoor(attack.add_trigger, attack.target)
    order = np.argsort(-data.sizes("test", clients.ids), kind="stable")
    return replace(clients.rows(order), data=data)


def _score_pooled(metric: ClientScores, algorithm: Method, clients: Clients) -> None:
    """Scores the global model on the pooled samples of all these clients, piece by piece."""
    oracle = algorithm.oracle
    w = algorithm.global_model
    clients = replace(in_order(oracle, clients), ids=np.sort(clients.ids))
    data = clients.data
    buffers = algorithm.global_buffers if oracle.buffers.size else None
    keep = bool(metric.metrics)

    def score(piece: tuple[np.ndarray, Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        with algorithm.in_full_precision():
            inputs, targets = data.gather(piece[1], w.dtype, clients.ids[piece[0]])
            losses, correct, outputs = oracle.evaluate_one(w, inputs, targets, buffers)
            predicted = oracle.runner.predicted(outputs.cpu(), targets.cpu()) if keep else ()
            counts = oracle.runner.target_counts(targets)
            if counts is None:
                return (losses, correct, torch.ones(len(losses))), predicted
            return (losses * counts, correct * counts, counts), predicted

    pieces = list(clients.pooled(_samples_at_once(algorithm, clients)))
    scored = algorithm.groups.threads.map(score, pieces)
    for (owners, _), (sums, predicted) in zip(pieces, scored, strict=True):
        ids = clients.ids[owners]
        metric.update(torch.from_numpy(ids), *sums)
        if keep:
            firsts = np.flatnonzero(np.diff(owners, prepend=-1))  # a client's first sample
            parts = (values.tensor_split(firsts[1:].tolist()) for values in predicted)
            metric.keep(ids[firsts], zip(*parts, strict=True))
            metric.finish(but=int(ids[-1]))
    metric.finish()


def clients_in_group(algorithm: Method, clients: Clients) -> int:
    """Returns how many clients a group has.

    On a CPU a group is a thread's share, or less if models and samples would exceed 32 MiB.
    """
    if algorithm.device.type != "cpu" or not len(clients):
        return max(1, len(clients))
    inputs = clients.sizes.mean() * math.prod(clients.data.samples.input_shape)
    share = -(-len(clients) // algorithm.groups.threads.count)
    return max(1, min(share, int(8 * GROUP_FLOATS / (algorithm.space.size + inputs))))


def _samples_at_once(algorithm: Method, clients: Clients) -> int:
    """Returns how many samples one forward pass has; on a CPU as many as the cache holds.

    Samples in order, of which none is copied, have a thread's share in a pass through linear
    layers, or one pass where that takes a few milliseconds, as long as threads wait for each other.
    """
    if algorithm.device.type != "cpu":
        size = math.prod(clients.data.samples.input_shape)
        return max(POOL_ON_GPU, FLOATS_ON_GPU // max(1, size))
    number = int(clients.sizes.sum())
    engine = algorithm.oracle.engine
    share = -(-number // algorithm.groups.threads.count)
    fit = POOL
    if not (engine.batched and isinstance(clients.data.samples, OrderedSamples)):
        fit = engine.samples_at_once(math.prod(clients.data.samples.input_shape))
    elif number * algorithm.space.size < 64 * GROUP_FLOATS:
        share = number
    return max(1, min(POOL, share, fit))


def _give_newcomers_models(
    algorithm: Method, clients: Clients, w: dict[str, Tensor], own: dict[str, Clients]
) -> None:
    """Gives clients that never train the first models of newcomers, as their personalized ones.

    Args:
        algorithm: The method.
        clients: The clients.
        w: Their models [C, P], by kind.
        own: The clients with the running statistics of these models, by kind.
    """
    rows = np.flatnonzero(np.isin(clients.ids, algorithm.unseen_clients))
    if not len(rows):
        return
    newcomers = clients.rows(rows)
    places = torch.from_numpy(rows).to(algorithm.device)
    w["personalized"] = w["personalized"].clone()
    w["personalized"][places] = algorithm.newcomer(newcomers)
    kind = statistics.kind_evaluated(algorithm, unseen=True)
    buffers = own["personalized"].buffers
    first = statistics.of_model(kind, algorithm, newcomers).buffers
    if buffers is not None and first is not None:
        buffers = buffers.clone()
        buffers[places] = first
        own["personalized"] = replace(own["personalized"], buffers=buffers)


def predictions(
    algorithm: Method, clients: Clients, server: Method | None = None
) -> dict[str, np.ndarray]:
    """Returns the predicted class (labels, value) of every sample of some clients, a row a sample.

    Args:
        algorithm: The method that has the clients' network.
        clients: The clients, with their states and what they have received.
        server: The method that has the global model; None: the same one.

    Returns:
        The columns `client`, `sample` (its index in the data set), `target`, and `global` and
        `personalized` if the algorithm has such a model; of clients that never train this is the
        first model of newcomers.
    """
    columns: dict[str, list[np.ndarray]] = {}
    own_unit = algorithm.run.loop.own_unit

    def unit(owners: np.ndarray, values: Tensor) -> np.ndarray:
        """Returns values [n, ...] of samples in the unit of the targets of those who own them."""
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        parts = values.cpu().tensor_split(firsts[1:].tolist())
        whose = clients.ids[owners[firsts]].tolist()
        return torch.cat([own_unit(c, part) for c, part in zip(whose, parts, strict=True)]).numpy()

    w = {}
    own = {}
    oracles = {"personalized": algorithm.oracle}
    if algorithm.has_global:
        server = server or algorithm
        w["global"] = server.global_model.expand(len(clients), -1)
        own["global"] = statistics.of_model("global", server, clients)
        oracles["global"] = server.oracle
    if algorithm.has_personalized:
        adapted = replace(clients)  # `personalized` may replace running statistics
        w["personalized"] = algorithm.personalized(adapted)
        own["personalized"] = statistics.of_model("personalized", algorithm, adapted)
        _give_newcomers_models(algorithm, clients, w, own)
    for owners, index in clients.pooled(POOL):
        inputs, targets = clients.data.gather(index, clients.dtype, clients.ids[owners])
        values = {"client": clients.ids[owners], "sample": index.cpu().numpy()}
        values["target"] = unit(owners, targets)
        for kind, models in w.items():
            outputs = []
            all_buffers = own[kind].buffers
            for c in np.unique(owners):
                buffers = None if all_buffers is None else all_buffers[c]
                mine = torch.from_numpy(np.flatnonzero(owners == c)).to(inputs.device)
                outputs.append(oracles[kind].predict(models[c], inputs[mine], buffers))
            decided = algorithm.oracle.runner.decisions(torch.cat(outputs), targets)
            values[kind] = unit(owners, decided)
        for name, column in values.items():
            columns.setdefault(name, []).append(column)
    return {name: np.concatenate(parts) for name, parts in columns.items()}
