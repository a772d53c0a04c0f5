"""FedDF.

Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning",
NeurIPS 2020.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pfl.method import (
    BatchSamples,
    Clients,
    Count,
    CountOrZero,
    FederatedAlgorithm,
    FederatedDataModule,
    LocalSchedule,
    Message,
    Network,
    Objective,
    Positive,
    PublicSamples,
    batch_for,
    dense,
    divergence,
    public_batches,
    require_classes,
)


class FedDF(FederatedAlgorithm):
    """FedAvg whose server then distils the clients' models into the mean (Algorithms 1 and 3).

    w_i <- w - η g_i(w), local steps from the received w;
    w <- sum_S n_i w_i / sum_S n_i;
    w <- w - η_s Adam's direction of ∇ mean_x KL(softmax(s̄(x)) || softmax(s(x; w))), for
    `server_steps` mini-batches of n public inputs x, which are drawn anew for each round, with the
    mean s̄(x) of the scores s(x; w_i) of all clients of the round (AVGLOGITS). Adam begins anew in
    each round, and step k of N has the rate η_s (1 + cos(π k / N)) / 2.

    Where clients have networks of their own (`pfl.models.Family`, Algorithm 3), the server has a
    model of each network: the mean of the clients that have it, or the last one if none of the
    round has it, into which the scores s̄ of the clients of all networks are distilled. Networks
    that are copies of the first one share its model.

    Evaluated: w; of a family the first network's w, and for each client that of its network.
    Shared: w. Personal: nothing. Cost: P values down, P up. No client state. Server state: of a
    family the other networks' models. A newcomer has w, or that of its network.

    Args:
        public: A data module; the training samples of all of its clients are the public inputs.
            The server has them, and no client.
        public_samples: n, or all inputs if there are fewer.
        server_steps: N. 0: FedAvg.
        server_batch_size: Inputs in a step of the server.
        server_lr: η_s.

    Note:
        The server gets each model by itself, so that rules in place of the mean, compression and
        `loop.privacy` are refused; real parties (`pfl deploy`) take one network, which the server
        must build. A sample has one class; regression and several labels are refused. Public
        inputs have the shape of the clients'; their targets are not read.
        Running statistics of BatchNorm are averaged as w is, each w_i has its own ones at the
        server, and the steps of the server do not move them; a family takes GroupNorm.
        The print was not at hand: written from the authors' code
        (epfml/federated-learning-public-code), where N is at most 10,000, with the mini-batches of
        128 and the rate 0.001 that are the defaults here. Differences: there distilling ends once
        an accuracy on labelled validation samples of the server has not risen for 2,000 steps, and
        the best model is taken; steps go over all public inputs; and running statistics move with
        the steps. DROPWORST, models of earlier rounds in the ensemble, SWAG, generated inputs and
        low precision are left out.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> from pfl.models import MLP
        >>> method = FedDF(MLP(64, (8,)), public=DigitsDataModule(num_clients=1), server_steps=50)
        >>> method.download().nbytes // 4  # 64 * 8 + 8 + 8 * 10 + 10
        610
    """

    reads_other_samples = True  # whose frozen features are not stored

    def __init__(
        self,
        network: Network,
        *,
        public: FederatedDataModule,
        public_samples: Count = 1000,
        server_steps: CountOrZero = 100,
        server_batch_size: Count = 128,
        server_lr: Positive = 0.001,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, server_optimizer=None, buffers="average", **kwargs)
        self.public = PublicSamples(public, public_samples)
        self.server_steps = server_steps
        self.server_batch_size = server_batch_size
        self.server_lr = server_lr

    @property
    def has_personalized(self) -> bool:  # type: ignore[override]
        """Whether clients have networks of their own, and so models of their own."""
        return self.family is not None

    @property
    def personalization_penalty(self) -> float | None:
        """That of FedAvg without steps of the server; None: distilling has another limit."""
        if self.server_steps:
            return None
        return super().personalization_penalty

    def check_setup(self) -> None:
        require_classes(self)

    def begin_round(self, round_index: int) -> None:
        """Refuses public inputs that the network cannot take; parties never load any."""
        self.public.check(self)

    # ---- what travels --------------------------------------------------------------------------

    def download(self) -> Message | dict[str, Message]:
        if self.family is not None:
            return {}
        return dense(self.global_model)

    def download_for(self, ids: np.ndarray) -> dict[str, Message]:
        """Returns the model of the clients' network, where clients have networks of their own."""
        if self.family is None:
            return {}
        member = self.members[0]
        if len(ids):
            member = self.of_client(int(ids[0]))
        return {"w": dense(member.global_model.expand(len(ids), -1))}

    evaluation_for = download_for

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        v = self.local_sgd(clients, w)
        nbytes = v.shape[1] * v.element_size()
        models = pad(v, (0, self.most_values - v.shape[1]))  # the server reads rows of one width
        sent = {"models": Message(models, nbytes, reduce="rows")}
        if self.sends_statistics and clients.buffers is not None:  # they are sent for the mean
            sent["statistics"] = Message(clients.buffers, 0, reduce="rows")
        return sent

    def personalized(self, clients: Clients) -> Tensor:
        return clients.received["w"].expand(len(clients), -1)

    # ---- the server ----------------------------------------------------------------------------

    def server_update(self, received: dict[str, Tensor]) -> None:
        """Takes the mean of the models of each network."""
        rows = received["models"]
        weights = rows.new_ones(len(rows))
        if self.weighting == "samples":
            weights = torch.from_numpy(self.client_sizes[self.participant_ids]).to(rows)
        for method, places in self._models():
            own = weights[places]
            if own.sum() > 0:
                mean = (own @ rows[places, : method.space.size]).div_(own.sum())
                method.global_model.copy_(mean)

    def train_server(self, received: dict[str, Tensor]) -> None:
        """Distils the mean scores of all clients' models into the model of each network."""
        if self.server_steps == 0:
            return
        inputs = self.public.inputs(self.seed, self.rounds, self.global_model)
        scores = self._mean_scores(received, inputs)
        losses = [self._distil(method, inputs, scores) for method, _ in self._models()]
        self.log_metric("distillation/loss", float(np.mean(losses)))

    def _models(self) -> Iterator[tuple[FederatedAlgorithm, Tensor]]:
        """Yields who has a model at the server, and the places of its clients in the round."""
        kinds = torch.from_numpy(self.kinds[self.participant_ids])
        followers = [n for n, member in enumerate(self.members) if member.follows]
        yield self, torch.isin(kinds, torch.tensor(followers or [0])).nonzero()[:, 0]
        for number, member in enumerate(self.members):
            if not member.follows:
                yield member, (kinds == number).nonzero()[:, 0]

    def _mean_scores(self, received: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Returns s̄, [n, K] of K classes."""
        scores = []
        for place, client in enumerate(self.participant_ids.tolist()):
            method = self.of_client(client)
            w = received["models"][place, : method.space.size]
            statistics = None
            if "statistics" in received:
                statistics = received["statistics"][place]
            scores.append(method.oracle.predict(w, inputs, statistics).to(w.dtype))
        return torch.stack(scores).mean(0)

    def _distil(self, method: FederatedAlgorithm, inputs: Tensor, scores: Tensor) -> float:
        """Takes the server's steps on the model of a network; returns the mean loss."""
        schedule = LocalSchedule(self.server_batch_size, steps=self.server_steps)
        keys = self.seed, self.rounds
        batches = public_batches(inputs, scores, schedule, keys)
        statistics = None
        if method.oracle.buffers.size:
            statistics = method.global_buffers[None]

        def gradient(w: Tensor, step: int) -> tuple[Tensor, Tensor]:
            batch = batch_for(np.zeros(1, np.int64), *next(batches), (*keys, step))
            loss, g = method.oracle.gradient(w[None], batch, statistics, Objective(_divergences))
            return loss[0], g[0]

        return self.descend_at_server(
            method.global_model, gradient, steps=self.server_steps, lr=self.server_lr, cosine=True
        )


def _divergences(
    outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
) -> Tensor:
    """Returns KL(softmax(s̄(x)) || softmax(s(x; w))) of each input, [n]."""
    return divergence(outputs, samples.targets)
