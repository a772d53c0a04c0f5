"""`pfl export`: writes models of a run as files for other programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.algorithms import FedGen
from pfl.clients import ClientData
from pfl.configuration.app import FederatedCLI
from pfl.configuration.keys import closest
from pfl.deploy.data import RemoteData
from pfl.deploy.worker import StateFiles
from pfl.errors import ConfigError
from pfl.export import peft
from pfl.export.card import ONNX, card, network_code, readme, sizes
from pfl.export.files import BATCH, factored_network, measure, save_network, save_onnx
from pfl.export.generator import save_generator
from pfl.export.normalization import filled, gap_values, in_own_unit, normalization, normalized
from pfl.files import make_folder, write, write_json
from pfl.method.exported import (
    client_network,
    global_network,
    has_own_models,
    plain_network,
)
from pfl.models.adapters import adapted_layers
from pfl.models.pretrained import Pretrained
from pfl.rounds.checkpoint_io import last_checkpoint

POOL = 4096  # samples in one forward pass
Format = Literal["safetensors", "onnx", "peft"]
# What a run needs in training only: nothing of it may start, and the export needs no GPU.
QUIET = {
    "accelerator": "cpu",
    "devices": "1",
    "num_nodes": "1",
    "strategy": "auto",
    "logger": "false",
    "callbacks": "[]",
    "enable_progress_bar": "false",
    "enable_checkpointing": "false",
}


class RestoredRun(FederatedCLI):
    """The objects of a run as they were at a checkpoint; nothing runs, and nothing is written.

    Args:
        run: The folder of a run, for its last checkpoint; or a checkpoint in it.
        command: The command, whose name begins an error.
    """

    parties: dict[str, Any] | None = None  # what a server knew of its parties

    def __init__(self, run: Path, command: str) -> None:
        checkpoint = run
        if run.is_dir():
            checkpoint = last_checkpoint(run)
        elif len(run.parts) < 2:  # in the current folder, whose parent has no other name
            checkpoint = run.absolute()
        self.folder = checkpoint.parent.parent
        path = self.folder / "config.yaml"
        if not checkpoint.is_file():
            reason = "it must be the folder of a run, or a checkpoint in it"
            if run.is_dir() and path.is_file():
                reason = (
                    f"it has no {checkpoint.relative_to(run)}: no round has ended, or none was "
                    f"kept, as by pfl compare without --keep"
                )
            raise ConfigError(f"{command}: {run}; {reason}")
        if not path.is_file():
            raise ConfigError(
                f"{command}: {run}; the run's configuration {path} is missing; a run that Python "
                f"has built has none (docs/export.md)"
            )
        self.checkpoint = checkpoint
        words = ["predict", "--config", str(path), "--ckpt_path", str(checkpoint)]
        super().__init__([*words, *(f"--trainer.{key}={value}" for key, value in QUIET.items())])

    def run_subcommand(self, subcommand: str) -> None:
        trainer = self.trainer
        loop = self.datamodule
        algorithm = self.model
        trainer.datamodule = loop  # type: ignore[attr-defined]
        loop.trainer = trainer
        algorithm.attach(trainer)
        content = trainer.strategy.checkpoint_io.load_checkpoint(self.checkpoint)
        if isinstance(loop.datamodule, RemoteData):
            parties = content["callbacks"]["Server"]["parties"]
            self.parties = parties
            loop.datamodule.connect(lambda: parties["facts"])
        loop.prepare_data()
        loop.setup("predict")
        algorithm.setup("predict")
        algorithm.on_load_checkpoint(content)
        algorithm.load_state_dict(content["state_dict"])
        algorithm.on_predict_start()
        algorithm.begin_evaluation()

    def take_states(self, client: int, folder: Path | None) -> None:
        """Reads the states of a real party, which no checkpoint of the server has.

        Args:
            client: The party's number.
            folder: Where its worker keeps states.
        """
        store = self.model.store
        if self.parties is None or not store.names:
            return
        counted = self.parties.get("counted", {}).get(client)
        if counted is None:
            return
        if folder is None:
            raise ConfigError(f"export: --states: party {client} has them; give its folder")
        files = StateFiles(folder / self.parties["run"] / f"client-{client}")
        for name, rows in files.read(counted).items():
            store.write(name, np.array([client]), rows)

    @contextmanager
    def models_in_use(self) -> Iterator[None]:
        """Has the models in full precision inside; the process has its threads again after it."""
        try:
            with self.model.in_full_precision():
                yield
        finally:
            self.model.teardown("predict")

    def inputs(self, count: int) -> Tensor:
        """Returns `count` samples as the network gets them in an evaluation, [count, ...]."""
        data = ClientData(self.datamodule.datamodule)
        index = torch.arange(count) % len(data.samples)
        return data.gather(index, self.model.global_model.dtype, np.zeros(count, np.int64))[0]

    def number(
        self, client: int | str, key: str = "export: --client", every: str = ", or all"
    ) -> int:
        """Returns the number of a client that is given by its name, or else by its number.

        The line about any other begins with `key`, and says which other words there are.
        """
        count = self.datamodule.num_clients
        names = self.datamodule.datamodule.client_names or []
        text = str(client)
        if isinstance(client, str) and text in names:  # a hospital 2 may be client 1
            return names.index(text)
        if text.isdecimal() and text == str(int(text)) and int(text) < count:
            return int(text)
        kinds = f"a client's number from 0 to {count - 1}"
        if names:
            kinds = f"a client's name, its number from 0 to {count - 1}"
        hint = closest(str(client), names)
        raise ConfigError(f"{key}: {client}; it must be {kinds}{every}{hint}")

    @property
    def arguments(self) -> Any:
        """The run's complete configuration, with all defaults."""
        return self.config[self.subcommand]


def export(
    checkpoint: str | Path,
    out: str | Path,
    clients: Sequence[int | str] | None = (),
    *,
    with_global: bool = False,
    form: Format = "safetensors",
    factored: bool = False,
    states: str | Path | None = None,
) -> list[Path]:
    """Writes models of a run, a folder each: `client<id>` and `global`; returns the folders.

    The generator of FedGen is written besides, in the folder `generator`.

    A folder has `model.safetensors`, the plain network's state dict, or the graph `model.onnx`,
    `card.json` and `README.md`; with `factored` also `factored.safetensors` or `.onnx`. LoRA and
    dense updates are merged into the weights; the format "peft" has the factors alone.

    Args:
        checkpoint: The folder of a run, for its last checkpoint; or a checkpoint in it.
        out: The folder in which the models get folders.
        clients: Numbers or names of the clients whose models are written; None: all clients. A
            client that is given twice is written once.
        with_global: Writes the global model.
        form: The format of the files.
        factored: Writes models of low rank as thin layers, too, and measures both.
        states: The folder of the states of real parties (`folder` in a party's file).

    Raises:
        ConfigError: There is no such run, client or model.
    """
    run = RestoredRun(Path(checkpoint), "export")
    out = Path(out)
    if states is not None:
        states = Path(states)
    if states is not None and run.parties is None:
        raise ConfigError(
            f"export: --states: {states}, but the run has no real parties, and its checkpoint has "
            f"all states; leave it out"
        )
    with run.models_in_use():
        models: list[int | None] = []
        if with_global:
            models.append(None)
        if clients is None:
            models += range(run.datamodule.num_clients)
        else:
            models += dict.fromkeys(map(run.number, clients))
        for one in models:
            if one is not None:
                run.take_states(one, states)
        folders = [_write(run, out, client, form, factored) for client in models]
        if isinstance(run.model, FedGen):
            folders.append(save_generator(run.model, out / "generator", form == "onnx"))
            print(folders[-1])
        return folders


def _write(run: RestoredRun, out: Path, client: int | None, form: Format, factored: bool) -> Path:
    """Writes the model of a client, or the global one, and returns its folder."""
    data = run.datamodule.datamodule
    name = "global"
    if client is not None:
        name = f"client{client}"
    elif data.scale_targets == "client":
        raise ConfigError(
            "export: --global: the run's targets are scaled by client (data.scale_targets), and "
            "the global model has no scale of its own; give --client"
        )
    if client is None or (data.differs_by_client and not has_own_models(run.model)):
        network = global_network(run.model)  # with the client's numbers
    else:
        network = client_network(run.model, client)
    inputs = run.inputs(BATCH)
    values = sum(p.numel() for p in network.parameters())
    content = card(run.model, run.datamodule, run.arguments, run.folder, inputs, client, values)
    if form == "peft":
        peft.require_adapter(network)
        content["body"] = run.model.body_digest
    else:
        network = plain_network(network)
        if kept := [*adapted_layers(network)]:
            content["adapters"] = kept
    networks = {"model": network}
    if factored:
        networks["factored"] = factored_network(run.model, network, client)
        content["factored"] = measure(network, networks["factored"], inputs)
    folder = out / name
    make_folder(folder, "export: --out")
    used = normalization(data.transforms, client)
    for name, one in networks.items():
        if form == "onnx":
            whole = filled(normalized(one, used, inputs), gap_values(data, client), inputs)
            save_onnx(in_own_unit(whole, data.scale_of(client)), folder / f"{name}.onnx", inputs)
        elif form == "peft" and isinstance(one, Pretrained):
            peft.save_adapter(one, folder)
        else:
            save_network(one, folder / f"{name}.safetensors")
    write_json(folder / "card.json", content)
    code = network_code(content)
    if form == "onnx":
        code = ONNX
    elif form == "peft" and isinstance(network, Pretrained):
        code = peft.adapter_code(network)
    write(folder / "README.md", readme(content, code))
    print(folder)
    if factored:
        print(sizes(content["factored"]))
    return folder
