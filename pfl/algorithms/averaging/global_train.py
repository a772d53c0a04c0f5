"""GlobalTrain: one model is trained on all samples in one place, the end without privacy."""

from typing import Any

from torch import Tensor

from pfl.method import Clients, FederatedAlgorithm, Message, Network


class GlobalTrain(FederatedAlgorithm):
    """SGD on the pooled training samples of all clients, as if they lay in one place.

    w <- w - η g(w), where g is the gradient of a mini-batch of the pooled samples.

    This is the upper end of a comparison and no federated method. A round is `local_epochs` passes
    over the pooled samples in mini-batches of `batch_size`, or `local_steps` steps; `batch_size:
    null` is gradient descent on sum_i n_i f_i / sum_i n_i. The cohort does not matter: every round
    trains on the samples of all clients, unless its cohort is empty. A round of a method with few
    clients per round therefore takes fewer sample gradients (`train/samples`) than a round here.
    Evaluated: the global model w, which is also a newcomer's model. Personal: nothing.
    Cost: nothing is sent. No client state, no server state beside w.

    Note:
        FedCLUP's paper calls FedAvg GlobalTrain; this is another method. A single client, with id
        0, owns all samples while it trains, so that `participants` is 1. The steps follow one
        another, and one process takes them: more devices make nothing faster. BatchNorm's running
        statistics are those of this training. The optimizer starts anew in every round.

    Example:
        >>> from pfl.models import MLP
        >>> method = GlobalTrain(MLP(64, (8,)), lr=0.05, local_epochs=2)
        >>> method.download().nbytes
        0
    """

    pooled = True

    def __init__(self, network: Network, **kwargs: Any) -> None:
        # The mean over the only client; uniform weights leave its model exactly as it is.
        super().__init__(
            network, buffers="average", weighting="uniform", server_optimizer=None, **kwargs
        )

    def download(self) -> Message:
        """Returns a message without bytes: model and samples are in the same place."""
        return Message(self.global_model, 0)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        return Message(self.local_sgd(clients, w), 0)

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.global_model.copy_(mean["w"])
