"""FedACS with the step α of its paper's equation (3), and what Theorem 2.1 is about.

`PYTHONPATH=examples pfl reproduce results/fedacs-theory` uses both.
"""
# mypy: disable-error-code="override"

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from pfl.algorithms import FedACS, FederatedAlgorithm
from pfl.algorithms.papers.fedacs import attention, cosine
from pfl.method import Network


class AttentionStep(FedACS):
    """A client begins a round from w_i - α (w_i - sum_j a_ij w_j); FedACS has α = 1.

    Args:
        attention_step: α.
    """

    def __init__(self, network: Network, *, attention_step: float, **kwargs: Any) -> None:
        super().__init__(network, **kwargs)
        self.attention_step = attention_step

    def mixing_weights(self, models: Tensor, round_index: int) -> Tensor:
        mixed = super().mixing_weights(models, round_index)
        alone = torch.eye(len(mixed), dtype=mixed.dtype)
        return alone + self.attention_step * (mixed - alone)


class AttentionGap(Callback):
    """Adds to `metrics.csv` the mean over clients of |∇f_i(w_i) + λ (w_i - sum_j a_ij w_j)|².

    With λ times the second term for a gradient of the attention, as in the paper, this is what
    Theorem 2.1 bounds. All clients must take part with all of their samples as a batch.

    Args:
        penalty: λ.
    """

    def __init__(self, penalty: float = 1.0) -> None:
        self.penalty = penalty

    def on_train_epoch_end(self, trainer: Trainer, pl_module: FederatedAlgorithm) -> None:
        assert isinstance(pl_module, FedACS)
        own, slopes = [], []
        for clients in pl_module.iter_clients("train"):
            models = clients.state["w"]
            for _, batch in clients.samples(limit=int(clients.sizes.max())):
                slopes.append(pl_module.oracle.gradient(models, batch, clients.buffers)[1])
            own.append(models)
        w, gradients = torch.cat(own), torch.cat(slopes)
        mixed = attention(cosine(w), pl_module.quantile).to(w) @ w
        gap = (gradients + self.penalty * (w - mixed)).square().sum(1).mean()
        pl_module.row |= {"train/personalized/attention_gap": float(gap)}
