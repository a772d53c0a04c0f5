"""FedBN.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pfl.method import Clients, ConfigError, Message, Network, PartlyPersonal

NORMALIZATIONS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LayerNorm,
)


class FedBN(PartlyPersonal):
    """FedAvg of all layers but the normalization layers, which stay with the clients (Algorithm 1).

    w_i <- w_i - η g_i(w_i), local steps, all layers;
    w <- sum_S n_i w_i / sum_S n_i for all parameters that belong to no normalization layer.

    Evaluated: the shared layers with the client's own normalization layers. Cost: all parameters
    but those of normalization layers, down and up. Client state: its normalization layers, with the
    running statistics of BatchNorm. A newcomer has the initial ones.

    Note:
        The paper has BatchNorm; every layer of `torch.nn` that normalizes counts here, by its type
        and not by its name.

    Example:
        >>> network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        >>> method = FedBN(network)
        >>> int(method.personal_part.sum())  # weight and bias of BatchNorm
        8
    """

    def __init__(self, network: Network, **kwargs: Any) -> None:
        if not any(self.is_personal(*each) for each in _owners(network)):
            raise ConfigError(
                f"model.network: {type(network).__name__} has no normalization layer with "
                f"parameters, which FedBN keeps with the clients; use FedAvg"
            )
        super().__init__(network, personal=self.is_personal, buffers="local", **kwargs)

    def is_personal(self, name: str, module: nn.Module) -> bool:
        """Returns whether a parameter belongs to a normalization layer."""
        return isinstance(module, NORMALIZATIONS)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        """Trains all layers; keeps the normalization layers and sends the others."""
        return self.keep_and_send(clients, self.local_sgd(clients, self.personalized(clients)))


def _owners(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the name and the module of each trainable parameter."""
    return [
        (name, module)
        for module in network.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    ]
