"""FML.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu, "Federated Mutual Learning", 2020,
arXiv 2006.16765.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pfl.method import (
    BatchSamples,
    Clients,
    Message,
    MessengerMethod,
    Network,
    Objective,
    Share,
    both_outputs,
    divergence,
)


class FML(MessengerMethod):
    """Each client's own network and a common one, the messenger, teach each other.

    With the probabilities p(x) of the client's network u_i and q(x) of its messenger m_i, both take
    local steps on the same mini-batches, from the client's own last u_i and the received m:
    u_i <- u_i - η ∇ [α f_i(u_i) + (1 - α) mean_x KL(q(x) || p(x))], with q held;
    m_i <- m_i - η ∇ [β f_i(m_i) + (1 - β) mean_x KL(p(x) || q(x))], with p held;
    m <- sum_S n_i m_i / sum_S n_i.

    Evaluated: u_i. Shared: m. Personal: u_i, and the running statistics of BatchNorm in both. Cost:
    m down, m up; the gradients of both networks in a local step. Client state: u_i (the state
    `head`). A newcomer has the initial u_i.

    Args:
        alpha: α, the share of a client's own loss in the training of its network. 1: it learns
            nothing from the messenger.
        beta: β, the share of the own loss in the training of the messenger. 1 for both: every
            client alone, and FedAvg of messengers beside it.

    Note:
        Networks may differ in all but the number of classes (`pfl.models.Family`). A sample has one
        class; regression and several labels are refused. Weight decay, `clip` and an `optimizer`
        see the values of both networks as one vector.
        Neither the print nor code of the authors was at hand: the equations are those on which
        public implementations agree. Differences from HtFLlib's and PFLlib's: there each network
        also descends on the loss of the other one, as the probabilities are not held; the
        divergence is a mean over samples and classes, which is smaller by the number of classes;
        and gradients are clipped to the norm 10.

    Example:
        >>> from pfl.models import MLP
        >>> method = FML(MLP(64, (32,)), messenger=MLP(64, (8,)), alpha=0.5, beta=0.5)
        >>> method.download().nbytes // 4  # the messenger, 64 * 8 + 8 + 8 * 10 + 10
        610
    """

    def __init__(
        self,
        network: Network,
        *,
        alpha: Share = 0.5,
        beta: Share = 0.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.alpha = alpha
        self.beta = beta

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        start = self.personalized(clients)
        v = self.local_sgd(clients, start, objective=Objective(self._losses))
        return self.keep_and_send(clients, v)

    def _losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns the losses of both networks for each sample, [n]."""
        mine, others = both_outputs(features)
        own_loss = self.oracle.losses(mine, samples.targets)
        other_loss = self.oracle.losses(others, samples.targets)
        return (
            self.alpha * own_loss
            + (1 - self.alpha) * divergence(mine, others)
            + self.beta * other_loss
            + (1 - self.beta) * divergence(others, mine)
        )
