"""Linear regression whose matrices are a common one of low rank plus a sparse one of each client.

The problem that FedSLR is for, with planted parts, and a callback that measures what its theorems
are about. `PYTHONPATH=examples pfl reproduce results/fedslr-theory` uses both.
"""
# mypy: disable-error-code="override"

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from pfl.algorithms import FedSLR
from pfl.callbacks.optimality import full_gradients
from pfl.datamodules import TheoryProblem
from pfl.datamodules.randomness import generator


class LowRankSparse(TheoryProblem):
    """f_i(W) = 1/(2n) |X_i W' - Y_i|^2 with Y_i = X_i (U + S_i)' + noise N(0, 1), U of low rank.

    U has singular values from 4 to 3; a share of 5 % of S_i's values is ±1, the others are 0. The
    eigenvalues of every Hessian X_i'X_i/n go from 1/4 to 1. The network is
    `LogisticRegression(d, d, bias=False)` with the loss `HalfSquaredError`.

    Args:
        size: d; matrices are d x d.
        noise: The standard deviation of the noise.
        samples: n.
        rank: The rank of U.
        seed: The seed of the problem, which is not that of the run.
    """

    def __init__(
        self,
        num_clients: int = 10,
        size: int = 12,
        noise: float = 0.5,
        samples: int = 100,
        rank: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__(num_clients, (samples, 0, 0), seed=seed)
        self.size, self.noise, self.count, self.rank = size, noise, samples, rank

    def sparse(self, client: int) -> np.ndarray:
        """S_i [d, d]."""
        rng = generator(self.seed, "sparse", client)
        shape = (self.size, self.size)
        return rng.choice([-1.0, 1.0], shape) * (rng.random(shape) < 0.05)

    @property
    def true_models(self) -> Tensor:
        """U + S_i, flat [M, d^2]."""
        draws = generator(self.seed, "low rank").normal(size=(2, self.size, self.rank))
        left, right = np.linalg.qr(draws).Q
        common = (left * np.linspace(4, 3, self.rank)) @ right.T
        return torch.from_numpy(
            np.stack([(common + self.sparse(i)).ravel() for i in range(self.num_clients)])
        )

    def draw(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        rng, n, d = generator(self.seed, "inputs", client), self.count, self.size
        matrix = self.true_models[client].view(d, d).numpy()
        rotation = np.linalg.qr(rng.normal(size=(d, d))).Q * np.geomspace(0.25, 1, d) ** 0.5
        inputs = np.sqrt(n) * np.linalg.qr(rng.normal(size=(n, d))).Q @ rotation.T
        return inputs, inputs @ matrix.T + self.noise * rng.normal(size=(n, d))

    def rule(self) -> str:
        return (
            f"matrices of {self.size} x {self.size}, rank {self.rank} plus 5 % of ±1, "
            f"noise {self.noise:g}"
        )


class LowRankOptimality(Callback):
    """Adds to `metrics.csv`, for the global model w [d, d] of a run on `LowRankSparse`.

    * `train/global/low_rank_gap`: the squared distance of 0 to grad f(w) + λ ∂|w|_*. In the tangent
      space of w = A D B' there is only A B' in ∂|w|_*; outside of it there are all matrices with
      singular values of at most 1.
    * `train/global/rank`: the number of singular values above 1e-6.
    * `train/personalized/support`: of the places where p_i or S_i is not 0, the share where both
      are not 0; the mean over clients.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: FedSLR) -> None:
        data = trainer.datamodule.datamodule  # type: ignore[attr-defined]
        d, w = data.size, pl_module.global_model
        gradient, shares = torch.zeros_like(w), []
        for clients in pl_module.iter_clients("train"):
            gradient += full_gradients(pl_module, clients, w).sum(0) / data.num_clients
            found = clients.state["p"].view(-1, d, d) != 0
            for client, own in zip(clients.ids, found, strict=True):
                planted = torch.from_numpy(data.sparse(client) != 0)
                shares.append(float((own & planted).sum() / (own | planted).sum()))
        penalty = pl_module.low_rank_penalty
        gap, rank = distance(w.view(d, d), gradient.view(d, d), float(penalty))
        numbers = {
            "train/global/low_rank_gap": gap,
            "train/global/rank": rank,
            "train/personalized/support": float(np.mean(shares)),
        }
        pl_module.row.update(numbers)


def distance(w: Tensor, gradient: Tensor, penalty: float) -> tuple[float, int]:
    """Returns the squared distance of 0 to gradient + penalty ∂|w|_*, and w's rank."""
    left, values, right = torch.linalg.svd(w)
    rank = int((values > 1e-6).sum())
    rotated = left.T @ gradient @ right.T
    rotated[range(rank), range(rank)] += penalty
    outside = torch.linalg.svdvals(rotated[rank:, rank:])
    rotated[rank:, rank:] = 0
    return float(rotated.square().sum() + (outside - penalty).clamp(min=0).square().sum()), rank
