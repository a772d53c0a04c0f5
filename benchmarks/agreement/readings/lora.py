"""What other implementations of LoRA's methods compute instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pfl.algorithms import FedAvg, FedExLoRA, FlexLoRA, FLoRA, RoLoRA
from pfl.algorithms.averaging.fedopt import AdaptiveServer
from pfl.method import Clients, Message, PartlyPersonal, masked, replace_values_in


class TransposedFedExLoRA(FedExLoRA):
    """The transpose of the residual is added to the frozen weight."""

    def add_residual(self, new: Tensor, pair: Any, change: Tensor) -> None:
        super().add_residual(new, pair, change.T)


class FirstClientsFedAvg(FedAvg):
    """The new factors are p_1 times those of the first client of the cohort."""

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        v = self.local_sgd(clients, w)
        v[torch.from_numpy(clients.ids != clients.ids.min())] = 0
        return v


def carried(kind: type[PartlyPersonal]) -> type[PartlyPersonal]:
    """There is one set of personal values, which every client has from the last that trained."""

    class Carried(kind):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.last = [self.global_model[self.personal_part].clone()]

        def client_update(self, clients: Clients, w: Tensor) -> Message:
            v = w.repeat(len(clients), 1)
            for row in clients.ids.argsort():
                one, v_one = clients.rows(slice(row, row + 1)), v[row : row + 1]
                replace_values_in(self.personal_part, v_one, self.last[0][None])
                v[row] = self.local_sgd(one, v_one)[0]
                self.last = [v[row, self.personal_part]]
            return masked(v, ~self.personal_part)

        def personalized(self, clients: Clients) -> Tensor:
            v = clients.received["w"].repeat(len(clients), 1)
            replace_values_in(self.personal_part, v, self.last[0].expand(len(clients), -1))
            return v

    return Carried


class UnscaledFLoRA(FLoRA):
    """Clients begin with the same A in every round, and the products are added without s."""

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        return masked(self.local_sgd(clients, w, part=~self.residual), ~self.residual)

    def add_residual(self, new: Tensor, pair: Any, change: Tensor) -> None:
        super().add_residual(new, pair, change / pair.scale)


class MixedFedExLoRA(FedExLoRA):
    """The mean of products is weighted, those of factors are not; the change lacks s."""

    def client_update(  # type: ignore[override]
        self, clients: Clients, w: Tensor
    ) -> dict[str, Tensor]:
        v = self.local_sgd(clients, w, part=~self.residual)
        sizes = torch.from_numpy(clients.sizes).to(w)[:, None]
        return {"w": v, "plain": torch.cat([v / sizes, 1 / sizes], 1)}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        total = mean.pop("plain")  # p_i / n_i is the same for all
        super().server_update(mean | {"w": total[:-1] / total[-1]})

    def add_residual(self, new: Tensor, pair: Any, change: Tensor) -> None:
        super().add_residual(new, pair, change / pair.scale)


class RootedFlexLoRA(FlexLoRA):
    """B = U S^(1/2) / s and A = V', of U S V' = s sum_S p_i B_i A_i."""

    def server_update(self, mean: dict[str, Tensor]) -> None:
        new = mean["w"].clone()
        for pair, product in zip(self.factors, self.products(mean), strict=True):
            a, b = pair.of(new)
            u, s, v = torch.linalg.svd(product, full_matrices=False)
            a.copy_(v[: len(a)])
            b.copy_((u * s.sqrt())[:, : len(a)] / pair.scale)
        self.global_model.copy_(new)


class CarriedRoLoRA(RoLoRA):
    """A comes first; in a round each client begins with the factor that the one before it left."""

    def moving(self, round_index: int) -> Tensor:
        return super().moving(round_index + 1)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        part, v, model = self.moving(clients.round), w.repeat(len(clients), 1), w
        for row in clients.ids.argsort():
            model = v[row] = self.local_sgd(clients.rows(slice(row, row + 1)), model, part=part)[0]
        return masked(v, part)


def first_deltas(kind: type[AdaptiveServer]) -> type[AdaptiveServer]:
    """m begins at the first Δ instead of 0, and m^2 takes the place of Δ^2."""

    class FirstDeltas(kind):  # type: ignore[valid-type,misc]
        def server_update(self, mean: dict[str, Tensor]) -> None:
            delta = mean["w"] - self.global_model
            self.m.copy_(torch.lerp(delta, self.m, self.betas[0]) if self.rounds else delta)
            self.v.copy_(self.second_moment(self.m.square()))
            self.global_model.add_(self.m / (self.v.sqrt() + self.tau), alpha=self.server_lr)

    return FirstDeltas
