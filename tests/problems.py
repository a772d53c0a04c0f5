"""Federated problems whose answers are known by hand, and a quiet way to run a method on them.

All of them are linear least squares, f_i(w) = mean over the client's samples of
1/2 |network(x) - y|^2, so that every gradient is one line of NumPy. `matrix_problem` and
`kernel_problem` choose the samples such that f_i(w) = (a_i / 2) |w - A_i|^2 exactly: the Hessian is
a multiple of the identity and almost everything has a closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from datamodules import FederatedDataModule, Natural, Protocol, SplitOwn, TensorDataModule
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FederatedAlgorithm
from pfl.engines.batch import Batch, StepBlock
from pfl.engines.oracle import Oracle
from pfl.stages.stage import Stage


class Problem:
    """Clients with linear least-squares objectives, in float64.

    Args:
        features: For each client [n_i, D]: its inputs, flat.
        targets: For each client [n_i, o].
        make: Makes the network: linear in the features, weights first and in the order [o, D],
            then, where `bias`, o biases.
        input_shape: Of one input; None: flat.
    """

    def __init__(
        self,
        features: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        make: Callable[[], nn.Module],
        input_shape: Sequence[int] | None = None,
        bias: bool = False,
    ) -> None:
        self.features = [np.asarray(x, np.float64) for x in features]
        self.targets = [np.asarray(y, np.float64) for y in targets]
        self.make, self.bias = make, bias
        self.sizes = np.array([len(x) for x in features])
        self.num_clients = len(self.sizes)
        self.shapes = [tuple(p.shape) for p in make().parameters()]
        self.size = sum(int(np.prod(shape)) for shape in self.shapes)
        inputs = torch.from_numpy(np.concatenate(self.features))
        self.datamodule = owned(
            np.repeat(np.arange(self.num_clients), self.sizes),
            inputs if input_shape is None else inputs.view(-1, *input_shape),
            torch.from_numpy(np.concatenate(self.targets)),
        )

    def network(self, w: np.ndarray | float = 0.0) -> nn.Module:
        """The network with initial parameters w, [P] or one number for all."""
        network = self.make().double()
        values = torch.from_numpy(np.broadcast_to(w, self.size).astype(np.float64))
        nn.utils.vector_to_parameters(values, network.parameters())
        return network

    def gradient(self, i: int, w: np.ndarray, samples: np.ndarray | None = None) -> np.ndarray:
        """Of f_i at w [P]; of the mean over some of its samples where they are given."""
        x, y = self.features[i], self.targets[i]
        if samples is not None:
            x, y = x[samples], y[samples]
        width = x.shape[1] * y.shape[1]
        weights = w[:width].reshape(y.shape[1], x.shape[1])
        residual = x @ weights.T - y + (w[width:] if self.bias else 0.0)
        gradient = [(residual.T @ x).ravel() / len(x)]
        if self.bias:
            gradient.append(residual.mean(0))
        return np.concatenate(gradient)


def matrix_problem(
    optima: Sequence[np.ndarray],
    curvatures: Sequence[float] | float = 1.0,
    copies: Sequence[int] | int = 1,
    biases: Sequence[np.ndarray] | None = None,
    seed: int = 0,
) -> Problem:
    """f_i(W, b) = (a_i / 2) |W - A_i|^2 (+ 1/2 |b - c_i|^2) for one linear layer.

    A client has the 2 d samples x = ± sqrt(a d) q_j, with q_j an orthonormal basis of R^d, and
    targets A x + c: the mean of x x' over them is a I, and that of x is 0.

    Args:
        optima: A_i [o, d].
        curvatures: a_i.
        copies: How often each client's samples are repeated: changes n_i, not f_i.
        biases: c_i [o]; None: no bias.
    """
    rng = np.random.default_rng(seed)
    o, d = optima[0].shape
    m = len(optima)
    features, targets = [], []
    a, times = np.broadcast_to(curvatures, m), np.broadcast_to(copies, m)
    for i in range(m):
        q = np.linalg.qr(rng.normal(size=(d, d)))[0]
        x = np.tile(np.sqrt(a[i] * d) * np.concatenate([q, -q]), (times[i], 1))
        features.append(x)
        targets.append(x @ optima[i].T + (0.0 if biases is None else biases[i]))
    bias = biases is not None
    return Problem(features, targets, lambda: nn.Linear(d, o, bias=bias), bias=bias)


def scalar_problem(
    optima: Sequence[float],
    curvatures: Sequence[float] | float = 1.0,
    copies: Sequence[int] | int = 1,
) -> Problem:
    """f_i(w) = (a_i / 2) (w - A_i)^2 for one weight; n_i = 2 copies_i."""
    return matrix_problem([np.array([[float(a)]]) for a in optima], curvatures, copies)


def kernel_problem(
    optima: Sequence[np.ndarray], curvatures: Sequence[float] | float = 1.0
) -> Problem:
    """f_i(w) = (a_i / 2) |w - A_i|^2 for the kernel A_i [o, i, d1, d2] of one convolution.

    Inputs have the kernel's size, so that the convolution is its inner product with them.
    """
    o, *shape = optima[0].shape
    d1, d2 = shape[1:]
    flat = matrix_problem([a.reshape(o, -1) for a in optima], curvatures)

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(shape[0], o, (d1, d2), bias=False), nn.Flatten())

    return Problem(flat.features, flat.targets, make, shape)


def least_squares(
    sizes: Sequence[int], d: int = 3, o: int = 2, bias: bool = False, seed: int = 0
) -> Problem:
    """A linear layer and random, noisy samples: every client has a Hessian of its own."""
    rng = np.random.default_rng(seed)
    features = [rng.normal(size=(n, d)) * rng.uniform(0.5, 1.5, size=d) for n in sizes]
    targets = [x @ rng.normal(size=(d, o)) + rng.normal(size=(len(x), o)) for x in features]
    return Problem(features, targets, lambda: nn.Linear(d, o, bias=bias), bias=bias)


def owned(
    owners: np.ndarray,
    inputs: Tensor,
    targets: Tensor,
    *test: Tensor | None,
    protocol: Protocol | None = None,
) -> TensorDataModule:
    """Samples, and perhaps an official test's samples, by the clients that own them.

    Nothing is held out where there is no protocol.
    """
    held_out = protocol or SplitOwn(test=0.0, validation=0.0)
    x, y = test or (None, None)
    return TensorDataModule(inputs, targets, x, y, owners, partition=Natural(), protocol=held_out)


class History(pl.Callback):
    """What there is after every round, as NumPy arrays.

    Args:
        start: The clients' models at the beginning, and what they have sent of them [M, P]; None:
            the method's.

    Attributes:
        rounds: A dict a round: `w` [P], `down` and `up` [M] (bytes so far), the algorithm's
            server states (all values of a module in one row) and its client states [M, P] by name;
            `w_i` is the client state "w", which has the global model's name.
    """

    def __init__(self, start: np.ndarray | None = None) -> None:
        self.start, self.rounds = start, list[dict[str, np.ndarray]]()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, FederatedAlgorithm)
        if self.start is not None:
            for name in {"w", "message w"} & {*pl_module.states.all_names}:
                pl_module.store.write(name, np.arange(len(self.start)), torch.tensor(self.start))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, FederatedAlgorithm)
        everyone = np.arange(pl_module.store.num_clients)
        row = {name: _array(value) for name, value in pl_module.named_buffers(recurse=False)}
        for name, module in pl_module.named_children():
            if name in pl_module.server_states:
                row[name] = _array(nn.utils.parameters_to_vector(module.parameters()))
        for name in pl_module.store.names:
            row["w_i" if name == "w" else name] = _array(pl_module.store.read(name, everyone))
        row["w"] = _array(pl_module.global_model)
        row["down"] = pl_module.progress.ledger.downlink.copy()
        row["up"] = pl_module.progress.ledger.uplink.copy()
        self.rounds.append(row)

    def __getitem__(self, name: str) -> np.ndarray:
        """One of the entries, over all rounds."""
        return np.stack([row[name] for row in self.rounds])

    def participants(self) -> list[list[int]]:
        """Who received something, round by round."""
        received = np.diff(self["down"], axis=0, prepend=0)
        return [np.flatnonzero(row).tolist() for row in received]


class Received(pl.Callback):
    """What `server_update` got in every round.

    Attributes:
        rounds: The ids of the participants, and the means or rows of messages by name.
    """

    def __init__(self) -> None:
        self.rounds: list[tuple[np.ndarray, dict[str, torch.Tensor]]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, FederatedAlgorithm)
        pl_module.stages.append(_Recorder(pl_module, self.rounds))


class _Recorder(Stage):
    """The last stage of a run: it notes what the server reads, and changes nothing."""

    def __init__(self, method: FederatedAlgorithm, rounds: list[Any]) -> None:
        self._method = method
        self._rounds = rounds

    def read(self, means: dict[str, Tensor], metrics: dict[str, float]) -> None:
        values = {name: value.clone() for name, value in means.items()}
        self._rounds.append((self._method.participant_ids, values))


class _SeenOracle:
    """An oracle that notes the mini-batches it is asked about, in the last of some rounds."""

    def __init__(self, oracle: Oracle, rounds: list[list[tuple[np.ndarray, list[int]]]]) -> None:
        self._oracle = oracle
        self._rounds = rounds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracle, name)

    def gradient(self, w: Tensor, batch: Batch, *args: Any, **kw: Any) -> tuple[Tensor, Tensor]:
        self._see(batch)
        return self._oracle.gradient(w, batch, *args, **kw)

    def descend(self, w: Tensor, blocks: Iterable[StepBlock], *args: Any) -> Any:
        return self._oracle.descend(w, map(self._block_seen, blocks), *args)

    def _block_seen(self, block: StepBlock) -> StepBlock:
        for batch in block:
            self._see(batch)
        return block

    def _see(self, batch: Batch) -> None:
        self._rounds[-1].append((_array(batch.inputs), list(batch.counts)))


class Steps(pl.Callback):
    """Records every call of the oracle during training: the mini-batches of the local steps.

    Attributes:
        rounds: For each round the calls' (inputs, counts) in order.
    """

    def __init__(self) -> None:
        self.rounds: list[list[tuple[np.ndarray, list[int]]]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, FederatedAlgorithm)
        pl_module.oracle = cast(Oracle, _SeenOracle(pl_module.oracle, self.rounds))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rounds.append([])

    def batches(self, problem: Problem, once: bool = False) -> list[list[list[np.ndarray]]]:
        """The samples of each client's steps, round by round, recognised by their values.

        With `once`, steps with the samples of the step before, for gradients at several models,
        count as one.
        """
        return [self._of_clients(problem, calls, once) for calls in self.rounds]

    def _of_clients(self, problem: Problem, calls: Any, once: bool) -> list[list[np.ndarray]]:
        seen: list[list[np.ndarray]] = [[] for _ in range(problem.num_clients)]
        for inputs, counts in calls:
            for rows, count in zip(inputs, counts, strict=True):
                owner = next(
                    i for i, x in enumerate(problem.features) if (x == rows[0]).all(1).any()
                )
                equal = (problem.features[owner][None] == rows[:count, None]).all(2)
                samples, own = equal.argmax(1), seen[owner]
                if not (once and own and np.array_equal(own[-1], samples)):
                    own.append(samples)
        return seen


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy().copy()


def quiet(root: Path, rounds: int, *callbacks: pl.Callback, **settings: Any) -> Trainer:
    """A Trainer of the CPU without a progress bar, which writes into the folder `root`."""
    own: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, **settings}
    return Trainer(max_epochs=rounds, default_root_dir=root, callbacks=list(callbacks), **own)


def run(
    algorithm: FederatedAlgorithm,
    data: Problem | FederatedDataModule,
    rounds: int,
    *,
    root: Path,
    precision: Any = "64-true",
    callbacks: Sequence[pl.Callback] = (),
    strategy: Strategy | None = None,
    **loop_args: Any,
) -> FederatedAlgorithm:
    """Train with a quiet Trainer, which writes into the folder `root`, and return the algorithm.

    On the CPU, or where the strategy says.
    """
    datamodule = data.datamodule if isinstance(data, Problem) else data
    parts = datamodule.partition
    scored = {split: arrays.sizes.any() for split, arrays in parts.splits.items()}
    evaluated = any(scored[split] for split in loop_args.get("evaluate", ("val", "test")))
    settings = dict(precision=precision, limit_val_batches=None if evaluated else 0)
    places = dict(strategy=strategy, accelerator="auto") if strategy else {}
    trainer = quiet(root, rounds, *callbacks, enable_checkpointing=False, **settings, **places)
    trainer.fit(algorithm, datamodule=FederatedLoop(datamodule, **loop_args))
    return algorithm
