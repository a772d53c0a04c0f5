"""FedGen.

Zhu, Hong, Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021.
"""

from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, relu

from pfl.method import (
    Clients,
    ConfigError,
    Count,
    CountOrZero,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    Positive,
    dense,
    features,
    generator,
    label_counts,
    linear_head,
    masked,
    replace_values_in,
    require_classes,
    select_part,
    values_in,
)


class Generator:
    """G(y, ε; θ) = V relu(U (ε, e_y) + a) + c: features of a class y, from noise ε.

    It is a function of its values θ = (U, a, V, c), which come in one row.

    Args:
        classes: The number of classes; e_y is the unit vector of y.
        noise: The length of ε.
        hidden: The length of a.
        features: The number of features.

    Attributes:
        sizes: The numbers of values of U, a, V and c.

    Example:
        >>> make = Generator(classes=3, noise=2, hidden=4, features=5)
        >>> make(torch.zeros(49), torch.tensor([0, 2]), torch.zeros(2, 2)).shape
        torch.Size([2, 5])
    """

    def __init__(self, classes: int, noise: int, hidden: int, features: int) -> None:
        self.classes = classes
        self.noise = noise
        self.hidden = hidden
        self.features = features
        self.sizes = [hidden * (noise + classes), hidden, features * hidden, features]

    def first_values(self, rng: np.random.Generator) -> Tensor:
        """Returns drawn values, as PyTorch draws linear layers."""
        bounds = [(self.noise + self.classes) ** -0.5] * 2 + [self.hidden**-0.5] * 2
        drawn = [rng.uniform(-b, b, size) for b, size in zip(bounds, self.sizes, strict=True)]
        return torch.from_numpy(np.concatenate(drawn))

    def __call__(self, values: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Returns features [..., F] of labels, int64 [...], from noise [..., d]."""
        first, offset, second, last = values.split(self.sizes)
        x = torch.cat([noise, one_hot(labels, self.classes).to(noise)], -1)
        z = relu(x @ first.view(self.hidden, -1).T + offset)
        return z @ second.view(self.features, -1).T + last

    def network(self, values: Tensor) -> nn.Sequential:
        """Returns G as layers of PyTorch, whose input is (ε, e_y)."""
        first = nn.Linear(self.noise + self.classes, self.hidden)
        last = nn.Linear(self.hidden, self.features)
        made = nn.Sequential(first, nn.ReLU(), last).to(values)
        nn.utils.vector_to_parameters(values.clone(), made.parameters())
        return made

    def draw(
        self, rng: np.random.Generator, shares: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns labels [count] of a distribution over classes, and standard normal noise."""
        labels = rng.choice(self.classes, count, p=shares)
        return labels, rng.normal(size=(count, self.noise))


class FedGen(FederatedAlgorithm):
    """FedAvg with features that a generator at the server makes for the clients' heads (Alg. 1).

    With the head h_i of a client's model w_i, and the generator G, which makes features of a label:
    w_i <- w_i - η ∇ [f_i(w_i) + α mean_(y, ε) CE(h_i(G(y, ε; θ)), y)], local steps from the
    received w, with mini-batches of drawn y ~ p̂ and ε ~ N(0, I);
    w <- sum_S n_i w_i / sum_S n_i, and p̂ is the distribution of the labels of all samples in S;
    θ <- θ - η_s Adam's direction of ∇ mean_(y, ε) CE(mean_S h_i(G(y, ε; θ)), y), y ~ p̂, for
    `server_steps` steps; Adam begins anew in each round.
    Heads are linear, so that the mean of the clients' scores is the score of their mean head: the
    server needs no single one. It has the weights of the mean (`weighting: uniform`: the paper's).

    Evaluated: w; with `shared: head` (u_i, h) with the client's last body u_i and the newest head
    h. Shared: w, or h; p̂ and θ. Personal: nothing, or u_i, with the running statistics of
    BatchNorm. Cost: w or h down and up; from the second round on θ and the K numbers of p̂ down; the
    client's shares of its K classes up, which tell the server what labels it has; a pass over the
    labels. Client state: none, or u_i (`body`). Server state: θ, p̂. A newcomer has w, or the
    initial body and the newest head. `pfl export` writes the generator beside the models.

    Args:
        regularization: α. 0: FedAvg, and a generator that nobody uses.
        shared: "model", or "head": bodies stay with the clients.
        generated: Features that a client is given in a local step.
        noise: The length of ε.
        hidden: The width of the generator's hidden layer.
        server_steps: Steps of the server in a round.
        server_batch_size: Features in a step of the server.
        server_lr: η_s.

    Note:
        The head is a linear layer, whose output is that of the network. With `shared: head`
        networks may differ in all but the head (`pfl.models.Family`). A sample has one class;
        regression and several labels are refused. In the first round there are no features yet.
        The print was not at hand: the two losses are those on which descriptions of the method
        agree, and the rest is from three public implementations (the authors', PFLlib's and
        HtFLlib's). Differences of all three: ε is uniform on [0, 1], and BatchNorm follows the
        hidden layer. Of the authors': y is uniform over the classes of the round; the server's loss
        is a mean of the clients' losses, weighted by class, and has a term for diverse features; α
        is 10 and decays by 0.98 a round; clients have a further term with a weight β that decays
        alike, which draws the scores of a sample to those of a made feature of its class; Adam
        lasts over the rounds, with weight decay and a decaying rate. Of PFLlib's and HtFLlib's: p̂
        is that of all clients from the start, and features are used in the first round already.
        PFLlib's Adam lasts, too; HtFLlib shares heads alone, as `shared: head`.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedGen(MLP(64, (8,)), noise=4, hidden=16)
        >>> len(method.generator)  # (4 + 10) * 16 + 16 + 16 * 8 + 8
        376
    """

    losses = ("train", "generated")
    generator: Tensor
    label_shares: Tensor
    head_places: Tensor
    personal_part: Tensor

    def __init__(
        self,
        network: Network,
        *,
        regularization: NonNegative = 1.0,
        shared: Literal["model", "head"] = "model",
        generated: Count = 32,
        noise: Count = 32,
        hidden: Count = 256,
        server_steps: CountOrZero = 50,
        server_batch_size: Count = 128,
        server_lr: Positive = 0.001,
        **kwargs: Any,
    ) -> None:
        if shared == "head":
            kwargs["buffers"] = "local"  # of bodies that stay
        super().__init__(network, **kwargs)
        if regularization:
            self.require_no_aids()
        self.regularization = regularization
        self.shared = shared
        self.generated = generated
        self.server_steps = server_steps
        self.server_batch_size = server_batch_size
        self.server_lr = server_lr
        layer = linear_head(self)
        part = select_part(self.network, self.space, "head", "model.network")
        if int(part.sum()) != sum(p.numel() for p in layer.parameters()):
            raise ConfigError("model.network: the head is frozen; FedGen trains it")
        self.make = Generator(layer.out_features, noise, hidden, layer.in_features)
        self.add_constant("head_places", part.nonzero()[:, 0])
        self.add_constant("personal_part", ~part & (shared == "head"))
        if self.personal_part.any():
            self.add_client_state("body", self._first_body)
        # Both are 0 until clients have told what labels they have.
        self.add_server_state("label_shares", self.global_model.new_zeros(layer.out_features))
        self.add_server_state("generator", self.global_model.new_zeros(sum(self.make.sizes)))

    def _first_body(self) -> Tensor:
        return self.global_model[self.personal_part]

    @property
    def has_global(self) -> bool:  # type: ignore[override]
        """Whether clients share the whole model."""
        return self.shared == "model"

    @property
    def has_personalized(self) -> bool:  # type: ignore[override]
        """Whether clients have bodies of their own."""
        return self.shared == "head"

    @property
    def personalization_penalty(self) -> float | None:
        """That of FedAvg without features; None: there is no problem with a known solution."""
        if self.regularization or self.shared == "head":
            return None
        return super().personalization_penalty

    def check_setup(self) -> None:
        require_classes(self)

    # ---- what travels --------------------------------------------------------------------------

    def download(self) -> dict[str, Message]:
        model = dense(self.global_model)
        if self.shared == "head":
            model = masked(self.global_model, ~self.personal_part)
        made = {"labels": self.label_shares, "generator": self.generator}
        known = bool(self.label_shares.any())
        return {"w": model, **{n: Message(v * known, v.nbytes * known) for n, v in made.items()}}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        v = self._start(clients)
        if clients.round == 0:  # an unsuitable network must show before it is trained
            for rows, batch in islice(clients.rows(slice(1)).samples(limit=1), 1):
                buffers = None if clients.buffers is None else clients.buffers[rows]
                features(self.oracle, v[rows], batch, buffers)
        if self.regularization and clients.received["labels"].any():
            v = self._trained(clients, v)
        else:
            v = self.local_sgd(clients, v)
        model = dense(v)
        if self.shared == "head":
            model = masked(v, ~self.personal_part)
        if "body" in clients.state:
            clients.state["body"] = values_in(self.personal_part, v)
        counts = label_counts(clients, self.make.classes, v)
        shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
        nbytes = shares.shape[1] * shares.element_size()
        return {"w": model, "labels": Message(shares, nbytes, weighting="samples")}

    def personalized(self, clients: Clients) -> Tensor:
        return self._start(clients)

    # ---- the client ----------------------------------------------------------------------------

    def _start(self, clients: Clients) -> Tensor:
        """Returns the received model, with the client's own body where it has one, [C, P]."""
        v = clients.received["w"].repeat(len(clients), 1)
        if "body" in clients.state:
            replace_values_in(self.personal_part, v, clients.state["body"])
        return v

    def _trained(self, clients: Clients, v: Tensor) -> Tensor:
        """Takes local steps on f_i and α times the loss of drawn features; returns the models."""
        theta = clients.received["generator"]
        shares = _distribution(clients.received["labels"])
        draws = [generator(self.seed, "features", clients.round, i) for i in clients.ids.tolist()]
        optimizer = self.local_optimizer(v, self.rate_of(clients))
        for batch in clients.batches(self.local_schedule):
            loss, g = self.oracle.gradient(v, batch, clients.buffers)
            moving = draws[: batch.clients]
            pairs = [self.make.draw(rng, shares, self.generated) for rng in moving]
            labels = torch.from_numpy(np.stack([y for y, _ in pairs])).to(v.device)
            noise = torch.from_numpy(np.stack([e for _, e in pairs])).to(v)
            made = self.make(theta, labels, noise)
            heads = values_in(self.head_places, v[: batch.clients])
            of_features, slope = self._of_heads(heads, made, labels)
            g[: batch.clients].index_add_(1, self.head_places, self.regularization * slope)
            optimizer.step(g, batch.clients)
            self.log_loss("train", loss, batch.counts)
            self.log_loss("generated", of_features, [self.generated] * batch.clients)
        return v

    def _of_heads(self, heads: Tensor, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean cross entropy of heads [A, H] for features [A, B, F], and its slope."""
        heads = heads.detach().requires_grad_()
        with torch.enable_grad():
            scores = self._scores(heads, z)
            losses = cross_entropy(scores.mT, labels, reduction="none").mean(1)
            (slope,) = torch.autograd.grad(losses.sum(), heads)
        return losses.detach(), slope

    def _scores(self, heads: Tensor, z: Tensor) -> Tensor:
        """Returns the scores [A, B, K] that heads [A, H] give features [A, B, F]."""
        matrix, bias = heads.tensor_split([self.make.classes * self.make.features], 1)
        scores = z @ matrix.unflatten(1, (self.make.classes, -1)).mT
        if bias.shape[1]:
            scores = scores + bias[:, None]
        return scores

    # ---- the server ----------------------------------------------------------------------------

    def begin_round(self, round_index: int) -> None:
        """Draws θ before the first round."""
        if round_index == 0:
            self.generator.copy_(self.make.first_values(generator(self.seed, "generator")))

    def server_update(self, received: dict[str, Tensor]) -> None:
        """Takes a step of the server's optimizer; bodies that stay with clients do not move."""
        step = self.global_model - received["w"]
        self.space.vector.grad = torch.where(self.personal_part, 0.0, step)

    def train_server(self, received: dict[str, Tensor]) -> None:
        """Takes p̂ over, and trains the generator on the scores of the mean head."""
        shares = received["labels"].clamp_min(0)  # noise for privacy may be negative
        if not shares.any():
            return
        self.label_shares.copy_(shares / shares.sum())
        p = _distribution(self.label_shares)
        head = values_in(self.head_places, received["w"][None])
        rng = generator(self.seed, "features of the server", self.rounds)

        def gradient(theta: Tensor, step: int) -> tuple[Tensor, Tensor]:
            drawn, noise = self.make.draw(rng, p, self.server_batch_size)
            labels = torch.from_numpy(drawn).to(head.device)
            theta = theta.detach().requires_grad_()
            with torch.enable_grad():
                z = self.make(theta, labels, torch.from_numpy(noise).to(head))
                loss = cross_entropy(self._scores(head, z[None])[0], labels)
                (g,) = torch.autograd.grad(loss, theta)
            return loss.detach(), g

        loss = self.descend_at_server(
            self.generator, gradient, steps=self.server_steps, lr=self.server_lr
        )
        self.log_metric("generator/loss", loss)


def _distribution(shares: Tensor) -> np.ndarray:
    """Returns shares that sum to 1 in double precision."""
    values = shares.double().cpu().numpy()
    p: np.ndarray = values / values.sum()
    return p
