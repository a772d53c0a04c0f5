"""FedCP.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedCP: Separating Feature Information for Personalized
Federated Learning via Conditional Policy", KDD 2023.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize

from pfl.method import (
    BatchSamples,
    Clients,
    Message,
    Network,
    NonNegative,
    Objective,
    PartlyPersonal,
    features,
    replace_values_in,
    values_in,
)
from pfl.models.divided import WithPolicy

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)  # of the kernel


class FedCP(PartlyPersonal):
    """A policy divides the features of each sample between a personal head and a common one.

    Let z be the K features of the body φ, h the common head and h_i the client's. The policy π
    gives each feature two shares whose sum is 1:
    (r, s) = softmax over the two halves of ReLU(LayerNorm(linear(v_i z))), with v_i = a / |a|,
    where a is the sum over classes of the weights of h_i before the local steps;
    the scores are h_i (r z) + h (s z). Local steps on (φ, π, h_i), with h as received, take
    f_i + λ mean_(j,k) (κ(z_j, z_k) + κ(ẑ_j, ẑ_k) - 2 κ(z_j, ẑ_k)) of the mini-batch, with the
    features ẑ of the received φ and κ(a, b) = sum_α exp(-|a - b|^2 / (2α)), α = 10, 15, 20, 50;
    (φ, π, h) <- sum_S n_i (φ_i, π_i, (h_i + h) / 2) / sum_S n_i.

    Evaluated: the scores with the newest φ, π and h; there is no global model. Shared: φ, π and h.
    Personal: h_i. Cost: down φ, π and h, up the same: 2K (K + 3) values of π beside the model; two
    forward passes more in a local step with λ > 0. Client state: h_i, with v_i. A newcomer has the
    network's first head as h_i.

    Args:
        penalty: λ. The default is that of the authors' script.

    Note:
        The server can work h_i out, as twice what it gets minus the h that it sent.
        The head is a linear layer, and z is what it gets. z and ẑ of the second term are taken in
        evaluation mode, also with BatchNorm and dropout. An exported model is the network
        `WithPolicy`.
        The print was not at hand: the method is written from the authors' code. Differences from
        it, and from PFLlib, which has the same: there Gumbel noise is added before the softmax, in
        training and in testing; v_i is drawn before a client's first round; and π and h reach the
        clients of a round at its end, and the others not.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedCP(MLP(64, (8,)), penalty=5.0)
        >>> method.download().nbytes // 4  # 610 of the network, 8 * 16 + 3 * 16 of the policy
        786
    """

    wrapper = WithPolicy
    common_part: Tensor
    own_part: Tensor
    moving: Tensor

    def __init__(self, network: Network, *, penalty: NonNegative = 5.0, **kwargs: Any) -> None:
        super().__init__(network, personal=["head.own.*", "context"], **kwargs)
        self.require_no_aids()
        self.penalty = penalty
        self.context_span = self.space.spans["context"]
        self.weight_span = self.space.spans["head.own.weight"]
        assert isinstance(self.network, WithPolicy)
        self.width = len(self.network.context)
        self.add_constant("own_part", self.space.mask(["head.own.*"]))
        self.add_constant("common_part", self.space.mask(["head.common.*"]))
        self.add_constant("moving", ~self.space.mask(["head.common.*", "context"]))
        self.trained_part = self.moving

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        start = self.personalized(clients)
        v = start.clone()
        optimizer = self.local_optimizer(v, self.rate_of(clients), self.moving)
        for batch in clients.batches(self.local_schedule):
            rows = slice(0, batch.clients)
            objective = None
            if self.penalty > 0:
                z = self._features(clients, v[rows], batch)
                received = self._features(clients, start[rows], batch)
                weights = batch.sample_weights(z.dtype)
                pull = self.penalty * distance_slopes(z, received, weights)
                objective = Objective(self._losses, own={"pull": pull})
            loss, g = self.oracle.gradient(v, batch, clients.buffers, objective=objective)
            optimizer.step(g, batch.clients)
            self.log_loss("train", loss, batch.counts)
        own = values_in(self.own_part, v)
        common = values_in(self.common_part, v)
        replace_values_in(self.common_part, v, (own + common) / 2)
        return self.keep_and_send(clients, v)

    def personalized(self, clients: Clients) -> Tensor:
        v = super().personalized(clients)
        weights = v[:, self.weight_span].unflatten(1, (-1, self.width))
        v[:, self.context_span] = normalize(weights.sum(1))
        return v

    def _features(self, clients: Clients, v: Tensor, batch: Any) -> Tensor:
        """Returns z of models v [A, P], [A, B, K]: the sum of its two parts."""
        parts = features(self.oracle, v, batch, clients.buffers)
        return parts.unflatten(2, (2, -1)).sum(2)

    def _losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns f of each sample, [n], with the second term's gradient but without its value."""
        z = features.unflatten(1, (2, -1)).sum(1)
        pull = own["pull"][: len(z)]
        return self.oracle.losses(outputs, samples.targets) + ((z - z.detach()) * pull).sum(1)


def distance_slopes(z: Tensor, other: Tensor, weights: Tensor) -> Tensor:
    """Returns n times the slopes of the kernel distance of two sets of features by the first.

    Args:
        z: Features of each of A clients, [A, B, K].
        other: Other features of the same samples, [A, B, K].
        weights: 1/n for the client's n samples and 0 for padding, [A, B].
    """

    def slopes(points: Tensor) -> Tensor:
        """Returns the sum over points b of the slopes of κ(z_j, b) by z_j, times 1/n."""
        away = z[:, :, None] - points[:, None]
        squares = away.square().sum(3)
        factors = sum((-squares / (2 * width)).exp() / width for width in BANDWIDTHS)
        return -((factors * weights[:, None])[..., None] * away).sum(2)

    return 2 * (slopes(z) - slopes(other))
