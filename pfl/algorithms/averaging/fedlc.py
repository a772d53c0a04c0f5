"""FedLC.

Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated Learning with Label Distribution Skew via Logits
Calibration", ICML 2022.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pfl.method import (
    BatchSamples,
    Clients,
    FederatedAlgorithm,
    Network,
    NonNegative,
    Objective,
    label_counts,
    require_classes,
)

ABSENT = 1e-8  # n_i,c of a class that the client does not have


class FedLC(FederatedAlgorithm):
    """FedAvg whose clients train on scores that are lowered more for rarer classes.

    w_i <- w_i - η g_i(w_i), local steps from w on the mean of l(s(x; w_i) - m_i, y), with
    m_i,c = τ n_i,c^(-1/4);  w <- sum_S n_i w_i / sum_S n_i,
    where s are the scores of the sample x, l is the cross entropy (or the user's loss), and n_i,c
    is the number of the client's training samples of class c. To reach the same loss, a sample of a
    rare class must be further ahead of the frequent ones. Only differences of m_i matter: with
    equal n_i,c the loss is the plain one.

    Cost: P values down, P up, as FedAvg; one look at all labels more. No client state. A newcomer
    receives w. Evaluations use the scores as they are.

    Args:
        calibration: τ. 0: FedAvg. The best value depends on the data; FL-bench's default is 1.

    Note:
        A class that the client does not have counts as 1e-8 samples, as in FL-bench: it is lowered
        by 100 τ, so that its score is not pushed down by other classes' samples unless τ is small.
        A sample has one class; regression and several labels are refused.
        The print was not at hand. Written from the paper's abstract and two public implementations,
        FL-bench's `src/client/fedlc.py` and fedsim's: both have all classes in the denominator of
        the softmax, as here. Whether the print's sum includes the sample's own class, and what it
        does with classes that a client lacks, was not checked.

    Example:
        >>> from pfl.models import MLP
        >>> FedLC(MLP(64, (8,)), calibration=0.5).client_state_names
        []
    """

    def __init__(self, network: Network, *, calibration: NonNegative = 1.0, **kwargs: Any) -> None:
        super().__init__(network, **kwargs)
        self.calibration = calibration

    def check_setup(self) -> None:
        self.classes = require_classes(self)

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        if self.calibration == 0:
            return self.local_sgd(clients, w)
        counts = label_counts(clients, self.classes, w).clamp_min(ABSENT)
        margins = self.calibration * counts**-0.25
        return self.local_sgd(clients, w, objective=Objective(self._losses, {"margins": margins}))

    def _losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns the loss of the lowered scores of each sample, [n]."""
        return self.oracle.losses(outputs - own["margins"], samples.targets)
