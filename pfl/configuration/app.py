"""`fit`, `validate`, `test` and `predict`: LightningCLI for federated runs."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import ArgumentError, Namespace, set_dumper
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import pfl.datamodules
import pfl.models
import pfl.stages.compression  # noqa: F401
from pfl._private import CommandLine, set_types
from pfl.algorithms import FederatedAlgorithm
from pfl.configuration import signatures
from pfl.configuration.files import check_groups, find_configs
from pfl.configuration.messages import check_nulls, complaint
from pfl.datamodules import FederatedDataModule
from pfl.datamodules.ranges import limits
from pfl.distributed.launch import report_signals
from pfl.errors import ConfigError
from pfl.rounds.checkpoint_io import damage_error, refusal_reason
from pfl.rounds.loop import FederatedLoop
from pfl.trainer import Trainer

MAX_SEED = 2**32 - 1  # NumPy's
REFUSALS = (ValueError, TypeError, RuntimeError, ImportError)  # what Lightning's Trainer raises
# Lists of classes in a help, of which one has all 300 of torch.nn, and lines about more help.
LISTS = re.compile(r",\s+known\s+subclasses:[^)]*\)")
RANGE = re.compile(r"Annotated\[(\w+),(\s+)([^]]*)\]")  # of numbers: the type, and its words
OR_NULL = re.compile(r"Optional\[((?:int|float),[^]]*)\]")
MORE_HELP = re.compile(r"(?m)^  --\S+\.help \[?CLASS_PATH_OR_NAME\]?\n(?: {20,}.*\n)+")
BASES = ("lightning.Callback", "pfl.method.FederatedAlgorithm")  # as jsonargparse calls them


class _Dumper(yaml.SafeDumper):
    """Writes a word of an enumeration and a number of NumPy, which may be defaults, as plain ones.

    PyYAML knows `str`, `int` and `float`, and refuses their subclasses.
    """


_Dumper.add_multi_representer(str, lambda dumper, word: dumper.represent_str(str.__str__(word)))
_Dumper.add_multi_representer(int, lambda dumper, number: dumper.represent_int(int(number)))
_Dumper.add_multi_representer(float, lambda dumper, number: dumper.represent_float(float(number)))


def _as_yaml(data: Any) -> str:
    """Returns a configuration as the text of `config.yaml` and of `--print_config`."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


set_dumper("yaml", _as_yaml)


class Parser(LightningArgumentParser):
    """A parser whose help leaves out lists of classes in which all of torch.nn would stand.

    Attributes:
        shown: The last help.
    """

    shown = ""

    def add_class_arguments(
        self, theclass: type, nested_key: str | None = None, *args: Any, **kwargs: Any
    ) -> list[str]:
        """Adds the arguments of a class, with the ranges that its constructors say."""
        names = super().add_class_arguments(theclass, nested_key, *args, **kwargs)
        if isinstance(theclass, type):
            prefix = f"{nested_key}." if nested_key else ""
            known = limits(theclass).items()
            set_types(self, {f"{prefix}{name}": limit.annotation for name, limit in known})
        return names

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Returns the help; that of a class is its options alone."""
        text = super().format_help(*args, **kwargs)
        if str(self.description).startswith("Help for "):
            text = MORE_HELP.sub("", text.partition("\n\n")[2])
        text = LISTS.sub(_without_networks, text)
        text = RANGE.sub(r"\1,\2\3", text)
        Parser.shown = OR_NULL.sub(r"\1, or null", text)
        return Parser.shown


def _without_networks(match: re.Match) -> str:
    """Returns a list of classes, unless torch.nn is in it."""
    if "torch.nn" in match[0]:
        return ")"
    return match[0]


class FederatedCLI(CommandLine):
    """`fit`, `validate`, `test` and `predict` with the keys `trainer, model, data, loop`.

    `seed_everything` is also the seed of the partition, of client sampling and of the order of
    samples, unless `data.init_args.seed` or `loop.seed` say otherwise.
    """

    go_on: str | None = None
    """How a run that a signal has ended continues, in words; None: by `--ckpt_path`."""

    def __init__(self, args: list[str] | None = None, learns: bool = False) -> None:
        self.learns = learns  # whether options are written down, for the next start of the program
        self.parsers: list[LightningArgumentParser] = []  # one for each of `subcommands()`
        self.words = sys.argv[1:]
        if args is not None:
            self.words = args
        super().__init__(
            model_class=FederatedAlgorithm,
            datamodule_class=FederatedDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=Trainer,
            save_config_callback=None,  # RunRecorder writes it into the run's folder
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # our checkpoints have no hyperparameters
            parser_class=Parser,
            parser_kwargs={"exit_on_error": False, "prog": "pfl"},
            args=args,
        )

    trainer: Trainer

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the group `loop`; its datamodule is `data`."""
        parser.add_class_arguments(FederatedLoop, "loop", skip={"datamodule"}, instantiate=False)
        if list(self.subcommands())[len(self.parsers)] != "fit":
            words = "Evaluate the network as it is, without a checkpoint."
            parser.add_argument("--untrained", type=bool, default=False, help=words)
        self.parsers.append(parser)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static in Lightning
        """Returns the subcommand that is named, or all: a parser takes a quarter of a second."""
        known = super().subcommands()
        return {name: known[name] for name in self.words[:1] if name in known} or known

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Creates a parser that raises its errors, so that each becomes one line."""
        return super().init_parser(**{**kwargs, "exit_on_error": False})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses and checks the command line; every mistake becomes a ConfigError."""
        words = find_configs(self.words)
        if self.learns:
            signatures.learn(words, self.parsers[-1], self._known_keys())
        try:
            self.config = parser.parse_args(words)
        except ArgumentError as error:
            line = self._without_value(str(error)) or complaint(error, self._known_keys())
            raise ConfigError(line) from error
        config = self.config[self.config.subcommand]
        check_groups(config, Namespace)
        _check_classes(config)
        check_nulls(self.subcommand_parser, config)
        seed = config.seed_everything
        if seed is False or not 0 <= seed <= MAX_SEED:
            raise ConfigError(
                f"seed_everything: {str(seed).lower()}; it must be a whole number from 0 to "
                f"{MAX_SEED}, which repeats the run"
            )

    def _known_keys(self) -> list[str]:
        """Returns all keys of the command."""
        defaults = (parser.get_defaults(skip_validation=True) for parser in self.parsers)
        return sorted({key for namespace in defaults for key in vars(namespace.as_flat())})

    def _without_value(self, message: str) -> str | None:
        """Returns the line about an option without a value; argparse may name another option."""
        if "expected one argument" not in message:
            return None
        for word, following in pairwise([*self.words, "--"]):
            if word.startswith("--") and "=" not in word and following.startswith("--"):
                return f"{word.removeprefix('--')}: it has no value; give one: {word} VALUE"
        return None

    @property
    def subcommand_parser(self) -> LightningArgumentParser:
        """The parser of the chosen subcommand."""
        return dict(zip(self.subcommands(), self.parsers, strict=True))[self.config.subcommand]

    def check_checkpoint(self) -> None:
        """Checks that `ckpt_path` is a federated run's, without reading the tensors."""
        config = self.config[self.config.subcommand]
        path = config.get("ckpt_path")
        if path is None:
            if config.get("untrained") is False:
                raise ConfigError(
                    f"ckpt_path: null; the network is untrained: {self.config.subcommand} needs "
                    f"the checkpoint of a run, or --untrained true"
                )
            return
        if path == "auto" and self.config.subcommand == "fit":
            return  # the Trainer finds it in the run's folder
        if not Path(path).is_file():
            raise ConfigError(f"ckpt_path: {path or repr(path)} is not a file")
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # whatever a damaged file leads to
            raise damage_error(Path(path), refusal_reason(error)) from error
        if not isinstance(content, dict) or "federated" not in content:
            raise ConfigError(f"ckpt_path: {path} is not a checkpoint of a federated run")

    def seeded_config(self) -> tuple[Namespace, str]:
        """Returns the configuration with the seed of its data, and its text without that seed."""
        config = self.config[self.subcommand]
        # As the user gave it, before the seed is filled in: a saved configuration with another
        # `seed_everything` is another run. null is a value here (batch_size: null).
        given = config.clone()
        given.ckpt_path = None  # the saved configuration runs from the start again
        # It was validated when it was parsed.
        text = self.subcommand_parser.dump(given, skip_unset=False, skip_validation=True)
        data = config.data.init_args
        # One seed for everything, where no other is given, and the class takes one.
        if "seed" in data and data.seed is None:
            data.seed = int(config.seed_everything)
        return config, text

    def instantiate_classes(self) -> None:
        """Wraps the datamodule in the loop and informs the recorder."""
        given = self.seeded_config()[1]
        super().instantiate_classes()
        loop = self.config_init[self.subcommand].loop
        self.datamodule = FederatedLoop(self.datamodule, **vars(loop))
        self.trainer.recorder.config = given

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Instantiates the Trainer; what Lightning refuses becomes a ConfigError."""
        try:
            return super().instantiate_trainer(**kwargs)
        except ConfigError:
            raise
        except (*REFUSALS, MisconfigurationException) as error:
            text = re.sub(r"\[0(?:, \d+){9,}\]", "more", str(error))  # the numbers of all devices
            given = self.config[self.subcommand].trainer
            if re.search("gpu|cuda|devices|backend", text):
                kinds = ("devices", "accelerator")
                text = "; ".join([", ".join(f"{kind}: {given.get(kind)}" for kind in kinds), text])
            raise ConfigError(f"trainer: {text}") from error

    def run_subcommand(self, subcommand: str) -> None:
        """Runs the subcommand; a signal becomes one line that names the round."""
        with report_signals(self.trainer, self.go_on):
            super().run_subcommand(subcommand)


class CheckCLI(FederatedCLI):
    """The command line of `fit` that builds the method, the data module and the loop only."""

    def instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        parts = Namespace(model=config.model, data=config.data, loop=config.loop)
        built = self.subcommand_parser.instantiate(parts)
        self.loop = FederatedLoop(built.data, **vars(built.loop))

    def run_subcommand(self, subcommand: str) -> None:
        pass


class DataCLI(CheckCLI):
    """The command line of `fit` that builds the data module only, with the seed of the run."""

    datamodule: FederatedDataModule

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the arguments of `fit`; the method may be missing, or be incomplete.

        The sizes of a network are known once its data have been looked at.
        """
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.add_argument("--model", type=dict | str | None)
        parser.add_lightning_class_args(FederatedDataModule, "data", subclass_mode=True)

    def instantiate_classes(self) -> None:
        config, _ = self.seeded_config()
        self.datamodule = self.subcommand_parser.instantiate(Namespace(data=config.data)).data


def _check_classes(config: Namespace) -> None:
    """Refuses a method or a callback without `class_path`: it would stand for its base class."""
    callbacks = config.get("trainer.callbacks") or []
    if not isinstance(callbacks, list):
        callbacks = [callbacks]
    pairs = [("trainer.callbacks", entry, "RoundCheckpoint") for entry in callbacks]
    for key, entry, example in [("model", config.get("model"), "FedAvg"), *pairs]:
        path = ""
        if isinstance(entry, Namespace):
            path = entry.get("class_path")
        if path is None or path.endswith(BASES):
            raise ConfigError(f"{key}: class_path must name a class, such as {example}")
