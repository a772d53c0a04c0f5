"""MOON.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from pfl.method import (
    BatchSamples,
    Clients,
    FederatedAlgorithm,
    Network,
    NonNegative,
    Objective,
    Positive,
    require_trained_features,
)


class MOON(FederatedAlgorithm):
    """FedAvg, and a contrastive loss between the features of three models (Algorithm 1).

    w_i <- w_i - η g_i(w_i), local steps from w on f_i(w_i) + μ mean_x l(x), with
    l(x) = -log(exp(cos(z, z_w) / τ) / (exp(cos(z, z_w) / τ) + exp(cos(z, z_p) / τ))),
    where z, z_w and z_p are the features of x by w_i, by the received w, and by the model p_i that
    the client sent last;  p_i <- w_i;  w <- sum_S n_i w_i / sum_S n_i.

    Cost: P values down, P up, as FedAvg; two forward passes more in a local step. Client state:
    p_i. A newcomer receives w.

    Args:
        contrast: μ. The paper's best are 5 with CIFAR-10, and 1 with CIFAR-100 and Tiny-ImageNet.
        temperature: τ.

    Note:
        Features are what the network's head gets. The paper puts a projection head of two layers
        before the last one; here the network has one only if its body ends with one. A network of
        one layer has its inputs as features, so that nothing is contrasted.
        A client that has sent nothing has the initial model as p_i. In the first round z_w = z_p,
        and the contrast has the gradient 0. The print leaves this open; in the authors' code the
        first round has no contrast either, but a client that is sampled later begins with random
        values of its own. The older models run in evaluation mode, with the running statistics of
        BatchNorm that the client has now. The authors' code offers several older models; the paper
        has one.

    Example:
        >>> from pfl.models import MLP
        >>> method = MOON(MLP(64, (8,)), contrast=5.0, temperature=0.5)
        >>> method.client_state_names
        ['previous']
    """

    def __init__(
        self,
        network: Network,
        *,
        contrast: NonNegative = 1.0,
        temperature: Positive = 0.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.contrast = contrast
        self.temperature = temperature
        self.add_client_state("previous", self.first_model)

    def check_setup(self) -> None:
        require_trained_features(self, "FedAvg")

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        older = {"received": w, "previous": clients.state["previous"]}
        v = self.local_sgd(clients, w, objective=Objective(self._losses, older=older))
        clients.state["previous"] = v
        return v

    def _losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns f + μ l of each sample, [n]."""
        near, far = (
            cosine_similarity(features.flatten(1), own[name].features.flatten(1))
            for name in ("received", "previous")
        )
        contrast = softplus((far - near) / self.temperature)  # -log of the share of the near one
        return self.oracle.losses(outputs, samples.targets) + self.contrast * contrast
