"""FedMD.

Li, Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019 workshop on
Federated Learning, arXiv 1910.03581.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from pfl.method import (
    BatchSamples,
    Clients,
    Count,
    CountOrZero,
    FederatedAlgorithm,
    FederatedDataModule,
    LocalSchedule,
    Message,
    Network,
    Objective,
    PublicSamples,
    batch_for,
    dense,
    public_batches,
)


class FedMD(FederatedAlgorithm):
    """Clients bring their scores of public samples near the mean of all clients (Algorithm 1).

    D_t are n inputs of a public data set, without labels, drawn anew for each round; s(x; w) are
    the scores of an input. In a round a client
    digests: w_i <- w_i - η ∇ mean_x mean_k |s_k(x; w_i) - s̄_k(x)|, epochs over the x of D_(t-1);
    revisits its own samples: w_i <- w_i - η g_i(w_i), local steps;
    sends s(x; w_i) for the x of D_t.
    s̄ <- mean_S s(x; w_i), which all clients of the next round receive.

    Evaluated: w_i. Shared: s̄. Personal: w_i, with the running statistics of BatchNorm. Cost: n K
    scores of K classes, and the number of their round, down from the second round on; n K up; the
    gradients of n inputs for each epoch of digesting, and one forward pass over n inputs. Client
    state: w_i. Server state: s̄. A newcomer has the initial model.

    Args:
        public: A data module; the training samples of all of its clients are the public inputs.
        public_samples: n, or all inputs if there are fewer.
        digest_epochs: Epochs over the n inputs. 0: every client alone.

    Note:
        Networks may differ in all but their outputs (`pfl.models.Family`). Public inputs have the
        shape of the clients'; their targets are not read. Mini-batches have `batch_size` inputs;
        aids of local steps (`clip` and its like) act on the client's own samples alone, of which
        alone are the running statistics.
        Written from the authors' code (diogenes0319/FedMD_clean), where the distance is of scores
        before the softmax, as here. Differences: there a round begins with the scores of all
        clients on D_t, to which they then are drawn; here the clients of the last round have sent
        these at its end, from the same models if all take part. There networks are trained on the
        public data with their labels first (here: `weights`), and on the own ones until they stop
        to improve (here: the first round, in which nothing is digested yet).

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> from pfl.models import MLP
        >>> public = DigitsDataModule(num_clients=1)
        >>> method = FedMD(MLP(64, (8,)), public=public, public_samples=100)
        >>> method.client_state_names
        ['w']
    """

    losses = ("train", "digest")
    has_global = False
    has_personalized = True
    reads_other_samples = True
    consensus: Tensor

    def __init__(
        self,
        network: Network,
        *,
        public: FederatedDataModule,
        public_samples: Count = 1000,
        digest_epochs: CountOrZero = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            network, weighting="uniform", server_optimizer=None, buffers="local", **kwargs
        )
        self.public = PublicSamples(public, public_samples)
        self.digest_epochs = digest_epochs
        self.add_client_state("w", self.first_model)
        # The round of the scores, from 1, and the scores; 0 until there are some.
        self.add_server_state("consensus", self._nothing)

    def _nothing(self) -> Tensor:
        self.public.check(self)
        inputs = self.public.inputs(self.seed, 0, self.global_model)
        outputs = self.oracle.predict(self.global_model, inputs[:1])
        return self.global_model.new_zeros(1 + self.public.size * outputs.numel())

    @property
    def personalization_penalty(self) -> float | None:
        """0 without digesting, every client alone; None: scores are tied, and not the models."""
        return None if self.digest_epochs else 0.0

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        return super().cost(sizes) + self.digest_epochs * self.public.size

    def download(self) -> dict[str, Message]:
        message = dense(self.consensus)
        if not self.consensus[0]:
            message.nbytes = 0
        return {"consensus": message}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        received = clients.received["consensus"]
        start = clients.state["w"]
        known = int(received[0])
        if known and self.digest_epochs and len(clients):
            start = self._digested(clients, start, known - 1, received[1:])
        v = self.local_sgd(clients, start)
        clients.state["w"] = v
        inputs = self.public.inputs(self.seed, clients.round, v)
        scores = v.new_empty(len(clients), len(received) - 1)
        for row in range(len(clients)):
            buffers = None if clients.buffers is None else clients.buffers[row]
            scores[row] = self.oracle.predict(v[row], inputs, buffers).flatten()
        return {"scores": dense(scores)}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.consensus[0] = self.rounds + 1
        self.consensus[1:] = mean["scores"]

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["w"]

    def _digested(
        self, clients: Clients, start: Tensor, round_index: int, scores: Tensor
    ) -> Tensor:
        """Returns models near the scores of the public inputs of a round, [C, P]."""
        inputs = self.public.inputs(self.seed, round_index, start)
        targets = scores.reshape(len(inputs), -1)
        v = start.clone()
        optimizer = self.local_optimizer(v, self.rate_of(clients))
        keys = self.seed, clients.round
        schedule = LocalSchedule(self.batch_size, self.digest_epochs)
        batches = public_batches(inputs, targets, schedule, keys, clients.work)
        for step, (x, s) in enumerate(batches):
            batch = batch_for(clients.ids, x, s, (*keys, step))
            buffers = None if clients.buffers is None else clients.buffers.clone()
            loss, g = self.oracle.gradient(v, batch, buffers, Objective(self._distances))
            optimizer.step(g, batch.clients)
            self.log_loss("digest", loss, batch.counts)
        return v

    def _distances(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns the mean distance of each input's scores from their targets, [n]."""
        return (outputs.flatten(1) - samples.targets).abs().mean(1)
