"""Our side of a comparison: the iterates of a method of this framework."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.agreement import lora
from benchmarks.agreement.problem import (
    BATCH,
    CLASSES,
    COHORTS,
    EPOCHS,
    EVERYONE,
    FEATURES,
    HEAD_EPOCHS,
    HIDDEN,
    PUBLIC,
    PUBLIC_PICKS,
    RATE,
    ROUNDS,
    SIZES,
    Iterates,
    Problem,
    arrays,
    padded,
    public_inputs,
)
from datamodules import Natural, SplitOwn, TensorDataModule
from pfl import FederatedLoop, Trainer
from pfl.clients import ClientData, Clients, LocalSchedule
from pfl.method import FederatedAlgorithm, LoRA, MovedWeights, Network, PublicSamples
from pfl.models.classifier import Classifier
from pfl.rounds.clock import Clock

PURPOSES = {"train": 4, "personal": EPOCHS, "head": HEAD_EPOCHS}


def datamodule() -> TensorDataModule:
    """The clients' samples."""
    inputs, targets, _ = arrays()
    return TensorDataModule(
        torch.from_numpy(np.concatenate(inputs)),
        torch.from_numpy(np.concatenate(targets)),
        client_ids=np.repeat(EVERYONE, SIZES),
        partition=Natural(),
        protocol=SplitOwn(test=0.0, validation=0.0),
    )


def public() -> TensorDataModule:
    """The public inputs, with targets that nobody reads."""
    inputs = torch.from_numpy(public_inputs())
    targets = torch.zeros(PUBLIC, dtype=torch.int64)
    kept = SplitOwn(test=0.0, validation=0.0)
    return TensorDataModule(
        inputs, targets, client_ids=np.zeros(PUBLIC), partition=Natural(), protocol=kept
    )


def problem() -> Problem:
    """The problem, with the order in which this framework takes the samples."""
    data = datamodule()
    data.setup()
    samples, begins = ClientData(data), np.cumsum(SIZES) - SIZES
    orders = {}
    for purpose, epochs in PURPOSES.items():
        schedule = LocalSchedule(BATCH, epochs, purpose=purpose)
        for round_index in range(ROUNDS):
            for i in EVERYONE:
                client = Clients(np.array([i]), round_index, samples, dtype=torch.float64)
                picks = [
                    block.picks[k, 0, : block.counts[k, 0]].numpy() - begins[i]
                    for block in client.step_blocks(schedule)
                    for k in range(len(block.picks))
                ]
                per_epoch = len(picks) // epochs
                visits = [picks[k : k + per_epoch] for k in range(0, len(picks), per_epoch)]
                orders[purpose, round_index, i] = visits
    drawn = PublicSamples(public(), PUBLIC_PICKS)
    for round_index in range(ROUNDS):
        given = drawn.inputs(0, round_index, torch.zeros(1, dtype=torch.float64)).numpy()
        picks = (given[:, :1] == public_inputs()[:, 0]).argmax(1)
        orders["public", round_index, 0] = [[picks]]
    return Problem(*arrays(), orders)


def network() -> nn.Module:
    """The network with its first parameters."""
    body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh())
    made = Classifier(body, nn.Linear(HIDDEN, CLASSES)).double()
    nn.utils.vector_to_parameters(torch.from_numpy(arrays()[2]), made.parameters())
    return made


class Recorder(pl.Callback):
    """The global model `w`, all server and client states, and the personalized models `v`."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, np.ndarray]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, FederatedAlgorithm)
        row = {f"server {k}": _array(v) for k, v in pl_module.named_buffers(recurse=False)}
        states = [self._states(pl_module, i) for i in EVERYONE]
        for name in states[0]:
            row[f"client {name}"] = padded([state[name] for state in states])
        row["w"] = _array(pl_module.global_model)
        if pl_module.has_personalized and not pl_module.members:
            order = np.argsort(-np.array(SIZES), kind="stable")
            clients = next(iter(pl_module.iter_clients()))
            assert (clients.ids == order).all()
            v = np.empty((len(SIZES), len(row["w"])))
            v[order] = _array(pl_module.personalized(clients))
            row["v"] = v
        self.rounds.append(row)

    @staticmethod
    def _states(method: FederatedAlgorithm, i: int) -> dict[str, np.ndarray]:
        """The states of a client."""
        if not method.members:
            rows = {name: method.store.read(name, np.array([i])) for name in method.store.names}
        else:
            client = Clients(
                np.array([i]), method.rounds, method.run.loop.client_data(method.device)
            )
            method.of_client(i).states.read(client)
            rows = client.state
        return {name: _array(values)[0] for name, values in rows.items()}


def run(
    kind: type[FederatedAlgorithm],
    *,
    cohorts: Sequence[Sequence[int]] = COHORTS,
    clock: Clock | None = None,
    of: Network | None = None,
    **settings: Any,
) -> Iterates:
    """The iterates of a method, with the problem's settings where no others are given.

    Args:
        kind: The method.
        cohorts: The clients of each round.
        clock: How fast clients are, of methods that take messages as they come.
        of: Another network.
        settings: The method's arguments.
    """
    settings = {"lr": RATE, "batch_size": BATCH, "local_epochs": EPOCHS} | settings
    recorder = Recorder()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), quiet:
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_epochs=ROUNDS,
            limit_val_batches=0,
            precision="64-true",
            accelerator="cpu",
            callbacks=[recorder],
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_checkpointing=False,
        )
        trace = None if clock else [list(cohort) for cohort in cohorts]
        loop = FederatedLoop(datamodule(), trace=trace, clock=clock)
        trainer.fit(kind(of or network(), **settings), datamodule=loop)
    return {name: np.stack([row[name] for row in recorder.rounds]) for name in recorder.rounds[0]}


def run_lora(
    kind: type[FederatedAlgorithm],
    *,
    head: bool = True,
    freeze_a: bool = False,
    pair: float | None = None,
    **settings: Any,
) -> Iterates:
    """The iterates of a method with LoRA, by the names of `lora.Network.row`, and those of `run`.

    Args:
        kind: The method.
        head: Whether the head is trained.
        freeze_a: As of `LoRA`.
        pair: As of `LoRA`.
        settings: Further arguments of `run`.
    """
    first = lora.first_values()
    body = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
    made = Classifier(body, nn.Linear(FEATURES, CLASSES)).double()
    values = [first[name].flatten() for name in ("base", "base_bias", "head", "head_bias")]
    nn.utils.vector_to_parameters(torch.cat(values), made.parameters())
    what = LoRA(lora.RANK, lora.SCALE * lora.RANK, ["body.0"], head, freeze_a=freeze_a, pair=pair)
    what.residual = issubclass(kind, MovedWeights)
    what.apply(made)
    made.get_parameter("body.0.lora_A").data.copy_(first["A"])
    return lora.named(made, run(kind, of=made, trainable=None, **settings))


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy().copy()
