"""A run whose clients are operating-system processes of their own, each with its samples alone.

Nothing but messages of the wire passes between server and clients. The processes last, and serve
run after run of the entries of `METHODS`.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules import FederatedDataModule
from pfl import FederatedLoop, Trainer
from pfl.datamodules.samples.samples import TensorSamples
from pfl.deploy.channel import Answer, Channel
from pfl.deploy.data import OwnSamples, RemoteData
from pfl.deploy.parties import Parties
from pfl.deploy.server import Server
from pfl.deploy.wire import pack, unpack
from pfl.deploy.worker import StateFiles, Worker
from pfl.method import FederatedAlgorithm
from pfl.method.party import Party
from pfl.stages import compression
from pfl.stages.stage import Stage
from tests.algorithms.methods import (
    METHODS,
    differing,
    everything,
    normalized_network,
    small_network,
    small_world,
    tables,
)


def make(name: str, settings: dict[str, Any], normalized: bool) -> FederatedAlgorithm:
    """The method of an entry, as the server and every client make it."""
    network = normalized_network() if normalized else small_network()
    return METHODS[name].make(network, engine="sequential", **settings)


def stages(run: Mapping[str, Any]) -> list[Stage]:
    """The stages of a run, as the server and every client make them."""
    made = []
    for name, arguments in run.get("stages", []):
        made.append(getattr(compression, name)(**arguments))
    return made


def forget_samples(data: FederatedDataModule, but: int) -> FederatedDataModule:
    """Overwrites the samples of all clients but one with NaN, and classes with -1."""
    data.setup()
    own = np.zeros(len(data.samples), bool)
    for split in ("train", "val", "test"):
        own[np.asarray(getattr(data.partition, split)[but], np.int64)] = True
    samples = data.samples
    assert isinstance(samples, TensorSamples)
    for values in (samples.inputs, samples.targets):
        values[torch.from_numpy(~own)] = torch.nan if values.is_floating_point() else -1
    return data


# ---- a client -----------------------------------------------------------------------------------


def make_worker(client: int, folder: Path, run: Mapping[str, Any]) -> Worker:
    """The worker of a client in a run, whose arguments are plain values."""
    world = small_world(classes=METHODS[run["name"]].classes)
    data = OwnSamples(forget_samples(world, client), client, world.num_clients, seed=0)
    data.setup()

    def build(classes: int | None) -> Party:
        data.classes = classes
        method = make(run["name"], run["settings"], run["normalized"])
        loop = FederatedLoop(data, stages=stages(run), **run["loop"])
        device = run.get("device", "cpu")
        return Party(method, loop, client, run["rounds"], torch.float64, device)

    return Worker(client, dict(run), data.facts(sizes=True), build, folder)


def serve(pipe: connection.Connection, client: int) -> None:
    """Answers the messages of one run after another, until the server hangs up."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                return
            request = unpack(message)
            if request["do"] == "join":
                worker = make_worker(client, Path(folder), request["with"])
                pipe.send_bytes(pack(None))
            elif request["do"] == "states":
                files = StateFiles(Path(folder) / request["run"] / f"client-{client}")
                states = files.load(request["counted"], None, request["stateless"])
                pipe.send_bytes(pack({name: rows.numpy() for name, rows in states.items()}))
            else:
                pipe.send_bytes(worker.answer(message))


class Processes(Channel):
    """The processes of some clients, which begin run after run with `join`."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.algorithms.apart"])
        self.pipes, self.processes = [], []
        for client in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, client), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def close(self) -> None:
        """Ends the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.join(10)

    def peers(self) -> set[int]:
        return set(range(len(self.pipes)))

    def ask(self, messages: Mapping[int, bytes], timeout: float) -> dict[int, Answer]:
        for peer, message in messages.items():
            self.pipes[peer].send_bytes(message)
        return {peer: self.pipes[peer].recv_bytes() for peer in messages}

    def join(self, run: dict[str, Any]) -> None:
        """Tells all clients about a new run."""
        self.ask(dict.fromkeys(self.peers(), pack({"do": "join", "with": run})), 0)

    def states(self, parties: Parties, stateless: bool) -> list[dict[str, np.ndarray]]:
        """The states of each client after a run, [1, width] by name; no state: the first one."""
        head = {"do": "states", "run": parties.run, "stateless": stateless}
        requests = {
            client: pack({**head, "counted": counted})
            for client, counted in parties.counted.items()
        }
        answers = {client: unpack(one) for client, one in self.ask(requests, 0).items()}  # type: ignore[arg-type]
        return [answers.get(client, {}) for client in sorted(self.peers())]


# ---- the server ---------------------------------------------------------------------------------


def train_apart(
    channel: Channel,
    run: dict[str, Any],
    trainer: Trainer,
    evaluate: tuple[str, ...],
    ckpt_path: Path | None = None,
    **parties: Any,
) -> tuple[FederatedAlgorithm, Server]:
    """Trains as a server that reaches clients through a channel; the method and the server."""
    method = make(run["name"], run["settings"], run["normalized"])
    count = small_world().num_clients
    own = {"evaluate": evaluate, "stages": stages(run)}
    loop = FederatedLoop(RemoteData(count), **own | run["loop"])
    server = Server(Parties(channel, run, count, **parties))
    server.join(trainer, method, loop)
    trainer.fit(method, datamodule=loop, ckpt_path=ckpt_path)
    return method, server


def differing_apart(
    expected: FederatedAlgorithm, actual: FederatedAlgorithm, states: list[dict[str, np.ndarray]]
) -> set[str]:
    """Names of what is not the same in a simulation and in a run of parties.

    Args:
        expected: The method of the simulation.
        actual: The method of the server.
        states: What each client keeps, [1, width] by name; a state that is missing is the first.
    """
    rows, known = everything(expected), everything(actual)
    for name in expected.store.names:
        # The simulation's store says who has a row; clients that are apart have their own.
        known[f"seen {name}"] = rows[f"seen {name}"]
        first = expected.store.initial(name)[None].numpy()
        of_all = np.concatenate([state.get(name, first) for state in states])
        known[f"client {name}"] = torch.from_numpy(of_all)
    only_apart = {"row dropped", "row comm/uplink_wire_bytes", "row comm/downlink_wire_bytes"}
    assert only_apart <= known.keys()
    different = differing(known, rows) - (only_apart - rows.keys())
    if tables(actual) != tables(expected):
        different.add("tables")
    assert expected.evaluation is not None and actual.evaluation is not None
    for key, numbers in expected.evaluation.scores.items():
        for number, column in numbers.items():
            told = actual.evaluation.scores[key][number]
            if not np.array_equal(told, column, equal_nan=True):
                different.add(f"score {key} {number}")
    return different
