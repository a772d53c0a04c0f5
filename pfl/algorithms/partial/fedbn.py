"""FedBN.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021.
"""

from typing import Any

from torch import Tensor, nn

from pfl.method import Clients, ConfigError, Message, Network, PartlyPersonal

NORMALIZATIONS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LayerNorm,
    nn.RMSNorm,
)


class FedBN(PartlyPersonal):
    """FedAvg of all layers but the normalization layers, which stay with the clients (Algorithm 1).

    w_i <- w_i - η g_i(w_i), local steps, all layers;
    w <- sum_S n_i w_i / sum_S n_i for all parameters that belong to no normalization layer.

    Evaluated: the shared layers with the client's own normalization layers. Shared: all parameters
    but those of normalization layers; personal: these. Cost: the shared ones, down and up. Client
    state: its normalization layers (the state `head`, a name that `PartlyPersonal` gives), with the
    running statistics of BatchNorm. A newcomer has the initial ones.

    Note:
        Differences from the paper: it has BatchNorm alone, while every layer of `torch.nn` that
        normalizes counts here (its parameters, by the type of the layer and not by its name as in
        the authors' code, which looks for "bn"); and clients are weighted by their numbers of
        samples: `weighting: uniform` is the authors' plain mean.

    Example:
        >>> network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        >>> method = FedBN(network)
        >>> int(method.personal_part.sum())  # weight and bias of BatchNorm
        8
    """

    def __init__(self, network: Network, **kwargs: Any) -> None:
        if isinstance(network, nn.Module) and not any(map(self.is_personal, *_owners(network))):
            raise ConfigError(
                f"model.network: {type(network).__name__} has no normalization layer with "
                f"parameters, which FedBN keeps with the clients; use FedAvg, with buffers: local "
                f"if it has running statistics"
            )
        super().__init__(network, personal=self.is_personal, buffers="local", **kwargs)

    def is_personal(self, name: str, module: nn.Module) -> bool:
        """Returns whether a parameter, of this name and module, stays with the client."""
        return isinstance(module, NORMALIZATIONS)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        return self.keep_and_send(clients, self.local_sgd(clients, self.personalized(clients)))


def _owners(network: nn.Module) -> tuple[list[str], list[nn.Module]]:
    """Returns the name of each trainable parameter, and the module that it belongs to."""
    names = [name for name, p in network.named_parameters() if p.requires_grad]
    return names, [network.get_submodule(name.rpartition(".")[0]) for name in names]
