"""What `pfl deploy` writes and `pfl node` reads: a run's configuration, for server and parties."""

from __future__ import annotations

import hashlib
import inspect
import os
import pydoc
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace

import pfl
from pfl import files
from pfl.configuration.app import CheckCLI, FederatedCLI
from pfl.configuration.files import callbacks_of, read
from pfl.configuration.messages import quiet
from pfl.current_folder import add_app_folder
from pfl.datamodules import Normalize
from pfl.datamodules.errors import check_keys, check_whole, require_value
from pfl.deploy.app_folder import toml_text, write_folder
from pfl.deploy.channel import Channel
from pfl.deploy.data import (
    SAME,
    OwnSamples,
    own_statistics,
    refuse_scaled_targets,
    sample_kinds,
    told_names,
    unlike,
)
from pfl.deploy.link import Link, own_path
from pfl.deploy.noise import OwnNoise
from pfl.deploy.overview import overview_of, overview_text, versions
from pfl.deploy.own_code import own_modules
from pfl.deploy.parties import Parties
from pfl.deploy.policy import Policy
from pfl.deploy.schema import PROTOCOL, one_line
from pfl.deploy.server import Server, check_callback, check_run
from pfl.deploy.wire import LIMIT
from pfl.deploy.worker import Worker, digest, private_folder
from pfl.distributed.launch import report_signals
from pfl.errors import ConfigError
from pfl.method.facts import RunFacts
from pfl.method.party import Party
from pfl.rounds.loop import FederatedLoop
from pfl.telling import be_heard

PRECISIONS = {None: torch.float32, "32-true": torch.float32, "64-true": torch.float64}
APP = Path(__file__).parent / "flower_app"
CONFIG_TOML = ".flwr/config.toml"
ENDING = 20.0  # seconds that a server which was killed a moment ago has to end
NODE = (
    "app",
    "client",
    "data",
    "folder",
    "socket",
    "accelerator",
    "policy",
    "share_sizes",
    "message_limit",
    "superlink",
)


class _Deployed(CheckCLI):
    """The method, the data and the loop of a configuration, and its text.

    Args:
        words: The words of `pfl fit`.
        folder: Where relative paths of the data module begin.
    """

    def __init__(self, words: list[str], folder: Path) -> None:
        self.folder = folder
        super().__init__(words)

    def instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        _begin_paths(config.data, self.folder)
        config, text = self.seeded_config()
        self.values: dict[str, Any] = yaml.safe_load(text)
        parts = Namespace(model=config.model, data=config.data, loop=config.loop)
        built = self.subcommand_parser.instantiate(parts)
        self.method = built.model
        self.data = built.data
        self.options = vars(built.loop)


def _begin_paths(part: Any, folder: Path) -> None:
    """Makes arguments of a class that are declared as paths absolute, and those of its parts."""
    if not isinstance(part, Namespace):
        return
    arguments = part.get("init_args")
    if arguments is None:
        return
    paths = set()
    for kind in inspect.getmro(pydoc.locate(part.class_path)):  # type: ignore[arg-type]
        own = vars(kind).get("__init__", object.__init__)
        for name, parameter in inspect.signature(own).parameters.items():
            if "PathLike" in str(parameter.annotation):
                paths.add(name)
    for name, value in vars(arguments).items():
        if name in paths and isinstance(value, str):
            arguments[name] = str(folder.absolute() / Path(value).expanduser())
        _begin_paths(value, folder)


def write_app(words: list[str], out: Path) -> int:
    """Writes a Flower app for the configuration of a run; returns the number of its parties.

    Args:
        words: The words of `pfl fit`.
        out: The folder of the app: a new one, an empty one, or one that this has written before.

    Raises:
        ConfigError: The run cannot be one of parties, or a file would be lost.
    """
    built = _Deployed(["fit", *words], Path.cwd())
    values = built.values
    name = values["trainer"]["name"]
    require_value("trainer.name", name, name.isprintable(), "a name within the runs folder")
    dtype = _dtype(values)
    devices = values["trainer"].get("devices", 1)
    holds = devices in (1, "1", "auto", None) or (isinstance(devices, list) and len(devices) == 1)
    require_value("trainer.devices", devices, holds, "1; a server has one process")
    machines = values["trainer"].get("num_nodes", 1)
    require_value("trainer.num_nodes", machines, machines == 1, "1; a server has one process")
    data = built.data
    lacking = own_statistics(data)
    refuse_scaled_targets(data)
    loop = FederatedLoop(data, **built.options)
    check_run(built.method, loop)
    for callback in callbacks_of(values["trainer"]):
        check_callback(pydoc.locate(callback["class_path"]))  # type: ignore[arg-type]
    data.prepare_data()
    loop.setup()
    for place in lacking:
        found = data.transforms.transforms[place]
        such = ""
        if isinstance(found, Normalize):  # else the numbers differ by client
            std = [value or 1.0 for value in found.std or ()]  # a constant channel is divided by 1
            such = f", such as those of this data set: mean: {found.mean}, std: {std}"
        raise ConfigError(
            f"data.transforms: Normalize has no numbers, and each party would take those of its "
            f"own samples; give mean and std in the run's file{such}"
        )
    run = RunFacts(loop, max_rounds=values["trainer"]["max_epochs"])
    # Each party begins so, with its own samples.
    built.method.to(dtype).begin_apart(run, int(data.client_sizes.argmax()), store=False)
    parties = data.num_clients
    arguments = {"num_clients": parties, "seed": loop.seed, **told_names(data)}
    arguments |= sample_kinds(data) | {"classes": data.num_classes}
    server = {"class_path": "pfl.deploy.data.RemoteData", "init_args": arguments}
    words_of_app = {
        "PYTHON": shlex.quote(sys.executable),
        "NAME": toml_text(name),
        "RUNS": toml_text(str(Path("runs").resolve())),
        "PARTIES": str(parties),
        "VERSION": pfl.__version__,
    }
    modules = own_modules(values, Path.cwd(), sys.modules)
    contents = {
        **modules,
        "run.yaml": _yaml({key: part for key, part in values.items() if key != "data"}),
        "data.yaml": _yaml({"data": values["data"]}),
        "server.yaml": _yaml({"data": server}),
    }
    for path in sorted(APP.iterdir()):
        text = re.sub("@([A-Z]+)@", lambda found: words_of_app[found[1]], path.read_text())
        file = path.name.removesuffix(".txt")
        if file == "config.toml":
            file = CONFIG_TOML
        if file in modules:
            raise ConfigError(f"deploy: {file} is a file of the app; give your module another name")
        contents[file] = text
    write_folder(out, contents)
    return parties


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False)


def _dtype(values: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype of the models of a run."""
    precision = values["trainer"].get("precision")
    if precision is not None:
        precision = str(precision)
    if precision not in PRECISIONS:
        raise ConfigError(f"trainer.precision: {precision}; parties take 32-true or 64-true")
    return PRECISIONS[precision]


def agreement(values: Mapping[str, Any], server: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """Returns what server and parties must have in common, as plain values by name.

    Args:
        values: The content of `run.yaml`.
        server: The content of `server.yaml`.
        network: The network.
    """
    trainer = values["trainer"]
    parts = {
        "protocol": PROTOCOL,
        **{key: values[key] for key in ("seed_everything", "model", "loop")},
        "trainer": {name: trainer.get(name) for name in ("max_epochs", "precision")},
        "data": server["data"]["init_args"],
        "network": {name: list(value.shape) for name, value in network.named_parameters()},
    }
    return dict(_flat(parts, ""))


def _flat(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, part in tree.items():
            yield from _flat(part, f"{path}.{key}".removeprefix("."))
    else:
        yield path, tree


# ---- the server ---------------------------------------------------------------------------------


class _ServerCLI(FederatedCLI):
    """`pfl fit` of a server that reaches its clients through a channel."""

    def __init__(self, channel: Channel, app: Path, options: Mapping[str, Any]) -> None:
        self.channel = channel
        self.app = app
        self.options = options
        words = ["fit", "--config", str(app / "run.yaml"), "--config", str(app / "server.yaml")]
        words += ["--ckpt_path", "auto", f"--trainer.name={options['name']}"]
        super().__init__([*words, f"--trainer.default_root_dir={options['runs']}"])

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        values = read(self.app / "run.yaml")
        server = read(self.app / "server.yaml")
        loop = self.datamodule
        agreed = agreement(values, server, self.model.network)
        timeout = _number("timeout", self.options["timeout"])
        enough = check_whole("parties", self.options["parties"])
        require_value("parties", enough, enough <= loop.num_clients, f"at most {loop.num_clients}")
        nodes = _nodes(self.options.get("nodes", ""), loop.num_clients)
        parties = Parties(self.channel, agreed, loop.num_clients, timeout, enough, nodes)
        Server(parties).join(self.trainer, self.model, loop)


def run_server(channel: Channel, app: Path, options: Mapping[str, Any]) -> None:
    """Runs the server of an app; the same call again continues from the last checkpoint.

    Args:
        channel: Carries the messages.
        app: The folder that `write_app` has written.
        options: `name` and `runs`, the folder of the run in that of all runs; `timeout`, the
            seconds that a party has for an answer; `parties`, how many must be there at first;
            `nodes`, the ids of the parties' nodes in order, separated by commas, or "".
    """
    quiet()
    be_heard()
    add_app_folder(app)
    try:
        with report_signals(), _only_server(Path(options["runs"], options["name"]).resolve()):
            _ServerCLI(channel, app, options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise


def _only_server(run: Path) -> AbstractContextManager[None]:
    """Holds the lock of a run's server; a ConfigError if another process has it."""
    name = hashlib.sha256(str(run).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"pfl-server-{os.getuid()}-{name}.lock"
    taken = (
        f"name: another server works for the run {run}; end it first (flwr stop), or give another "
        f"name"
    )
    return files.locked(path, taken, timeout=ENDING)


def _number(key: str, value: Any) -> float:
    """Returns a positive number; text, as of a number in quotes, is none."""
    holds = type(value) in (int, float) and 0 < value < float("inf")
    require_value(key, value, holds, "a positive number of seconds")
    return float(value)


def _nodes(given: Any, count: int) -> list[int] | None:
    """Returns the node of each client; None if none are given."""
    if given == "":
        return None
    words = str(given).replace(" ", "").split(",")
    holds = isinstance(given, str) and len({*words}) == len(words) == count
    holds = holds and all(word.isascii() and word.isdigit() for word in words)
    require_value("nodes", given, holds, f"the ids of {count} nodes, separated by commas")
    return [int(word) for word in words]


# ---- a party ------------------------------------------------------------------------------------


def read_node(path: Path, client: int | None = None) -> tuple[Worker, Path]:
    """Returns the worker of a party and its socket, from the party's file.

    Args:
        path: The file (docs/deploy.md).
        client: The number of the party; None: that of the file.

    Raises:
        ConfigError: A key is missing, unknown, or has an impossible value; or the party's samples
            are not described as those of the run.
    """
    given = _read_options(path)
    if client is None:
        client = given.get("client")
    require_value("client", client, type(client) is int and client >= 0, "the number of the party")
    assert client is not None
    app = own_path(path, given["app"])
    folder = own_path(path, given["folder"])
    socket = own_path(path, given.get("socket", f"{given['folder']}/{client}.sock"))
    for name in ("run.yaml", "server.yaml"):
        if not (app / name).is_file():
            raise ConfigError(f"{path}: app: {app} has no {name}; give what pfl deploy has written")
    values = read(app / "run.yaml")
    server = read(app / "server.yaml")
    shared = server["data"]["init_args"]
    dtype = _dtype(values)
    device = _device(path, given["accelerator"])
    policy = Policy.read(f"{path}: policy", given.get("policy"))

    def build(classes: int | None) -> Party:
        cli = _read_run(path, app, given.get("data"))
        data = OwnSamples(cli.data, client, shared["num_clients"], shared["seed"], shared)
        data.setup()
        data.classes = classes
        # Whom weighted sampling draws depends on the sizes of all parties, and is the server's.
        options = cli.options | {"sampling": "uniform", "seed": shared["seed"]}
        loop = FederatedLoop(data, **options)
        own = None
        if policy.clip is not None:
            own = OwnNoise(policy.clip, policy.noise or 0.0)
        rounds = values["trainer"]["max_epochs"]
        return Party(cli.method, loop, client, rounds, dtype, device, own)

    party = build(None)  # refuses samples that the network does not take
    data = party.loop.datamodule
    assert isinstance(data, OwnSamples)
    facts = data.facts(sizes=given["share_sizes"])
    for key in SAME:
        if shared.get(key) is not None:
            line = unlike(key, facts[key], f"party {client}", shared[key], "the run")
            if line is not None:
                raise ConfigError(f"{path}: data: {line}")
    if not given["share_sizes"] and "classes" in policy.overview:
        raise ConfigError(
            f"{path}: policy.overview: classes tells numbers of samples, and share_sizes is false; "
            f"leave one of them out"
        )
    facts["versions"] = versions()
    facts["overview"] = {}
    if policy.overview:
        overview = overview_of(data)
        facts["overview"] = {key: overview[key] for key in policy.overview}
    facts["noise"] = policy.adds_noise
    with files.run_folder_errors(folder, f"{path}: folder"):
        private_folder(folder)
    agreed = agreement(values, server, party.method.network)
    limit = given["message_limit"]
    sizes = given["share_sizes"]
    worker = Worker(client, agreed, facts, build, folder, sizes, limit, policy)
    worker.overview = partial(overview_of, data)
    return worker, socket


def read_link(path: Path, address: str | None = None) -> Link | None:
    """Returns where the SuperLink of a party is; None: `flower-supernode` brings the messages.

    Args:
        path: The party's file.
        address: Host and port; None: those of the file.
    """
    given = _read_options(path).get("superlink")
    if address is not None:
        given = {**(given or {}), "address": address}
    return Link.read(path, given)


def check_text(worker: Worker) -> str:
    """Returns what the server compares and what a party tells of its samples, a line each.

    An overview of the samples follows, whether the party tells it or not.

    Args:
        worker: The party's worker, whose samples `read_node` has compared with the run's.
    """
    network = {key: x for key, x in worker.agreed.items() if key.startswith("network.")}
    facts = dict(worker.facts)
    sizes = facts.pop("sizes")
    told = [key for key, value in facts.pop("overview").items() if value is not None]
    programs = facts.pop("versions")
    facts.pop("noise")
    if worker.sizes:
        samples = f"{sizes[0]} to train with, {sizes[1]} to validate, {sizes[2]} to test"
    else:
        samples = "not told"
    rows = {
        "versions": ", ".join(f"{name} {version}" for name, version in programs.items()),
        "configuration": digest(worker.agreed),
        "network": digest(network),
        **{key.replace("_", " "): value for key, value in facts.items()},
        "samples": samples,
        "overview told": ", ".join(told) or "nothing (policy.overview)",
    }
    width = max(map(len, rows))
    lines = [f"party {worker.client} agrees with run.yaml and server.yaml:"]
    lines += [f"  {key.ljust(width)}  {one_line(str(value))}" for key, value in rows.items()]
    own = {"here": worker.overview()}
    lines += ["", overview_text(own, facts["class_names"], facts["feature_names"])]
    return "\n".join(lines).rstrip()


def check_server(worker: Worker, link: Link, ready: Callable[[], None], seconds: float) -> str:
    """Compares a party with the server of a run; returns a line that says that they agree.

    Args:
        worker: The party's worker.
        link: Where the SuperLink is.
        ready: Called once the server can ask.
        seconds: How long it may take to ask.

    Raises:
        ConfigError: They differ, or no server has asked.
    """
    lines = worker.check_link(link, ready, seconds)
    if lines is None:
        raise ConfigError(
            f"node: --check: no server has asked at {link.address} within {seconds:g} s; start the "
            f"run (server/run.sh), or give more --seconds"
        )
    for line in lines:
        print(one_line(line), flush=True)
    if lines:
        raise ConfigError(f"node: --check: {len(lines)} values differ from those of the server")
    return f"party {worker.client} agrees with the server at {link.address}"


def _read_options(path: Path) -> dict[str, Any]:
    """Returns the options in a party's file, with defaults for those that are not there."""
    given: Any = None
    if path.is_file():
        given = read(path)
    if not isinstance(given, dict):
        keys = ", ".join(NODE)
        raise ConfigError(f"{path}: it must be a party's file, a YAML file with keys: {keys}")
    check_keys(str(path), given, NODE)
    defaults = {"app": ".", "folder": "parties", "share_sizes": True, "message_limit": LIMIT}
    given = {**defaults, "accelerator": "auto", **given}
    for key in ("app", "folder", "socket"):
        holds = key not in given or isinstance(given[key], str)
        require_value(f"{path}: {key}", given.get(key), holds, "a path")
    sizes = given["share_sizes"]
    require_value(f"{path}: share_sizes", sizes, isinstance(sizes, bool), "true or false")
    check_whole(f"{path}: message_limit", given["message_limit"])
    return given


def _device(path: Path, accelerator: Any) -> torch.device:
    """Returns where a party trains: on its first GPU, or on the CPU.

    Args:
        path: The party's file.
        accelerator: "cpu"; "gpu"; or "auto": a GPU if there is one.

    Raises:
        ConfigError: It is something else, or there is no GPU.
    """
    key = f"{path}: accelerator"
    require_value(key, accelerator, accelerator in ("auto", "cpu", "gpu"), "auto, cpu or gpu")
    is_there = torch.cuda.is_available()
    if accelerator == "gpu" and not is_there:
        raise ConfigError(f"{key}: gpu; PyTorch finds no CUDA GPU here, give auto or cpu")
    if accelerator == "cpu" or not is_there:
        return torch.device("cpu")
    return torch.device("cuda", 0)


def _read_run(path: Path, app: Path, data: Any) -> _Deployed:
    """Returns the method, the options of the loop, and the data of a party.

    Args:
        path: The party's file, at which the paths of `data` begin.
        app: The folder of the app.
        data: The party's own data module; None: that of the app.
    """
    add_app_folder(app)
    words = ["fit", "--config", str(app / "run.yaml")]
    if data is None:
        return _Deployed([*words, "--config", str(app / "data.yaml")], app)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "data.yaml"
        file.write_text(_yaml({"data": data}))
        return _Deployed([*words, "--config", str(file)], path.parent)
