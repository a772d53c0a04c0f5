"""FedDBE.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating Domain Bias for Federated Learning in
Representation Space", NeurIPS 2023.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pfl.method import (
    BatchSamples,
    Clients,
    ConfigError,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    Objective,
    PositiveShare,
    features,
    head_name,
    linear_head,
)


class FedDBE(FederatedAlgorithm):
    """Each client adds a vector of its own to the features, whose mean is held to a common one.

    Let z be the K features of the body, A the weight and b the bias of the head. A client scores a
    sample with A (z + m_i) + b, where m_i is its bias memory, and keeps a running mean of features:
    r_i <- (1 - μ) r_i + μ mean_batch z in each local step, from r_i = 0 in each round.
    w_i <- w_i - η g_w and m_i <- m_i - η g_m, local steps from w and from the client's own m_i,
    with the gradient of f_i(w_i, m_i) + κ/(2K) |r_i - r|^2, in which only the newest term of r_i
    moves;
    w <- sum_S n_i w_i / sum_S n_i.
    The first round that has samples is FedAvg's, with m_i = 0 and κ = 0, and yields the common mean
    r = sum_S n_i r_i / sum_S n_i, which stays.

    Evaluated: w with m_i, that is w with the head's bias b + A m_i. Shared: w and r; personal: m_i.
    Cost: P values down, and K once r is known; P up, and K until r is known; a forward pass more in
    a local step. Client state: m_i. Server state: r. A newcomer has w, with m_i = 0.

    Args:
        penalty: κ of the mean regularization. The default is that of the authors' script.
        momentum: μ. 1: the mean of the mini-batch alone, as in the authors' script.

    Note:
        The head is a linear layer with a bias, and z is what it gets.
        With B = b + A m_i and the gradients G_A, G_B of the model (A, B), the gradients are
        g_A = G_A + G_B m_i^T, g_b = G_B and g_m = A^T G_B, which is how they are computed here.
        `weight_decay` holds m_i, too.
        The print was not at hand: the method is written from the authors' public code. There
        all clients train once before the first round and their models are thrown away, so that r
        is a mean over all clients at the initial model; here r is the first cohort's, whose
        models count. There the means of features are taken while BatchNorm and dropout train, here
        in evaluation mode. There the penalty has the factor 1/2, as here.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedDBE(MLP(64, (8,)), penalty=50.0)
        >>> {name: message.nbytes // 4 for name, message in method.download().items()}
        {'w': 610, 'mean': 0}
    """

    has_global = False  # the head is trained for features with a bias memory
    has_personalized = True
    personalization_penalty = None  # κ ties features, and not the models
    mean: Tensor

    def __init__(
        self,
        network: Network,
        *,
        penalty: NonNegative = 50.0,
        momentum: PositiveShare = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.require_no_aids()
        self.penalty = penalty
        self.momentum = momentum
        self.width = linear_head(self).in_features
        head = head_name(self.network)
        names = [f"{head}.{name}".lstrip(".") for name in ("weight", "bias")]
        spans = self.space.spans
        if not spans.keys() >= set(names):
            raise ConfigError(
                f"model.network: the head {head!r} needs a weight and a bias that are "
                "trained; FedDBE adds a client's own vector to the head's inputs"
            )
        self.weight_span, self.bias_span = (spans[name] for name in names)
        self.add_client_state("memory", self._no_memory)
        # Whether r is known, 0 or 1, and its K values.
        self.add_server_state("mean", self.global_model.new_zeros(1 + self.width))

    def _no_memory(self) -> Tensor:
        return self.global_model.new_zeros(self.width)

    def download(self) -> dict[str, Tensor | Message]:
        nbytes = int(self.mean[0]) * self.mean[1:].nbytes
        return {"w": self.global_model, "mean": Message(self.mean, nbytes)}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Tensor | Message]:
        known = clients.received["mean"][0]
        common = clients.received["mean"][1:]
        lr = self.rate_of(clients)
        strength = known * self.penalty / self.width
        v = w.repeat(len(clients), 1)
        m = clients.state["memory"].clone()
        train, train_memory = (self.local_optimizer(x, lr) for x in (v, m))
        running = torch.zeros_like(m)
        for batch in clients.batches(self.local_schedule):
            rows = slice(0, batch.clients)
            z = features(self.oracle, v[rows], batch, clients.buffers)
            means = (batch.sample_weights(z.dtype)[..., None] * z).sum(1)
            running[rows] = (1 - self.momentum) * running[rows] + self.momentum * means
            # The derivative of the penalty with respect to the features' mean in the batch.
            pull = strength * self.momentum * (running - common)
            objective = Objective(self._losses, own={"pull": pull})
            loss, g = self.oracle.gradient(
                self._with_memory(v, m), batch, clients.buffers, objective=objective
            )
            g_m = self._split(g, m, v)
            train.step(g, batch.clients)
            train_memory.step(known * g_m, batch.clients)
            self.log_loss("train", loss, batch.counts)
        clients.state["memory"] = m
        sent = (1 - known) * running
        nbytes = 0 if known else sent[0:1].nbytes
        return {"w": v, "mean": Message(sent, nbytes, weighting="samples")}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        super().server_update(mean)
        if not self.mean[0] and mean["mean"].any():  # zeros come from clients without samples
            self.mean[0] = 1
            self.mean[1:] = mean["mean"]

    def personalized(self, clients: Clients) -> Tensor:
        w = clients.received["w"].expand(len(clients), -1)
        return self._with_memory(w, clients.state["memory"])

    def _with_memory(self, v: Tensor, m: Tensor) -> Tensor:
        """Returns models v [C, P] with the bias b + A m, which score z as v scores z + m."""
        v = v.clone()
        v[:, self.bias_span] += (self._weight(v) @ m[..., None])[..., 0]
        return v

    def _weight(self, v: Tensor) -> Tensor:
        """Returns the heads' weights A of models v [C, P], [C, outputs, K]."""
        return v[:, self.weight_span].unflatten(1, (-1, self.width))

    def _split(self, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
        """Turns gradients g [C, P] at models with memory into gradients at v; returns g_m."""
        g_bias = g[:, self.bias_span]
        g[:, self.weight_span] += (g_bias[..., None] * m[:, None]).flatten(1)
        return (g_bias[:, None] @ self._weight(v))[:, 0]

    def _losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns f of each sample, [n], with the penalty's gradient but without its value."""
        return self.oracle.losses(outputs, samples.targets) + (
            (features - features.detach()) @ own["pull"]
        )
