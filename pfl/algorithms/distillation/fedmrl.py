"""FedMRL.

Yi, Yu, Ren, Wang, Liu, Li, "Federated Model Heterogeneous Matryoshka Representation Learning",
NeurIPS 2024, arXiv 2406.00488.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from pfl.method import (
    BatchSamples,
    Clients,
    ConfigError,
    Joined,
    Message,
    MessengerMethod,
    Network,
    NonNegative,
    Objective,
    both_outputs,
    features_before,
    head_name,
    head_width,
)


class Matryoshka(Joined):
    """A client's network and a messenger whose heads read one nested representation.

    With the features h of the messenger and z of the own network, r = P [h; z] + b has as many
    values as z. The own head gets r, and the messenger's head its first values, as many as h has.
    The outputs are those of the own head.

    Args:
        own: The client's network.
        messenger: The network that all clients have, with no more features than the own one.

    Raises:
        ConfigError: The messenger has more features, or a head is no linear layer.
    """

    def __init__(self, own: nn.Module, messenger: nn.Module) -> None:
        super().__init__(own, messenger)
        few = head_width(messenger)
        many = head_width(own)
        if few > many:
            raise ConfigError(
                f"model.messenger: the head of {type(messenger).__name__} gets {few} features, and "
                f"that of {type(own).__name__} {many}; a messenger has at most as many"
            )
        self.own_place = head_name(own)
        self.messenger_place = head_name(messenger)
        dtype = next(own.parameters()).dtype
        self.projection = skip_init(nn.Linear, few + many, many, dtype=dtype)
        # As PyTorch draws such a layer, from the seed of the run; networks that are alike begin so.
        draw = torch.Generator().manual_seed(torch.initial_seed())
        bound = (few + many) ** -0.5
        with torch.no_grad():
            for values in self.projection.parameters():
                values.uniform_(-bound, bound, generator=draw)
        self.projection.to(next(own.parameters()))

    @property
    def predictor(self) -> nn.Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        others, others_head = features_before(self.messenger, self.messenger_place, x)
        mine, own_head = features_before(self.own, self.own_place, x)
        assert self.projection is not None
        nested = self.projection(torch.cat([others, mine], 1))
        scores: Tensor = own_head(nested)
        if not self.training:
            return scores
        return self.side_by_side(scores, others_head(nested[:, : others.shape[1]]))


class FedMRL(MessengerMethod):
    """Each client's own network and a messenger predict from one nested representation (Alg. 1).

    With the features z of the client's network u_i and h of its messenger m_i, and the projector
    P_i, a linear layer with as many outputs as z has values, r = P_i [h; z]. The head of u_i gets r
    and the head of m_i its first values, as many as h has. All three take local steps on the same
    mini-batches, from the client's own last u_i and P_i and the received m:
    (u_i, P_i, m_i) <- (u_i, P_i, m_i) - η ∇ mean_x [a_m loss of m_i's head + a_u loss of u_i's];
    m <- sum_S n_i m_i / sum_S n_i.

    Evaluated: the scores of u_i's head for r, with the newest m. Shared: m. Personal: u_i and P_i,
    and the running statistics of BatchNorm in both networks. Cost: m down, m up; the gradients of
    both networks in a local step, both forward in a prediction. Client state: u_i and P_i (the
    state `head`). A newcomer has the initial u_i and P_i.

    Args:
        messenger_weight: a_m, the weight of the loss of the messenger's head.
        own_weight: a_u, the weight of the loss of the client's head.

    Note:
        Networks may differ in all but the number of classes (`pfl.models.Family`). The heads are
        linear layers, and h has at most as many values as each z; a messenger that is not given is
        as the clients' network, or as the first of a family. A sample has one class; regression and
        several labels are refused. An exported model of a client is the network `Matryoshka`.
        Differences from the authors' code (LipingYi/FedMRL): there the mean is, by mistake, the
        messenger of the last client of the round, as all clients' values are kept in one place; the
        momentum of messenger and projector goes on from client to client; gradients are clipped to
        the norm 50. Differences from a public implementation, HtFLlib: there messengers are
        averaged with equal weights, and P_i, which is not saved, begins each round as in the first.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedMRL(MLP(64, (32,)), messenger=MLP(64, (8,)))
        >>> method.download().nbytes // 4  # the messenger, 64 * 8 + 8 + 8 * 10 + 10
        610
    """

    def __init__(
        self,
        network: Network,
        *,
        messenger_weight: NonNegative = 1.0,
        own_weight: NonNegative = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.messenger_weight = messenger_weight
        self.own_weight = own_weight

    @staticmethod
    def joint(own: nn.Module, messenger: nn.Module) -> Joined:
        return Matryoshka(own, messenger)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        start = self.personalized(clients)
        v = self.local_sgd(clients, start, objective=Objective(self._losses))
        return self.keep_and_send(clients, v)

    def parameters_personalized(self, clients: Clients, w: Tensor) -> Tensor:
        return torch.full((len(clients),), self.space.size)

    def _losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns the weighted losses of both heads for each sample, [n]."""
        mine, others = both_outputs(features)
        own_loss = self.oracle.losses(mine, samples.targets)
        other_loss = self.oracle.losses(others, samples.targets)
        return self.messenger_weight * other_loss + self.own_weight * own_loss
