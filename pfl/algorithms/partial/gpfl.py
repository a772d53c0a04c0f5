"""GPFL.

Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, "GPFL: Simultaneously Learning Global and Personalized
Feature Information for Personalized Federated Learning", ICCV 2023.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from pfl.method import (
    BatchSamples,
    Clients,
    Message,
    Network,
    NonNegative,
    Objective,
    PartlyPersonal,
    label_counts,
    require_classes,
)
from pfl.models.divided import WithValve


class GPFL(PartlyPersonal):
    """A shared valve makes two kinds of features: common ones, near shared vectors, and personal.

    Let z be the K features of the body φ, E_c a vector for each class c, and V(z, a) = ReLU((1 +
    γ(a)) z + β(a)) the valve, where γ and β are a linear layer, ReLU and LayerNorm. A client that
    receives φ, V and E computes the conditions
    g = mean_c E_c, and p_i = sum_c n_i,c E_c / n_i, with its n_i,c samples of class c,
    and takes local steps on (φ, V, E, h_i) from its own last head h_i, on the mean over samples of
    f_i(h_i V(z, p_i)) - log(exp(cos(V(z, g), E_c)) / sum_k exp(cos(V(z, g), E_k)))
    + λ |V(z, g) - Ê_c|, with the received Ê = E, and on μ/2 (|V|^2 + |E|^2);
    (φ, V, E) <- sum_S n_i (φ_i, V_i, E_i) / sum_S n_i.

    Evaluated: h_i V(z, p_i) with the newest φ, V and E, and p_i of these; there is no global model.
    Shared: φ, V and E. Personal: h_i. Cost: down φ, V and E, up the same: 2 (K^2 + 3K) values of V
    and K for each class beside the body; a pass over the labels. Client state: h_i, with g and p_i
    as it had them last. A newcomer has the network's first head.

    Args:
        penalty: λ. The default is that of the authors' script for small networks.
        shared_decay: μ. The default is that of the authors' script for small networks.

    Note:
        The head is a linear layer, and z is what it gets. A sample has one class; regression and
        several labels are refused. An exported model is the network `WithValve`.
        The print was not at hand: the method is written from the authors' code. Differences from
        it, and from PFLlib, which has the same: there the third term is λ times the root of the
        sum of squares over all samples of the mini-batch; in the first round g and p_i are 0, and
        later those of the E_i that the client has trained itself, not of the mean.

    Example:
        >>> from pfl.models import MLP
        >>> method = GPFL(MLP(64, (8,)), penalty=0.01)
        >>> method.download().nbytes // 4  # 64 * 8 + 8 of the body, 2 * (64 + 24), and 10 * 8
        776
    """

    wrapper = WithValve
    shared: Tensor
    moving: Tensor

    def __init__(
        self,
        network: Network,
        *,
        penalty: NonNegative = 0.01,
        shared_decay: NonNegative = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, personal=["head.*", "conditions.*"], **kwargs)
        self.require_no_aids()
        self.penalty = penalty
        self.shared_decay = shared_decay
        spans = self.space.spans
        self.vectors_span = spans["vectors"]
        self.common_span = spans["conditions.common"]
        self.personal_span = spans["conditions.personal"]
        assert isinstance(self.network, WithValve)
        self.classes, self.width = self.network.vectors.shape
        self.add_constant("shared", self.space.mask(["valve.*", "vectors"]))
        self.add_constant("moving", ~self.space.mask(["conditions.*"]))
        self.trained_part = self.moving

    def check_setup(self) -> None:
        require_classes(self)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        v = self.personalized(clients)
        received = self._vectors(w).expand(len(clients), -1, -1)
        objective = Objective(self._losses, own={"received": received})
        optimizer = self.local_optimizer(v, self.rate_of(clients), self.moving)
        decay = self.shared_decay * self.shared.to(v)
        for batch in clients.batches(self.local_schedule):
            loss, g = self.oracle.gradient(v, batch, clients.buffers, objective=objective)
            optimizer.step(g + decay * v, batch.clients)
            self.log_loss("train", loss, batch.counts)
        return self.keep_and_send(clients, v)

    def personalized(self, clients: Clients) -> Tensor:
        v = super().personalized(clients)
        vectors = self._vectors(clients.received["w"])
        counts = label_counts(clients, self.classes, v)
        shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
        v[:, self.common_span] = vectors.mean(0)
        v[:, self.personal_span] = (shares[..., None] * vectors).sum(1)
        return v

    def _vectors(self, w: Tensor) -> Tensor:
        """Returns E of a model w [P], [classes, K]."""
        return w[self.vectors_span].view(self.classes, self.width)

    def _losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns the three terms of each sample, [n]."""
        common = features[:, self.width : 2 * self.width]
        cosines = features[:, 2 * self.width :]
        away = common - own["received"][samples.targets]
        return (
            self.oracle.losses(outputs, samples.targets)
            + cross_entropy(cosines, samples.targets, reduction="none")
            + self.penalty * away.norm(dim=1)
        )
