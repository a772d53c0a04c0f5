"""What PFLlib computes instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax, mse_loss, normalize

from benchmarks.agreement.problem import BATCH, COHORTS, started
from benchmarks.agreement.readings.common import by_samples, call, stepped
from pfl.algorithms import (
    APFL,
    APPLE,
    FML,
    GPFL,
    FedALA,
    FedBABU,
    FedCP,
    FedDBE,
    FedDistill,
    FedDyn,
    FedFomo,
    FedGH,
    FedKD,
    FedLC,
    FedProto,
    FedRoD,
)
from pfl.method import (
    Clients,
    FederatedAlgorithm,
    Message,
    Objective,
    dense,
    features,
    label_counts,
    values_in,
)


class NormFedDyn(FedDyn):
    """The proximal term is α/2 |θ - θ^t| without the square; its gradient at θ^t is 0."""

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        g, lr = clients.state["g"], self.learning_rate(clients.round)
        v = w.repeat(len(clients), 1)
        for batch in clients.batches(self.local_schedule):
            _, gradient = self.oracle.gradient(v, batch, clients.buffers)
            away = v - w
            pull = self.alpha / 2 * away / away.norm(dim=1, keepdim=True).clamp_min(1e-300)
            v[: batch.clients] -= lr * (gradient - g + pull)[: batch.clients]
        clients.state["g"] = g - self.alpha * (v - w)
        return v


class StoredMixtureAPFL(by_samples(APFL)):  # type: ignore[misc]
    """v_i takes steps of rate η at v_i itself; α_i changes in every step, with mixed gradients.

    After the local steps the mixture replaces v_i.
    """

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        lr, alpha = self.learning_rate(clients.round), clients.state["alpha"].clone()
        shared, own = w.repeat(len(clients), 1), clients.state["v"].clone()
        for batch in clients.batches(self.local_schedule):
            rows = slice(0, batch.clients)
            _, g_w = self.oracle.gradient(shared, batch, clients.buffers)
            shared[rows] -= lr * g_w[rows]
            _, g_v = self.oracle.gradient(own, batch, clients.buffers)
            own[rows] -= lr * g_v[rows]
            mixed = alpha * g_v + (1 - alpha) * g_w
            slope = ((own - shared) * mixed).sum(1, keepdim=True) + 0.02 * alpha
            alpha[rows] = (alpha - lr * slope).clamp(0.0, 1.0)[rows]
        clients.state["alpha"] = alpha
        clients.state["v"] = alpha * own + (1 - alpha) * shared
        return shared

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["v"]


class AliasedFedGH(FedGH):
    """The server's head is the head of client 0, which that client's local steps move."""

    trained: Tensor | None = None

    def local_sgd(self, clients: Clients, start: Tensor, **kwargs: Any) -> Tensor:
        v = super().local_sgd(clients, start, **kwargs)
        for row in (clients.ids == 0).nonzero()[0]:
            self.trained = v[row]
        return v

    def server_update(self, mean: dict[str, Tensor]) -> None:
        if self.trained is not None:
            head = ~self.personal_part
            self.global_model[head] = self.trained[head]
            self.trained = None
        super().server_update(mean)


class OwnBodyFedBABU(FedBABU):
    """Fine-tuning begins at the model that the client had last, not at the newest global one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_client_state("last", lambda: self.global_model)
        self.add_client_state("rounds", lambda: self.global_model.new_zeros(1))
        self.add_server_state("old", self.global_model.clone())

    old: Tensor

    def download(self) -> dict[str, Tensor | Message]:  # type: ignore[override]
        return {"w": super().download(), "old": self.old}

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        sent = super().client_update(clients, w)
        clients.state["last"] = torch.where(self.head, w, sent.values)
        clients.state["rounds"] = torch.full_like(clients.state["rounds"], clients.round + 1)
        return sent

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.old.copy_(self.global_model)
        super().server_update(mean)

    def personalized(self, clients: Clients) -> Tensor:
        in_last_round = clients.state["rounds"] == clients.round
        return torch.where(in_last_round, clients.state["last"], clients.received["old"])


class GlobalStart(FedBABU):
    """FedBABU whose personalized models are those before fine-tuning."""

    def personalized(self, clients: Clients) -> Tensor:
        return clients.received["w"].repeat(len(clients), 1)


class CopiedHeadFedRoD(FedRoD):
    """The personal head begins as a copy of the first head."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.states.declare("head", lambda: self.global_model[self.personal_part])


class EveryoneMixes(FedALA):
    """All clients mix their models with the new one and learn weights; a cohort trains."""

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:  # type: ignore[override]
        v = self._mixed(clients, w, self._learned_weights(clients, w))
        trains = torch.from_numpy(np.isin(clients.ids, COHORTS[clients.round]))
        v = torch.where(trains[:, None], self.local_sgd(clients, v), v)
        clients.state["own"] = values_in(self.personal_part, v)
        return {"w": replace(dense(v), reduce="rows")}

    def server_update(self, received: dict[str, Tensor]) -> None:
        ids = list(COHORTS[self.rounds])
        weights = torch.from_numpy(self.client_sizes[ids]).to(self.global_model)
        self.global_model.copy_(weights @ received["w"][ids] / weights.sum())


class PooledFedLC(FedLC):
    """n_i,c counts the samples of all clients, and its root is in single precision."""

    pooled_counts: Tensor

    def check_setup(self) -> None:
        super().check_setup()
        everyone = Clients(self.population[self.client_sizes.argsort()[::-1]], 0, self._data())
        assert self.classes is not None
        counts = label_counts(everyone, self.classes, self.global_model)
        self.pooled_counts = counts.sum(0, keepdim=True)

    def _data(self) -> Any:
        return self.run.loop.client_data(self.device)

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        margins = self.calibration * self.pooled_counts.float() ** -0.25
        own = {"margins": margins.to(w).expand(len(clients), -1)}
        return self.local_sgd(clients, w, objective=Objective(self._losses, own))


def starting_mean(mean: np.ndarray) -> type[FederatedAlgorithm]:
    """FedDBE with a mean of features that is known before the first round."""

    class StartingMean(FedDBE):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.mean.copy_(torch.from_numpy(mean))

    return StartingMean


class RunningFedProto(FedProto):
    """Class means are those of the features that the moving model had in training.

    They are averaged over clients, not samples, and only the last cohort's are known.
    """

    def begin_step(self, sizes: np.ndarray, step: int, sums: Tensor) -> None:
        """Does nothing with the sums [C, K, 1 + F] of features of each class so far."""

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        received = clients.received["prototypes"].view(self.shape)
        objective = Objective(
            self._losses, {"prototypes": received.expand(len(clients), *self.shape)}
        )
        v, lr = clients.state["w"].clone(), self.learning_rate(clients.round)
        sums = v.new_zeros(len(clients), *self.shape)
        for step, batch in enumerate(clients.batches(self.local_schedule)):
            rows = slice(0, batch.clients)
            self.begin_step(clients.sizes[rows], step, sums[rows])
            z = features(self.oracle, v[rows], batch, clients.buffers)
            real = batch.sample_weights(z.dtype) > 0
            member = real[..., None] * torch.nn.functional.one_hot(batch.targets, self.shape[0])
            sums[rows, :, 0] += member.sum(1)
            sums[rows, :, 1:] += member.to(z).mT @ z
            _, g = self.oracle.gradient(v, batch, clients.buffers, objective=objective)
            v[rows] -= lr * g[rows]
        clients.state["w"] = v
        means = sums / sums[..., :1].clamp_min(1)  # each client counts once for its classes
        return {"sums": dense(means.flatten(1))}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.prototypes.zero_()
        super().server_update(mean)


class LastEpochFedProto(RunningFedProto):
    """Class means are those of the last local epoch."""

    def begin_step(self, sizes: np.ndarray, step: int, sums: Tensor) -> None:
        """Forgets the sums of clients that begin with an epoch."""
        begins = step % np.ceil(sizes / BATCH) == 0
        sums[torch.from_numpy(begins)] = 0


class ScoresFedDistill(FedDistill):
    """Scores before the softmax are averaged, and stand for probabilities in the cross entropy.

    They are those of the moving model in training. All clients of the last round teach, each as
    much for a class that it has; of a class without teachers a model's own scores are the target.
    """

    def begin_round(self, round_index: int) -> None:
        self._ids = self.cohort(round_index)
        rows = self.kept_rows("means", self._taught_by).unflatten(1, self.shape)
        count = rows[..., :1].sum(0)
        means = torch.cat([count, rows[..., 1:].sum(0)], 1) / count.clamp_min(1)
        self._teachers = means.repeat(len(self._ids), 1, 1)
        self._taught_by = self._ids

    _taught_by = np.arange(0)

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        teachers = clients.received["teachers"].unflatten(1, self.shape)
        sums = torch.zeros_like(teachers)

        def loss(at: Tensor, x: Tensor, y: Tensor, row: int) -> Tensor:
            scores = call(self, at, "", x)
            member = torch.nn.functional.one_hot(y, self.shape[0]).to(scores)
            sums[row, :, :1] += member.sum(0)[:, None]
            sums[row, :, 1:] += member.T @ scores.detach()
            value = cross_entropy(scores, y)
            if clients.round == 0:
                return value
            known = teachers[row, y, :1] > 0
            targets = torch.where(known, teachers[row, y, 1:], scores.detach())
            return value + self.penalty * cross_entropy(scores, targets)

        v = stepped(self, clients, clients.state["w"], loss)
        clients.state["w"] = v
        has = (sums[..., :1] > 0).to(v)
        means = sums[..., 1:] / sums[..., :1].clamp_min(1)
        return {"means": self._of_classes(torch.cat([has, means], 2))}


def unheld(scores: Tensor, others: Tensor) -> Tensor:
    """KL(softmax(others) || softmax(scores)), a mean over samples and classes; neither is held."""
    return kl_div(log_softmax(scores, 1), others.softmax(1))


class SummedFML(FML):
    """Both networks descend on the sum of both losses; the divergence is a mean over classes, too.

    Messengers are averaged with equal weights.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weighting = "uniform"

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        def loss(at: Tensor, x: Tensor, y: Tensor, row: int) -> Tensor:
            mine, others = call(self, at, "own", x), call(self, at, "messenger", x)
            own = self.alpha * cross_entropy(mine, y) + (1 - self.alpha) * unheld(mine, others)
            other = self.beta * cross_entropy(others, y) + (1 - self.beta) * unheld(others, mine)
            return own + other

        return self.keep_and_send(clients, stepped(self, clients, self.personalized(clients), loss))


class SummedFedKD(FedKD):
    """Both networks descend on the sum of both losses, in which nothing is held.

    The losses in the denominators are means of the mini-batch. Values, not changes, have low rank:
    those of each client's messenger, and again those of their plain mean. A matrix that would need
    all of its singular values becomes 0. The energy of the round is that of the one before.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weighting = "uniform"

    def energy(self, round_index: int) -> float:
        return super().energy(round_index - 1)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        def loss(at: Tensor, x: Tensor, y: Tensor, row: int) -> Tensor:
            z, h = call(self, at, "own.body", x), call(self, at, "messenger.body", x)
            mine, others = call(self, at, "own.head", z), call(self, at, "messenger.head", h)
            both = cross_entropy(mine, y) + cross_entropy(others, y)
            apart = mse_loss(call(self, at, "projection", h), z)
            return both + (unheld(mine, others) + unheld(others, mine) + 2 * apart) / both

        v = stepped(self, clients, self.personalized(clients), loss)
        message = self.keep_and_send(clients, v)
        return replace(message, values=self._cut(message.values, self.energy(clients.round)))

    def server_update(self, mean: dict[str, Tensor]) -> None:
        super().server_update({"w": self._cut(mean["w"][None], self.energy(self.rounds))[0]})

    def _cut(self, values: Tensor, energy: float) -> Tensor:
        values = values.clone()
        for layer in self.space.layers:
            if self.personal_part[layer.start] or layer.matrix_shape is None:
                continue
            left, s, right = torch.linalg.svd(
                layer.to_matrix(values[:, layer.span]), full_matrices=False
            )
            for row in range(len(values)):
                sums = s[row].square().cumsum(0)
                enough = (sums[:-1] > energy * sums[-1]).nonzero()
                rank = int(enough[0]) + 1 if len(enough) else 0
                s[row, rank:] = 0
            values[:, layer.span] = layer.from_matrix(left * s[:, None] @ right)
        return values


def at_start(kind: type[FederatedAlgorithm], *patterns: str) -> type[FederatedAlgorithm]:
    """The method with given first values of some parts, by patterns of their names."""

    class Started(kind):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for number, pattern in enumerate(patterns):
                mask = self.space.mask([pattern])
                values = torch.from_numpy(started(int(mask.sum()), number))
                self.global_model[mask] = values

    return Started


class OldConditionsGPFL(at_start(GPFL, "valve.*", "vectors")):  # type: ignore[misc]
    """Conditions are those of the E_i that the client had before it received E, and 0 at first.

    The third term is λ times the root of the sum of squares over all samples of a mini-batch.
    """

    previous: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_client_state("last", lambda: self.global_model[self.vectors_span])
        self.add_client_state("rounds", lambda: self.global_model.new_zeros(1))
        self.add_server_state("previous", self.global_model[self.vectors_span].clone())

    def download(self) -> dict[str, Tensor | Message]:
        return {"w": super().download(), "previous": self.previous}

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        v = self.personalized(clients)
        received = self._vectors(w)
        common, own = v[:, self.common_span].clone(), v[:, self.personal_span].clone()

        def loss(at: Tensor, x: Tensor, y: Tensor, row: int) -> Tensor:
            z = call(self, at, "body", x)
            vectors = self._vectors(at)
            near = call(self, at, "valve", z, common[row])
            scores = call(self, at, "head.own", call(self, at, "valve", z, own[row]))
            cosines = linear(normalize(near), normalize(vectors))
            away = near - received[y]
            decay = self.shared_decay / 2 * at[self.shared].square().sum()
            value = cross_entropy(scores, y) + cross_entropy(cosines, y)
            return value + self.penalty * away.norm() + decay

        v = stepped(self, clients, v, loss)
        clients.state["last"] = v[:, self.vectors_span]
        clients.state["rounds"] = torch.full_like(clients.state["rounds"], clients.round + 1)
        return self.keep_and_send(clients, v)

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.previous.copy_(self.global_model[self.vectors_span])
        super().server_update(mean)

    def personalized(self, clients: Clients) -> Tensor:
        v = super().personalized(clients)
        shares = v[:, self.personal_span]
        in_last = clients.state["rounds"] == clients.round
        last = torch.where(in_last, clients.state["last"], clients.received["previous"])
        last = last.unflatten(1, (self.classes, self.width)) * (clients.round > 0)
        counts = label_counts(clients, self.classes, v)
        shares = counts / counts.sum(1, keepdim=True)
        v[:, self.common_span] = last.mean(1)
        v[:, self.personal_span] = (shares[..., None] * last).sum(1)
        return v


class CohortsFedCP(at_start(FedCP, "policy.*")):  # type: ignore[misc]
    """A client has the π and h of the end of the last round that it was in."""

    table: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.known = self.space.mask(["head.common.*", "policy.*"])
        first = self.global_model[self.known]
        self.add_server_state("table", lambda: first.repeat(self.num_clients, 1))

    def download(self) -> dict[str, Tensor | Message]:
        return {"w": super().download(), "table": self.table.flatten()}

    def personalized(self, clients: Clients) -> Tensor:
        v = super().personalized(clients)
        table = clients.received["table"].unflatten(0, (-1, int(self.known.sum())))
        v[:, self.known] = table[torch.from_numpy(clients.ids)]
        return v

    def server_update(self, mean: dict[str, Tensor]) -> None:
        super().server_update(mean)
        self.table[torch.from_numpy(self.participant_ids)] = self.global_model[self.known]


class OwnAmongFedFomo(FedFomo):
    """A client's own model is one of the M, and begins with an affinity of 1; nothing is explored.

    A client keeps w_i where no model lowers its loss. Distances have 0.00001 more. Models of
    clients that never took part are sent, too: as many as the last round had clients.
    """

    def _no_affinity(self) -> Tensor:
        return torch.eye(self.num_clients, dtype=self.global_model.dtype)

    @property
    def most(self) -> int:
        return self.models

    def begin_round(self, round_index: int) -> None:
        self._ids = self.cohort(round_index)
        count = 0
        if round_index:
            count = self.most
        self._partners = np.full((len(self._ids), self.most), -1)
        for row, client in enumerate(self._ids):
            self._partners[row, :count] = torch.topk(self.affinity[client], count).indices
        self._sent = np.unique(self._partners[self._partners >= 0])
        self._models = self.kept_rows("w", self._sent)

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        start = clients.state["start"]
        models = clients.received["models"].view(len(clients), self.most, -1)
        before = self._losses(clients, start)
        weights = models.new_zeros(len(clients), self.most)
        if clients.round:
            for n in range(self.most):
                gain = before - self._losses(clients, models[:, n])
                weights[:, n] = gain / ((models[:, n] - start).norm(dim=1) + 1e-5)
        shares = weights.clamp_min(0)
        total = shares.sum(1, keepdim=True)
        mixed = (shares / total.where(total > 0, 1))[:, None] @ models
        begin = torch.where(total > 0, mixed[:, 0], clients.state["w"])
        v = self.local_sgd(clients, begin)
        clients.state["start"] = begin
        clients.state["w"] = v
        return {"w": dense(v), "weights": replace(dense(weights), reduce="rows")}


class InTurnAPPLE(APPLE):
    """Clients train one after the other, with the cores that those before them have changed.

    p_i begins as 1/N, η is multiplied by N, and the slope of p_ij is a mean of means over layers,
    after the step of c_i. w_i, before the last step, takes the place of c_i. λ is that of the round
    before, and 1 in the first.
    """

    def penalty_of(self, round_index: int) -> float:
        return super().penalty_of(max(0, round_index - 1))

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        count, lr = self.num_clients, count_rate(self, clients.round)
        cores = clients.received["cores"].view(count, self.space.size).clone()
        shares = clients.received["shares"]
        pull = self.penalty_of(clients.round)
        own = clients.state["w"].clone()
        change = clients.state["change"].clone()
        if clients.round == 0:
            change += 1 / count - shares
        for row in np.argsort(clients.ids):
            i = int(clients.ids[row])
            for batch in clients.rows(np.array([row])).batches(self.local_schedule):
                p = shares + change[row]
                own[row] = p @ cores
                _, gradient = self.oracle.gradient(own[row][None], batch, None)
                g = gradient[0]
                cores[i] -= lr * p[i] * g
                products = torch.stack(
                    [(g * cores)[:, layer.span].mean(1) for layer in self.space.layers]
                )
                change[row] -= self.relationship_lr * (products.mean(0) + pull * change[row])
        clients.state["core"] = own
        clients.state["change"] = change
        clients.state["w"] = own
        return {"core": dense(own)}


def count_rate(method: FederatedAlgorithm, round_index: int) -> float:
    """The rate of local steps times the number of clients."""
    return method.learning_rate(round_index) * method.num_clients
