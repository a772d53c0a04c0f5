"""FedTGP.

Zhang, Liu, Hua, Cao, "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive
Learning for Data and Model Heterogeneity in Federated Learning", AAAI 2024.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, one_hot, relu
from torch.nn.utils import skip_init

from pfl.method import (
    BatchSamples,
    Clients,
    Count,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    Objective,
    Positive,
    class_sums,
    distance_to_means,
    generator,
    linear_head,
    require_classes,
    require_trained_features,
)


class TrainablePrototypes(nn.Module):
    """The prototypes of all classes, computed from a vector of each; all values are zero at first.

    Args:
        classes: The number of classes.
        features: The length of a prototype, and of a vector.
        hidden: The width of the layer between them.
    """

    def __init__(self, classes: int, features: int, hidden: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(classes, features))
        self.first = skip_init(nn.Linear, features, hidden)  # which draws nothing
        self.last = skip_init(nn.Linear, hidden, features)
        for layer in (self.first, self.last):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self) -> Tensor:
        """Returns the prototypes, [classes, features]."""
        prototypes: Tensor = self.last(relu(self.first(self.vectors)))
        return prototypes


class FedTGP(FederatedAlgorithm):
    """FedProto with prototypes that the server trains to lie far from each other (Algorithm 1).

    w_i <- w_i - η g_i(w_i), local steps from the client's own last w_i on
    f_i(w_i) + λ mean_(x, c) 1/K |z(x) - P̂_c|^2, with the K features z of the sample x of class c;
    P_i,c = mean of z(x) over the client's samples of class c, with the new w_i.
    P̂_c = F(v_c), with a trainable vector v_c for each class and a network F of two layers. The
    server trains v and F by SGD with the rate η_s, over the pairs (P_i,c, c) of the round, on
    -log(exp(-d_c - δ) / (exp(-d_c - δ) + sum_(c' ≠ c) exp(-d_c'))), with d_c' = |P_i,c - P̂_c'|.
    δ = min(max_c min_(c' ≠ c) |Q_c - Q_c'|, τ), with the mean Q_c of the P_i,c of the round over
    clients, and the classes c, c' of the round.

    Evaluated: w_i. Shared: the P̂_c. Personal: w_i, with the running statistics of BatchNorm. Cost:
    down K values for each class, from the second round on; up K values and the class's number for
    each class of the client; one forward pass over all n_i more. Client state: w_i. Server state: v
    and F, and the P̂_c. A newcomer has the initial model.

    Args:
        penalty: λ. 0: every client alone.
        margin: τ. It is δ itself in a round with one class.
        server_lr: η_s, without decay. The server's SGD has no momentum and no weight decay.
        server_epochs: Passes of the server over the pairs of a round.
        server_batch_size: Pairs in a step of the server, in random order.
        hidden: The width of F's first layer, after which there is ReLU; null: K.

    Note:
        The head is a linear layer, and z is what it gets. Networks may differ in all but K and the
        number of classes (`pfl.models.Family`).
        The print was not at hand: the method is written from the authors' code, whose prototypes
        and δ it has. Differences: there the P_i,c are those of w_i before its local steps, which
        is saved after they are computed; a client's test samples get the class of the nearest
        prototype, and here w_i is scored; distances come from products, which rounding may make
        negative under the root.
        A sample has one class; regression and several labels are refused.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedTGP(MLP(64, (8,)), penalty=1.0)
        >>> method.download()["prototypes"].nbytes  # none are known
        0
    """

    has_global = False
    has_personalized = True
    prototypes: Tensor
    trainable: TrainablePrototypes

    def __init__(
        self,
        network: Network,
        *,
        penalty: NonNegative = 1.0,
        margin: NonNegative = 100.0,
        server_lr: Positive = 0.01,
        server_epochs: Count = 100,
        server_batch_size: Count = 10,
        hidden: Count | None = None,
        **kwargs: Any,
    ) -> None:
        # The server uses the pairs themselves.
        super().__init__(
            network, weighting="uniform", server_optimizer=None, buffers="local", **kwargs
        )
        self.penalty = penalty
        self.margin = margin
        self.server_lr = server_lr
        self.server_epochs = server_epochs
        self.server_batch_size = server_batch_size
        self.add_client_state("w", self.first_model)
        head = linear_head(self)
        width = head.in_features
        self.shape = head.out_features, width
        # All of them are 0 until the server has trained them.
        self.add_server_state("prototypes", self.global_model.new_zeros(self.shape))
        made = TrainablePrototypes(head.out_features, width, hidden or width)
        self.add_server_state("trainable", made)

    @property
    def personalization_penalty(self) -> float | None:
        """0 without a penalty, every client alone; None: λ ties features, and not the models."""
        return None if self.penalty else 0.0

    def check_setup(self) -> None:
        require_classes(self)
        require_trained_features(self, "LocalTrain")

    def begin_round(self, round_index: int) -> None:
        """Draws v and F before the first round, as PyTorch draws such layers."""
        if round_index > 0:
            return
        draw = generator(self.seed, "prototypes")
        vectors = self.trainable.vectors
        vectors.copy_(torch.from_numpy(draw.normal(size=vectors.shape)))
        for layer in (self.trainable.first, self.trainable.last):
            bound = layer.in_features**-0.5
            for values in (layer.weight, layer.bias):
                values.copy_(torch.from_numpy(draw.uniform(-bound, bound, values.shape)))

    def download(self) -> dict[str, Message]:
        nbytes = 0
        if self.prototypes.any():
            nbytes = self.prototypes.nbytes
        return {"prototypes": Message(self.prototypes.flatten(), nbytes)}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        received = clients.received["prototypes"].view(self.shape)
        known = received.any().to(received).expand(self.shape[0], 1)
        table = torch.cat([known, received], 1)
        own = {"prototypes": table.expand(len(clients), *table.shape)}
        v = self.local_sgd(clients, clients.state["w"], objective=Objective(self._losses, own))
        clients.state["w"] = v
        sums, _ = class_sums(self.oracle, clients, v, self.shape[0])
        has = (sums[..., :1] > 0).to(v)
        means = torch.cat([has, sums[..., 1:] / sums[..., :1].clamp_min(1)], 2)
        sent = has.sum((1, 2)).long()  # classes that the client has not are not sent
        nbytes = sent * means.shape[2] * means.element_size()
        return {"means": Message(means.flatten(1), nbytes, reduce="rows")}

    def server_update(self, received: dict[str, Tensor]) -> None:
        """Trains v and F, and computes the prototypes of all classes."""
        rows = received["means"].unflatten(1, (self.shape[0], -1))
        client, label = rows[..., 0].nonzero(as_tuple=True)
        if not len(label):
            return
        self._train(rows[client, label, 1:], label, self.margin_of(rows))
        self.prototypes.copy_(self.trainable())

    def margin_of(self, rows: Tensor) -> float:
        """Returns δ of class means [n, classes, 1 + K], each after whether the client has it."""
        counts = rows[..., 0].sum(0)
        present = counts > 0
        centres = rows[..., 1:].sum(0)[present] / counts[present, None]
        if len(centres) < 2:
            return self.margin
        gaps = (centres[:, None] - centres).norm(dim=2).fill_diagonal_(torch.inf)
        return min(float(gaps.amin(1).max()), self.margin)

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["w"]

    def _losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns f + λ/K |z - P̂_c|^2 of each sample, [n]."""
        away = distance_to_means(own["prototypes"], features, samples.targets)
        return self.oracle.losses(outputs, samples.targets) + self.penalty * away

    @torch.enable_grad()
    def _train(self, z: Tensor, label: Tensor, margin: float) -> None:
        """Takes the server's SGD steps on class means z [N, K] and their classes [N]."""
        own = dict(self.trainable.named_parameters())
        values = {name: p.detach().clone().requires_grad_() for name, p in own.items()}
        rng = generator(self.seed, "pairs", self.rounds)
        for _ in range(self.server_epochs):
            order = torch.from_numpy(rng.permutation(len(z))).to(z.device)
            for picks in order.split(self.server_batch_size):
                prototypes = functional_call(self.trainable, values, ())
                away = (z[picks, None] - prototypes).norm(dim=2)
                away = away + margin * one_hot(label[picks], self.shape[0])
                loss = cross_entropy(-away, label[picks])
                for p, g in zip(
                    values.values(), torch.autograd.grad(loss, [*values.values()]), strict=True
                ):
                    p.data.sub_(g, alpha=self.server_lr)
        for name, p in own.items():
            p.data.copy_(values[name].detach())
