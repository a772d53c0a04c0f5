"""MR-MTL.

Liu, Hu, Wu, Smith, "On Privacy and Personalization in Cross-Silo Federated Learning", NeurIPS 2022.
"""

from typing import Any

from torch import Tensor

from pfl.method import Clients, FederatedAlgorithm, Network, NonNegative


class MRMTL(FederatedAlgorithm):
    """Mean-regularized multi-task learning: every client's own model near the mean of all.

    min mean_i [f_i(w_i) + λ/2 |w_i - w|^2] with w = mean_i w_i.
    w_i <- w_i - η (g_i(w_i) + λ (w_i - w)), local steps from the client's own last w_i;
    w <- mean_S w_i.

    Evaluated: the mean w, and w_i. Shared: w; personal: w_i, which is sent. A newcomer receives w.
    Cost: P values down, P up, as FedAvg. Client state: w_i. Server state: none beside w.

    Args:
        penalty: λ. 0: every client alone; large: one model for all.

    Note:
        The paper's clients are silos that all take part in every round and have sample-level
        privacy (`loop.sample_privacy`), with which a λ between the two ends is best. Here a client
        that is not in the cohort keeps its w_i, and the mean is over the cohort. FedCLUP with
        `server_step: inverse_penalty` is the same method.

    Example:
        >>> from pfl.models import MLP
        >>> method = MRMTL(MLP(64, (8,)), penalty=0.3)
        >>> method.client_state_names
        ['w']
    """

    has_personalized = True
    keeps_model = True

    def __init__(self, network: Network, *, penalty: NonNegative = 0.1, **kwargs: Any) -> None:
        super().__init__(network, weighting="uniform", server_optimizer=None, **kwargs)
        self.penalty = penalty
        self.add_client_state("w", self.first_model)

    @property
    def personalization_penalty(self) -> float:
        return self.penalty

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        w_i = self.local_sgd(clients, clients.state["w"], prox_weight=self.penalty, prox_center=w)
        if self.penalty > 0:
            w_i[clients.empty] = w  # without samples only the penalty is left
        clients.state["w"] = w_i
        return w_i

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["w"]
