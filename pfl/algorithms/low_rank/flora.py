"""FLoRA.

Wang, Shen, He, Sun, Wang, Lyu, Li, "FLoRA: Federated Fine-Tuning Large Language Models with
Heterogeneous Low-Rank Adaptations", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pfl.method import ClientRanks, Clients, Message, MovedWeights, Network, generator, masked


class FLoRA(MovedWeights):
    """New factors in every round, whose products are stacked and added to the frozen weight.

    A_i drawn anew and B_i = 0; (A_i, B_i) <- local steps with W + D + s B_i A_i as weight, D still;
    D <- D + s sum_S p_i B_i A_i, one product of all B_i side by side and all p_i A_i in a stack.
    The clients' ranks may differ. p_i is the client's share of the cohort's samples, and s is
    alpha / r with the rank r of `trainable`, for all clients. Heads are averaged.

    Shared: all. Cost: the head and D down, D as two factors of rank sum_t sum_S r_i over the rounds
    t so far, or all its values where these are fewer; A_i, B_i and the head up. No client state.

    Args:
        trainable: `LoRA`, whose layers get D in addition.
        ranks: r_i: client i has ranks[i mod the number of ranks]; null: all have that of
            `trainable`.

    Note:
        A_i is drawn uniformly in ±1/sqrt(in), by the round and the client. A client receives the
        whole D, so that it need not have been there in earlier rounds; in the paper, where all
        clients take part, it receives the factors of the round. The model that is evaluated has
        the network's own A and B = 0. Differences from the authors' code: it tells A from B by
        shape[0] == r, which is wrong for a layer with r inputs or outputs.

    Example:
        >>> from pfl.models import MLP, LoRA
        >>> method = FLoRA(MLP(64, (8,)), trainable=LoRA(rank=4), ranks=[2, 4])
        >>> method.download().nbytes // 4  # the head's 8 * 10 + 10, and no D yet
        90
    """

    def __init__(
        self, network: Network, *, ranks: Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(network, **kwargs)
        self.client_ranks = ClientRanks(ranks, self.factors)

    @property
    def known_values(self) -> int:
        """The factors: A is the network's first one, and B is 0."""
        return sum(pair.a.size + pair.b.size for pair in self.factors)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        start = w.repeat(len(clients), 1)
        for row, client in enumerate(clients.ids.tolist()):
            rng = generator(self.seed, "factors", clients.round, client)
            for pair in self.factors:
                bound = pair.a.shape[1] ** -0.5
                drawn = torch.from_numpy(rng.uniform(-bound, bound, pair.a.size))
                start[row, pair.a.span] = drawn.to(w)
        self.client_ranks.truncate(start, clients.ids)
        sent = masked(self.local_sgd(clients, start), ~self.residual)
        size = sent.nbytes - self.known_values * w.element_size()
        factors = self.client_ranks.sizes(clients.ids) * w.element_size()
        return replace(sent, nbytes=size + factors)

    def server_update(self, mean: dict[str, Tensor]) -> None:
        new = torch.where(self.residual, self.global_model, mean["w"])
        for pair, product in zip(self.factors, self.products(mean), strict=True):
            for factor in (pair.a, pair.b):
                new[factor.span] = self.global_model[factor.span]
            self.add_residual(new, pair, product)
        self.global_model.copy_(new)
        self.residual_rank += int(self.client_ranks.of(self.participant_ids).sum())
