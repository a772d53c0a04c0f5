"""FedSpa.

Huang, Liu, Shen, He, Lin, Tao, "Achieving Personalized Federated Learning with Sparse Local
Models", arXiv 2201.11380, 2022.
"""

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    Clients,
    Count,
    FederatedAlgorithm,
    LocalSchedule,
    Message,
    Network,
    PositiveShare,
    Share,
    generator,
    require,
)

BITS = 8  # of a mask in one stored number: exact in every dtype of client states


class FedSpa(FederatedAlgorithm):
    """Sparse personal models w * m_i: every client finds its own mask m_i of a dense model w.

    Client: v_i <- m_i * (v_i - η g_i(v_i)), local steps from w * m_i;  U_i = w * m_i - v_i.
    Server: w <- w - mean_S U_i.
    Mask: with the rate a_t = a_0 / 2 (1 + cos(π t / T)) of round t of T, the share a_t of the
    values of each layer in m_i whose |v_i| is smallest leaves the mask, and as many of the others
    enter whose |g_i(v_i)| is largest, for one mini-batch.

    The number of values in a mask is the same for all clients and rounds, in every layer. 1-D
    layers (biases, normalization) are always in it.
    Evaluated: w * m_i, with the newest w; there is no other model. Shared: w. Personal: m_i. A
    newcomer has the initial mask.
    Cost: the values in the mask down; up the same, and a bit for every value of the other layers,
    which is the new mask. A mini-batch's gradient a round is added. Client state: m_i, 8 bits in
    one stored number.

    Args:
        density: The share of all P values that is in a mask, 1-D layers included.
        pruning_rate: a_0.
        pruning_rounds: T, after which the masks stay; null: the number of rounds of the run.
        layers: How the values are spread over the layers at the beginning: "erk" (Erdős-Rényi
            kernels), where a layer's density is proportional to the sum of its dimensions over
            their product; or "uniform", the same density everywhere.

    Note:
        All clients begin with the same random mask. Values that have just left a mask may enter it
        again at once. The number that leaves is rounded up. FedSLR's Table 2 counts half of
        FedAvg's bytes for `density: 0.5`, without the bits of the masks. A client without samples
        keeps its mask. The steps of `loop.finetune` move all values, so that the models after them
        are dense.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedSpa(MLP(64, (8,)), density=0.5)
        >>> method.download().nbytes // 4  # of 610
        305
    """

    losses = ("train", "mask")
    has_global = False
    has_personalized = True
    personalization_penalty = None

    def __init__(
        self,
        network: Network,
        *,
        density: PositiveShare = 0.5,
        pruning_rate: Share = 0.5,
        pruning_rounds: Count | None = None,
        layers: Literal["erk", "uniform"] = "erk",
        **kwargs: Any,
    ) -> None:
        super().__init__(network, weighting="uniform", server_optimizer=None, **kwargs)
        fixed = sum(layer.size for layer in self.space.layers if len(layer.shape) < 2)
        self.prunable = [layer for layer in self.space.layers if len(layer.shape) >= 2]
        rest = math.floor(density * self.space.size) - fixed
        least = (fixed + len(self.prunable)) / self.space.size
        holds = rest >= len(self.prunable) > 0
        require("density", density, holds, f"at most 1, and at least {least:.3g} for this network")
        shapes = [layer.shape for layer in self.prunable]
        self.counts = spread(shapes, rest, even=layers == "uniform")
        self.density = density
        self.values = fixed + rest
        self.pruning_rate = pruning_rate
        self.pruning_rounds = pruning_rounds
        self.add_client_state("mask", self._first_mask)

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the sample gradients of a round, [C], with the mini-batch of the new mask."""
        of_mask = sizes if self.batch_size is None else np.minimum(sizes, self.batch_size)
        return super().cost(sizes) + of_mask

    def _first_mask(self) -> Tensor:
        return packed(self.initial_mask()[None])[0]

    def check_setup(self) -> None:
        known = bool(self.pruning_rounds or self.max_rounds)
        require("pruning_rounds", None, known, "given if trainer.max_epochs is not")

    def initial_mask(self) -> Tensor:
        """Returns the common random mask of the beginning, [P], 0 and 1."""
        mask = torch.ones_like(self.global_model)
        for number, (layer, count) in enumerate(zip(self.prunable, self.counts, strict=True)):
            order = generator(self.seed, "mask", number).permutation(layer.size)
            mask[layer.span][torch.from_numpy(order[count:]).to(mask.device)] = 0
        return mask

    def masks(self, clients: Clients) -> Tensor:
        """Returns the clients' masks, [C, P], 0 and 1."""
        return bits_of(clients.state["mask"], self.space.size)

    def rate(self, round_index: int) -> float:
        """Returns a_t of a round (from 0)."""
        rounds = self.pruning_rounds or self.max_rounds
        assert rounds is not None
        passed = min(1.0, round_index / rounds)
        return self.pruning_rate / 2 * (1 + math.cos(math.pi * passed))

    def download(self) -> Message:
        """Returns w, of which each client gets the values in its mask; all masks have one size."""
        return Message(self.global_model, self.values * self.global_model.element_size())

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        mask = self.masks(clients)
        start = w * mask
        v = self.local_sgd(clients, start, mask=mask)
        clients.state["mask"] = packed(self.new_masks(clients, v, mask))
        bits = sum(layer.size for layer in self.prunable)
        nbytes = self.values * v.element_size() + math.ceil(bits / 8)
        return Message(start - v, nbytes, reference=torch.zeros_like(w))

    def new_masks(self, clients: Clients, v: Tensor, mask: Tensor) -> Tensor:
        """Returns the masks [C, P] after the models v [C, P] have left values and found others."""
        schedule = LocalSchedule(self.batch_size, steps=1, purpose="mask", complete=True)
        gradient = torch.zeros_like(v)
        buffers = None if clients.buffers is None else clients.buffers.clone()  # nothing is trained
        for batch in clients.batches(schedule):
            loss, gradient = self.oracle.gradient(v, batch, buffers)
            self.log_loss("mask", loss, batch.counts)
        new = mask.clone()
        for layer, count in zip(self.prunable, self.counts, strict=True):
            own = new[:, layer.span]
            span = layer.span
            moves = min(math.ceil(self.rate(clients.round) * count), layer.size - count)
            own[lowest(v[:, span].abs().masked_fill(own == 0, torch.inf), moves)] = 0.0
            own[lowest(-gradient[:, span].abs().masked_fill(own == 1, -1.0), moves)] = 1.0
        new[clients.empty] = mask[clients.empty]
        return new

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.global_model.sub_(mean["w"])

    def personalized(self, clients: Clients) -> Tensor:
        return clients.received["w"] * self.masks(clients)

    def parameters_personalized(self, clients: Clients, w: Tensor) -> Tensor:
        return torch.full((len(clients),), self.values)


def spread(shapes: list[tuple[int, ...]], total: int, *, even: bool) -> list[int]:
    """Returns how many of `total` values each layer gets, at least one and at most all of its own.

    Args:
        shapes: The shapes of the layers.
        total: The number of values.
        even: True: the same density everywhere; False: Erdős-Rényi kernels.

    Example:
        >>> spread([(8, 64), (10, 8)], 296, even=False)  # of 512 and 80: 72 / 18 = 4, so 240 / 60
        [237, 59]
    """
    sizes = np.array([math.prod(shape) for shape in shapes], float)
    weights = sizes if even else np.array([sum(shape) for shape in shapes], float)
    full = np.zeros(len(sizes), bool)
    while True:  # layers that would get more than they have are full, and the others share the rest
        shares = np.where(full, sizes, 0.0)
        shares[~full] = (total - shares.sum()) * weights[~full] / weights[~full].sum()
        if (shares <= sizes).all():
            break
        full |= shares > sizes
    counts = np.clip(np.floor(shares), 1, sizes).astype(int)
    order = np.argsort(counts - shares, kind="stable")  # the largest fractions first
    while (missing := total - counts.sum()) != 0:
        for layer in order:
            step = int(np.sign(missing))
            if missing and 1 <= counts[layer] + step <= sizes[layer]:
                counts[layer] += step
                missing -= step
    return counts.tolist()


def lowest(values: Tensor, count: int) -> Tensor:
    """Returns which `count` values of each row are the lowest, bool of the shape [C, n].

    Of equal values the first ones are taken. Finding the last of them takes a fraction of the time
    of sorting.

    Example:
        >>> lowest(torch.tensor([[3.0, 1.0, 2.0, 1.0, 2.0]]), 3)
        tensor([[False,  True,  True,  True, False]])
    """
    if not count:
        return torch.zeros_like(values, dtype=torch.bool)
    last = values.kthvalue(count, dim=1, keepdim=True).values
    below = values < last
    equal = values == last
    return below | (equal & (equal.cumsum(1) <= count - below.sum(1, keepdim=True)))


def packed(mask: Tensor) -> Tensor:
    """Returns masks [C, P] of 0 and 1 as numbers of 8 bits each, [C, P / 8 rounded up].

    Example:
        >>> packed(torch.tensor([[1.0, 0.0, 1.0]]))
        tensor([[5.]])
    """
    bits = torch.nn.functional.pad(mask, (0, -mask.shape[1] % BITS)).unflatten(1, (-1, BITS))
    return bits @ (2.0 ** torch.arange(BITS, device=mask.device)).to(mask)


def bits_of(numbers: Tensor, size: int) -> Tensor:
    """Returns the masks [C, size] that `packed` returned as numbers."""
    bits = numbers.to(torch.uint8)[:, :, None] >> torch.arange(BITS, device=numbers.device)
    return (bits & 1).flatten(1)[:, :size].to(numbers)
