"""FedKD.

Wu, Wu, Lyu, Huang, Xie, "Communication-efficient federated learning via knowledge distillation",
Nature Communications 2022.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
    PositiveShare,
    divergence,
    require,
)


class FedKD(MessengerMethod):
    """FML with features, with less weight where both networks err, and changes of low rank sent.

    With the probabilities p, the features z and the loss l of the client's network u_i (the mentor)
    for a sample, and q, h and k those of its messenger m_i (the mentee), both take local steps from
    the client's own last u_i and the received m:
    u_i <- u_i - η ∇ mean [l + γ (KL(q || p) + |z - W_i h|^2 / K) / (l + k)], with q held;
    m_i <- m_i - η ∇ mean [k + γ (KL(p || q) + |z - W_i h|^2 / K) / (l + k)], with p held;
    W_i <- W_i - η γ ∇ mean |z - W_i h|^2 / K / (l + k);
    m <- m + sum_S n_i d_i / sum_S n_i, where d_i is m_i - m with, of each matrix of weights, the
    fewest singular values whose squares have the share T_t of the sum of all squares,
    T_t = T_1 + (T_R - T_1) t / R in round t of R.

    Evaluated: u_i. Shared: m. Personal: u_i, W_i, and the running statistics of BatchNorm in both.
    Cost: m down; up the factors of d_i, r (a + b) values for a matrix a x b of rank r, or a b if
    that is less, and all other values. The gradients of both networks in a local step. Client
    state: u_i and W_i (the state `head`). A newcomer has the initial u_i.

    Args:
        distillation: γ. 0: every client alone, and averaging of messengers beside it.
        first_energy: T_1.
        last_energy: T_R. 1 for both: all of m_i - m is sent.

    Note:
        Networks may differ in all but the number of classes (`pfl.models.Family`); z and h are what
        the heads get, K is the number of z, and W_i begins as the identity, with zeros where there
        are more features. A sample has one class; regression and several labels are refused.
        The print was not at hand. Written from what public implementations (HtFLlib, PFLlib) agree
        on. Differences from these: there p, q and the denominators are not held, and the losses in
        the latter are means of the mini-batch, where here each sample has its own; there the
        distance of features counts twice, for it is in both losses; gradients are clipped to the
        norm 10; and the values of the messenger themselves are cut to low rank, on both ways. Here
        it is the change, as in the abstract's "gradients", and the way up alone: clients that
        missed a round need the messenger itself.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedKD(MLP(64, (32,)), messenger=MLP(64, (8,)))
        >>> method.download().nbytes // 4  # the messenger, 64 * 8 + 8 + 8 * 10 + 10
        610
    """

    def __init__(
        self,
        network: Network,
        *,
        distillation: NonNegative = 1.0,
        first_energy: PositiveShare = 0.95,
        last_energy: PositiveShare = 0.98,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        require("last_energy", last_energy, last_energy >= first_energy, "at least first_energy")
        self.distillation = distillation
        self.first_energy = first_energy
        self.last_energy = last_energy

    @staticmethod
    def joint(own: nn.Module, messenger: nn.Module) -> Joined:
        return Joined(own, messenger, compares_features=True)

    def check_setup(self) -> None:
        super().check_setup()
        if self.max_rounds is None and self.first_energy < self.last_energy:
            raise ConfigError(
                f"model.last_energy: {self.last_energy}; the number of rounds is not known; give "
                f"trainer.max_epochs, or first_energy and last_energy alike"
            )

    def energy(self, round_index: int) -> float:
        """Returns T_t of a round (from 0)."""
        share = (round_index + 1) / (self.max_rounds or 1)
        return self.first_energy + (self.last_energy - self.first_energy) * share

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        start = self.personalized(clients)
        v = self.local_sgd(clients, start, objective=Objective(self._losses))
        message = self.keep_and_send(clients, v)
        return self._compressed(message, w, self.energy(clients.round))

    def _losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns the losses of both networks for each sample, [n]."""
        count = outputs.shape[1]
        mine = features[:, :count]
        others = features[:, count : 2 * count]
        apart = features[:, -1]
        task = self.oracle.losses(mine, samples.targets)
        other_task = self.oracle.losses(others, samples.targets)
        taught = divergence(mine, others) + divergence(others, mine) + apart
        both = (task + other_task).detach()
        return task + other_task + self.distillation * taught / both

    def _compressed(self, message: Message, w: Tensor, energy: float) -> Message:
        """Returns the messengers of a message [C, P] with changes of w [P] of low rank."""
        values = message.values.clone()
        sent = torch.zeros(len(values), dtype=torch.int64)
        for layer in self.space.layers:
            if self.personal_part[layer.start]:
                continue
            if layer.matrix_shape is None:
                sent += layer.size
                continue
            old = w[layer.span]
            matrix = layer.to_matrix(values[:, layer.span] - old)
            if not matrix.isfinite().all():  # the run has diverged, and is ended by that
                sent += layer.size
                continue
            left, s, right = torch.linalg.svd(matrix, full_matrices=False)
            sums = s.square().cumsum(1)
            keep = (
                torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], 1) < energy * sums[:, -1:]
            )
            values[:, layer.span] = old + layer.from_matrix(left * (s * keep)[:, None] @ right)
            sent += (keep.sum(1).cpu() * sum(layer.matrix_shape)).clamp_max(layer.size)
        return Message(values, sent * values.element_size(), mask=message.mask)
