"""What `pfl deploy` writes and `pfl node` reads: a run's configuration, for server and parties."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace

import pfl
from pfl import files
from pfl.configuration.app import CheckCLI, FederatedCLI
from pfl.configuration.files import read
from pfl.configuration.messages import quiet
from pfl.datamodules.errors import require
from pfl.deploy.channel import Channel
from pfl.deploy.data import OwnSamples
from pfl.deploy.server import Parties, Server
from pfl.deploy.wire import LIMIT
from pfl.deploy.worker import Worker
from pfl.distributed.launch import report_signals
from pfl.errors import ConfigError
from pfl.method.party import Party
from pfl.rounds.loop import FederatedLoop

PRECISIONS = {None: torch.float32, "32-true": torch.float32, "64-true": torch.float64}
APP = Path(__file__).parent / "flower_app"
NODE = ("app", "client", "data", "folder", "socket", "share_sizes", "message_limit")


class _Deployed(CheckCLI):
    """The method, the data and the loop of a configuration, and its text."""

    def instantiate_classes(self) -> None:
        config, text = self.seeded_config()
        self.values: dict[str, Any] = yaml.safe_load(text)
        parts = Namespace(model=config.model, data=config.data, loop=config.loop)
        built = self.subcommand_parser.instantiate(parts)
        self.method, self.data, self.options = built.model, built.data, vars(built.loop)


def write_app(words: list[str], out: Path) -> int:
    """Writes a Flower app for the configuration of a run; returns the number of its parties.

    Args:
        words: The words of `pfl fit`.
        out: The folder of the app.

    Raises:
        ConfigError: The run cannot be one of parties.
    """
    built = _Deployed(["fit", *words])
    loop, values = FederatedLoop(built.data, **built.options), built.values
    _dtype(values)
    parties = loop.datamodule.num_clients
    arguments = {"num_clients": parties, "seed": loop.seed}
    server = {"class_path": "pfl.deploy.data.RemoteData", "init_args": arguments}
    contents = {
        "run.yaml": _yaml({key: part for key, part in values.items() if key != "data"}),
        "data.yaml": _yaml({"data": values["data"]}),
        "server.yaml": _yaml({"data": server}),
    }
    place = {"NAME": values["trainer"]["name"], "RUNS": str(Path("runs").resolve())}
    place |= {"PARTIES": str(parties), "VERSION": pfl.__version__}
    for path in sorted(APP.iterdir()):
        text = path.read_text()
        for name, value in place.items():
            text = text.replace(f"@{name}@", value)
        contents[path.name.removesuffix(".txt")] = text
    files.make_folder(out, "deploy: --out")
    for name, text in contents.items():
        files.write(out / name, text)
    (out / ".flwr").mkdir(exist_ok=True)
    shutil.move(out / "config.toml", out / ".flwr" / "config.toml")
    return parties


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False)


def _dtype(values: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype of the models of a run."""
    precision = values["trainer"].get("precision")
    if str(precision or "32-true") not in PRECISIONS:
        raise ConfigError(f"trainer.precision: {precision}; parties take 32-true or 64-true")
    return PRECISIONS[precision and str(precision)]


def agreement(values: Mapping[str, Any], server: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """Returns what server and parties must have in common, as plain values by name.

    Args:
        values: The content of `run.yaml`.
        server: The content of `server.yaml`.
        network: The network.
    """
    trainer = values["trainer"]
    parts = {
        "pfl": pfl.__version__,
        **{key: values[key] for key in ("seed_everything", "model", "loop")},
        "trainer": {name: trainer.get(name) for name in ("max_epochs", "precision")},
        "data": server["data"]["init_args"],
        "network": {name: list(value.shape) for name, value in network.named_parameters()},
    }
    return dict(_flat(parts, ""))


def _flat(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, part in tree.items():
            yield from _flat(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


# ---- the server ---------------------------------------------------------------------------------


class _ServerCLI(FederatedCLI):
    """`pfl fit` of a server that reaches its clients through a channel."""

    def __init__(self, channel: Channel, app: Path, options: Mapping[str, Any]) -> None:
        self.channel, self.app, self.options = channel, app, options
        words = ["fit", "--config", str(app / "run.yaml"), "--config", str(app / "server.yaml")]
        words += ["--ckpt_path", "auto", f"--trainer.name={options['name']}"]
        super().__init__([*words, f"--trainer.default_root_dir={options['runs']}"])

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        values, server = read(self.app / "run.yaml"), read(self.app / "server.yaml")
        loop, options = self.datamodule, self.options
        agreed = agreement(values, server, self.model.network)
        limits = float(options["timeout"]), int(options["parties"])
        parties = Parties(self.channel, agreed, loop.num_clients, *limits)
        Server(parties).join(self.trainer, self.model, loop)


def run_server(channel: Channel, app: Path, options: Mapping[str, Any]) -> None:
    """Runs the server of an app; the same call again continues from the last checkpoint.

    Args:
        channel: Carries the messages.
        app: The folder that `write_app` has written.
        options: `name` and `runs`, the folder of the run in that of all runs; `timeout`, the
            seconds that a party has for an answer; `parties`, how many must be there at first.
    """
    quiet()
    try:
        with report_signals():
            _ServerCLI(channel, app, options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise


# ---- a party ------------------------------------------------------------------------------------


def read_node(path: Path, client: int | None = None) -> tuple[Worker, Path]:
    """Returns the worker of a party and its socket, from the party's file.

    Args:
        path: The file (docs/deploy.md).
        client: The number of the party; None: that of the file.

    Raises:
        ConfigError: A key is missing, unknown, or has an impossible value.
    """
    given: Any = read(path) if path.is_file() else None
    if not isinstance(given, dict):
        raise ConfigError(f"node: --config: {path} is not a YAML file with keys: {', '.join(NODE)}")
    if unknown := given.keys() - {*NODE}:
        raise ConfigError(f"{path}: {min(unknown)}: the keys are {', '.join(NODE)}")
    defaults = {"app": ".", "folder": "parties", "share_sizes": True, "message_limit": LIMIT}
    given = {**defaults, **given}
    client = given.get("client") if client is None else client
    require("client", client, type(client) is int and client >= 0, "the number of the party")
    assert client is not None
    app, folder = (path.parent / str(given[key]) for key in ("app", "folder"))
    for name in ("run.yaml", "server.yaml"):
        if not (app / name).is_file():
            raise ConfigError(f"{path}: app: {app} has no {name}; give what pfl deploy has written")
    values, server = read(app / "run.yaml"), read(app / "server.yaml")
    count, seed = (server["data"]["init_args"][key] for key in ("num_clients", "seed"))
    dtype = _dtype(values)

    @contextmanager
    def data_file() -> Iterator[str]:
        if given.get("data") is None:
            yield str(app / "data.yaml")
            return
        with tempfile.TemporaryDirectory() as temporary:
            (Path(temporary) / "data.yaml").write_text(_yaml({"data": given["data"]}))
            yield str(Path(temporary) / "data.yaml")

    def build(classes: int | None) -> Party:
        with data_file() as file:
            cli = _Deployed(["fit", "--config", str(app / "run.yaml"), "--config", file])
        data = OwnSamples(cli.data, client, count, seed)
        data.setup()
        data.classes = classes
        # Whom weighted sampling draws depends on the sizes of all parties, and is the server's.
        loop = FederatedLoop(data, **cli.options | {"sampling": "uniform", "seed": seed})
        return Party(cli.method, loop, client, values["trainer"]["max_epochs"], dtype)

    party = build(None)  # refuses samples that the network does not take
    data = party.loop.datamodule
    assert isinstance(data, OwnSamples)
    files.make_folder(folder, f"{path}: folder")
    sizes, limit = bool(given["share_sizes"]), int(given["message_limit"])
    agreed, facts = agreement(values, server, party.method.network), data.facts(sizes=sizes)
    worker = Worker(client, agreed, facts, build, folder, sizes, limit)
    return worker, path.parent / str(given.get("socket", f"{given['folder']}/{client}.sock"))
