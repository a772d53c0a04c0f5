"""FedSLR.

Huang, Shen, Sun, Lin, Tao, "Fusion of Global and Local Knowledge for Personalized Federated
Learning", TMLR 2023.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    Clients,
    Count,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    Positive,
    dense,
    low_rank,
    low_rank_size,
    nuclear_norm_prox,
    refuse_factors,
    soft_threshold,
    sparse,
)

Component = Literal["low_rank", "sparse"]


class FedSLR(FederatedAlgorithm):
    """A low-rank global model w and a sparse personal component p_i for each client.

    Phase I (global):   w_i = argmin f_i(v) - <γ_i, v> + |v - w|^2 / (2 η_g), by local SGD from w;
                        γ_i <- γ_i + (w - w_i) / η_g;
                        server: w <- Prox_{λ η_g}( mean_S w_i - η_g mean_[M] γ_i ).
    Phase II (personal): p_i <- Prox_{μ η}( p_i - η g_i(w + p_i) ), warm-started, at the received w.

    The global model (GKR) is w; the personalized ("mixed") model is w + p_i with the newest w.
    Cost: down sum_l min(r_l (d1 + d2), d1 d2) + 1-D layers, up P. Client state: γ_i and p_i.

    Args:
        proximal_step: η_g. The paper's proof assumes η_g < 1/(2L); its experiments use 10.
        low_rank_penalty: λ, the penalty of the global component.
        sparse_penalty: μ, the penalty of the personal component.
        personal_epochs: Local epochs of Phase II; Phase I takes `local_epochs` or `local_steps`.
        global_component, personal_component: What λ and μ penalize: the nuclear norm of each matrix
            layer ("low_rank") or the l1 norm of everything ("sparse"). low_rank + sparse is FedSLR,
            the others are the paper's ablations S+LR, LR+LR and S+S.
        personal_start: What p_i is before a client's first visit: "zero", or "initial", as in the
            paper's code: the initial weights in matrix layers, 0 in 1-D tensors.
        memory_efficient: True: the server keeps only mean γ_i (Algorithm 3). False: the server
            keeps all clients' γ_i, and takes their mean anew in every round (Algorithms 1 and 2).
            The iterates are the same.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedSLR(MLP(64, (8,)), proximal_step=1.0, low_rank_penalty=0.01)
        >>> method.client_state_names
        ['gamma', 'p']

    Note:
        Differences from the paper's print, all resolved in favour of its equation (6), (7) and
        code: the server multiplies mean γ_i by η_g (Algorithm 2, line 10 divides); Phase II
        thresholds by μ η_l; under sampling Algorithm 3 divides the change of mean γ_i by M, not
        |S|; p_i, whose start the print leaves open, starts at 0 unless `personal_start` is
        "initial". With a λ that makes the matrices of w vanish p_i must not start at 0: where all
        matrices are 0 only the last bias has a gradient. Uniform weights. 1-D tensors have no
        nuclear norm and are always sent whole. Weight decay acts on v in Phase I and on p_i in
        Phase II, as in the code. Running statistics of Phase I belong to w, and of Phase II to
        w + p_i.
    """

    losses = ("train", "personal")
    has_personalized = True
    personal_buffers = "received"
    personalization_penalty = None
    gamma_mean: Tensor
    ranks: Tensor

    def __init__(
        self,
        network: Network,
        *,
        proximal_step: Positive = 10.0,
        low_rank_penalty: NonNegative = 1e-4,
        sparse_penalty: NonNegative = 1e-3,
        personal_epochs: Count = 1,
        global_component: Component = "low_rank",
        personal_component: Component = "sparse",
        personal_start: Literal["zero", "initial"] = "zero",
        memory_efficient: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, weighting="uniform", server_optimizer=None, **kwargs)
        refuse_factors(self.network, "FedSLR")
        self.proximal_step = proximal_step
        self.personal_epochs = personal_epochs
        self.low_rank_penalty = low_rank_penalty
        self.sparse_penalty = sparse_penalty
        self.global_component = global_component
        self.personal_component = personal_component
        self.memory_efficient = memory_efficient
        self.add_client_state("gamma")
        self.add_client_state(
            "p",
            0.0 if personal_start == "zero" else self.initial_matrices,
            sparse=personal_component == "sparse",
        )
        self.add_server_state("gamma_mean", torch.zeros_like(self.global_model))
        if not memory_efficient:
            self.keep_messages("gamma")
        # The initial model has full rank and is sent densely.
        self.add_server_state("ranks", self.space.full_ranks)

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        return sizes * (self.epochs_of(sizes) + self.personal_epochs)

    def initial_matrices(self) -> Tensor:
        """Returns the global model with zeros for its 1-D tensors, [P]."""
        start = torch.zeros_like(self.global_model)
        for layer in self.space.matrices:
            start[layer.span] = self.global_model[layer.span]
        return start

    def download(self) -> Message:
        if self.global_component == "sparse":
            # The initial model is not sparse and is sent densely.
            return min(
                sparse(self.global_model),
                dense(self.global_model),
                key=lambda message: int(message.nbytes),
            )
        return low_rank(self.global_model, self.space, self.ranks)

    def client_update(self, clients: Clients, w: Tensor) -> Tensor | dict[str, Tensor | Message]:
        gamma = clients.state["gamma"]
        p = clients.state["p"]
        step = self.proximal_step
        w_i = self.local_sgd(clients, w, linear=-gamma, prox_weight=1 / step, prox_center=w)
        exact = gamma + (w - w_i) / step
        clients.state["gamma"] = stored = self.as_stored("gamma", exact)
        simple: dict[str, Any] = {"l1": self.sparse_penalty}
        if self.personal_component == "low_rank":
            simple = {
                "prox": lambda p, lr: nuclear_norm_prox(self.space, p, self.sparse_penalty * lr)[0]
            }
        clients.state["p"] = self.local_sgd(
            clients.personal, p, offset=w, epochs=self.personal_epochs, name="personal", **simple
        )
        if not self.memory_efficient:  # free, since the server can compute γ_i from w_i
            return {"w": w_i, "gamma": Message(stored, 0)}
        if stored is exact:
            return w_i
        # The server cannot compute the rounded change from w_i. It costs no bytes: the precision in
        # which states are stored does not belong to the method.
        return {"w": w_i, "gamma": Message(stored - gamma, 0)}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        step = self.proximal_step
        if self.memory_efficient:
            # The mean over S of γ_i's change, which clients send only if their γ_i are rounded.
            change = mean.get("gamma", (self.global_model - mean["w"]) / step)
            self.gamma_mean += change * (self.participants / self.num_clients)
        else:
            self.gamma_mean.copy_(self.kept_mean("gamma"))
        x = mean["w"] - step * self.gamma_mean
        threshold = self.low_rank_penalty * step
        if self.global_component == "sparse":
            self.global_model.copy_(soft_threshold(x, threshold))
        else:
            w, ranks = nuclear_norm_prox(self.space, x, threshold)
            self.global_model.copy_(w)
            self.ranks.copy_(ranks)

    def personalized(self, clients: Clients) -> Tensor:
        return clients.received["w"] + clients.state["p"]

    def parameters_global(self) -> int:
        if self.global_component == "sparse":
            return int(self.global_model.count_nonzero())
        return int(low_rank_size(self.space, self.ranks))

    def parameters_personalized(self, clients: Clients, w: Tensor) -> Tensor:
        p = clients.state["p"]
        if self.personal_component == "sparse":
            return self.global_size() + p.count_nonzero(-1)
        own = low_rank_size(self.space, nuclear_norm_prox(self.space, p, 0.0)[1])
        return self.global_size() + own
