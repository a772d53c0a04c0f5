"""A party's own model, from its file and its states: no server is needed, and none is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from pfl import files
from pfl.datamodules import FederatedDataModule
from pfl.deploy.app import read_node
from pfl.deploy.data import OwnSamples
from pfl.deploy.worker import RECEIVED, StateFiles, read_task
from pfl.errors import ConfigError
from pfl.method.exported import has_own_models, network_of
from pfl.report.table import Column, Table, text
from pfl.scores.names import SPLITS


class PartyRun:
    """A party as it was when it received something last.

    Args:
        path: The party's file.
        key: The beginning of a message about what is missing.

    Attributes:
        client: The party's number.
        party: The party, with the states that the server has counted.
        task: What it has received.
        folder: The folder of its states in the run.
    """

    def __init__(self, path: Path, key: str) -> None:
        worker, _ = read_node(path)
        self.client = worker.client
        name = f"{key}: party {self.client}"
        method = worker.build(None).method
        if not has_own_models(method):
            raise ConfigError(
                f"{name}: {type(method).__name__} has one model for all parties, which is in the "
                f"server's run, for pfl export --global"
            )
        found = [*worker.folder.glob(f"*/client-{self.client}/{RECEIVED}")]
        if not found:
            raise ConfigError(
                f"{name} has no model in {worker.folder}: it has trained in no run; start pfl node"
            )
        self.folder = max(found, key=lambda one: one.stat().st_mtime).parent
        stored = StateFiles(self.folder)
        told = stored.received()
        self.task = read_task(told)
        self.party = worker.build(told["classes"])
        states = {}
        counted = told["task"]["counted"]
        if method.store.names and counted is not None:
            states = stored.read(counted)
        self.party.restore(states)

    @property
    def data(self) -> OwnSamples:
        """The party's samples, as a federation in which the others have none."""
        data = self.party.loop.datamodule
        assert isinstance(data, OwnSamples)
        return data

    @property
    def own(self) -> FederatedDataModule:
        """The party's own data module."""
        return self.data.own

    @property
    def place(self) -> int:
        """The party's number within its own data module."""
        if self.own.num_clients == 1:
            return 0
        return self.client

    def network(self) -> nn.Module:
        """Returns a copy of the network with the party's own model."""
        method = self.party.method
        if "w" in self.task.received and method.has_global:
            method.global_model.copy_(self.task.received["w"].reshape(-1))
        return network_of(method, self.party.begun(self.task))


def evaluate_party(path: Path, splits: list[str], out: Path | None = None) -> Path:
    """Scores a party's own model on its own samples; prints a table, and returns its file.

    Args:
        path: The party's file.
        splits: "val", "test" or both.
        out: The folder of the file `scores.csv`; None: `evaluation` in that of the party's states.
    """
    run = PartyRun(path, "evaluate: --party")
    evaluation = run.party.evaluate(run.task, splits)
    rows = []
    for (split, kind), scores in evaluation.scores.items():
        values = {name: float(values[run.client]) for name, values in scores.items()}
        if kind != "global":
            rows.append(
                {"split": split, "model": kind, "samples": int(values.pop("count")), **values}
            )
    if not any(row["samples"] for row in rows):
        raise ConfigError(f"evaluate: --split: party {run.client} has no samples to {splits[0]}")
    folder = out or run.folder / "evaluation"
    files.make_folder(folder, "evaluate: --out")
    files.write_records(folder / "scores.csv", rows)
    cells: list[list[Any]] = [[*row.values()] for row in rows]
    print(text(Table([Column(name) for name in rows[0]], cells)))
    return folder / "scores.csv"


def splits_of(split: str | None) -> list[str]:
    """Returns the splits on which a party scores its model."""
    if split is None:
        return ["test"]
    if split not in SPLITS:
        raise ConfigError(f"evaluate: --split: {split}; with --party it must be val or test")
    return [split]
