"""FedGH.

Yi, Wang, Liu, Shi, Yu, "FedGH: Heterogeneous Federated Learning with Generalized Global Header",
ACM Multimedia 2023.
"""

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from pfl.method import (
    Clients,
    ConfigError,
    Count,
    FederatedAlgorithm,
    Message,
    Network,
    Positive,
    class_sums,
    features,
    generator,
    linear_head,
    masked,
    number_of_classes,
    replace_values_in,
    select_part,
    values_in,
)


class FedGH(FederatedAlgorithm):
    """Personal bodies and a global head that the server trains on class means (Algorithm 1).

    (u_i, h_i) <- (u_i, h_i) - η g_i(u_i, h_i), local steps from the client's own last u_i and the
    received head h; the client keeps u_i.
    z_i,c = mean of u_i(x) over the client's samples x of class c, for its classes c.
    h <- h - η_s ∇_h loss(h(z_i,c), c), SGD of the server over the pairs (z_i,c, c) of the round.

    Evaluated: (u_i, h) with the client's last u_i and the newest h. Shared: h; personal: u_i, with
    the running statistics of BatchNorm. Cost: the head down; K + 1 numbers for each class of the
    client up, with K the number of features. Client state: u_i. Server state: the head. A newcomer
    has the initial body and the newest head.

    Args:
        server_lr: η_s, without decay. The server's SGD has no momentum and no weight decay.
        server_epochs: Passes of the server over the pairs of a round, for runs that repeat those
            of PFLlib and HtFLlib, where it is an option of this name.
        server_batch_size: Pairs in a step of the server, in random order; null: all of them. The
            paper takes one pair at a time; more save time where there are many pairs.

    Note:
        The head is a linear layer, whose output is that of the network. A network of one layer is a
        head without a body, whose clients send the class means of their inputs.
        Differences from the paper: all bodies begin at the network's initial one. For regression,
        which the paper does not have, a client sends one pair, its mean feature and mean target.
        Differences from the authors' code: there the head never moves, because the server's loop
        calls the optimizer of the clients' model; a class mean is the mean of batches' means;
        gradients are clipped; and clients are scored with the heads h_i that they have trained.
        In one public implementation the server's head is the same object as the head of client 0,
        whose local steps then move it.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedGH(MLP(64, (8,)), server_lr=0.1)
        >>> method.download().nbytes // 4  # the head, 8 * 10 + 10
        90
    """

    has_global = False
    has_personalized = True
    personalization_penalty = None
    personal_part: Tensor

    def __init__(
        self,
        network: Network,
        *,
        server_lr: Positive = 0.01,
        server_epochs: Count = 1,
        server_batch_size: Count | None = 1,
        **kwargs: Any,
    ) -> None:
        # The server uses the pairs themselves; a weighted mean of them would have no meaning.
        super().__init__(
            network, weighting="uniform", server_optimizer=None, buffers="local", **kwargs
        )
        self.server_lr = server_lr
        self.server_epochs = server_epochs
        self.server_batch_size = server_batch_size
        linear_head(self)  # refuses any other layer
        part = select_part(self.network, self.space, "head", "model.network")
        if not part.any():
            raise ConfigError("model.network: the head is frozen; FedGH trains it")
        self.add_constant("personal_part", ~part)
        if self.personal_part.any():
            self.add_client_state("body", self._first_body)

    def _first_body(self) -> Tensor:
        return self.global_model[self.personal_part]

    @property
    def head(self) -> nn.Linear:
        """The last layer of the network; its parameters are a part of the global model."""
        return linear_head(self)

    def check_setup(self) -> None:
        self.classes = number_of_classes(self)

    def download(self) -> Message:
        return masked(self.global_model, ~self.personal_part)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        start = self.personalized(clients)
        if clients.round == 0:  # an unsuitable network must show before it is trained
            for rows, batch in islice(clients.rows(slice(1)).samples(limit=1), 1):
                buffers = None if clients.buffers is None else clients.buffers[rows]
                features(self.oracle, start[rows], batch, buffers)
        v = self.local_sgd(clients, start)
        if "body" in clients.state:
            clients.state["body"] = values_in(self.personal_part, v)
        prototypes = self._prototypes(clients, v)
        pair = self.head.in_features + 1
        if self.classes is None:
            pair = self.head.in_features + self.head.out_features
        # Pairs of classes that the client has not are not sent.
        nbytes = prototypes[..., 0].sum(1).long() * pair * w.element_size()
        return Message(prototypes.flatten(1), nbytes, reduce="rows")

    def server_update(self, received: dict[str, Tensor]) -> None:
        rows = received["w"].unflatten(1, (self.classes or 1, -1))
        client, label = rows[..., 0].nonzero(as_tuple=True)
        z, y = rows[client, label, 1:].tensor_split([self.head.in_features], 1)
        self._train_head(z, label if self.classes else y)

    def personalized(self, clients: Clients) -> Tensor:
        v = clients.received["w"].repeat(len(clients), 1)
        if "body" in clients.state:
            replace_values_in(self.personal_part, v, clients.state["body"])
        return v

    def _prototypes(self, clients: Clients, v: Tensor) -> Tensor:
        """Returns, for each class, whether the client has it and the mean of its features.

        Their shape is [C, classes, 1 + K]; for regression [C, 1, 1 + K + T], as the one pair has
        the mean of the T values of the target as well.
        """
        classes = self.classes or 1
        labelled = self.classes is not None
        sums, _ = class_sums(self.oracle, clients, v, classes, labelled=labelled)
        if not labelled:
            targets = v.new_zeros(len(clients), 1, self.head.out_features)
            for rows, batch in clients.samples():
                member = (batch.sample_weights(v.dtype) > 0).to(v)[..., None]  # 0 for padding
                values = batch.targets.reshape(*batch.targets.shape[:2], -1)  # T of each sample
                targets[rows] += member.mT @ values
            sums = torch.cat([sums, targets], 2)
        return sums / sums[..., :1].clamp_min(1)

    @torch.enable_grad()
    def _train_head(self, z: Tensor, y: Tensor) -> None:
        """Takes the server's SGD steps on features z [N, K] and their labels or targets y [N]."""
        parameters = [p for p in self.head.parameters() if p.requires_grad]
        rng = generator(self.seed, "head", self.rounds)
        for _ in range(self.server_epochs):
            order = torch.from_numpy(rng.permutation(len(z))).to(z.device)
            for picks in order.split(self.server_batch_size or max(1, len(z))):
                loss = self.oracle.runner.per_sample(self.head(z[picks]), y[picks]).mean()
                for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    p.data.sub_(g, alpha=self.server_lr)
