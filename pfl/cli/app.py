"""The command line: LightningCLI for federated runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import datamodules  # noqa: F401 (makes its classes known by their short names)
import models  # noqa: F401
from datamodules import FederatedDataModule
from pfl.algorithms import FederatedAlgorithm
from pfl.cli.messages import check_nulls, one_line
from pfl.distributed.launch import told_of_signals
from pfl.errors import ConfigError
from pfl.rounds.loop import FederatedLoop
from pfl.trainer import Trainer

DESCRIPTION = (
    "Personalized federated learning. One more subcommand, `reproduce`, runs and draws a figure "
    "of a paper; `reproduce --list` names them."
)


class FederatedCLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict` with the keys `trainer, model, data, loop`.

    `seed_everything` is also the seed of the partition, of client sampling and of the order of
    samples, unless `data.init_args.seed` or `loop.seed` say otherwise.
    """

    def __init__(self, args: list[str] | None = None) -> None:
        super().__init__(
            model_class=FederatedAlgorithm,
            datamodule_class=FederatedDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=Trainer,
            save_config_callback=None,  # RunRecorder writes it into the run's folder
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_kwargs={
                "exit_on_error": False,
                "description": DESCRIPTION,
                "prog": "python -m pfl",
            },
            args=args,
        )

    trainer: Trainer

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `loop`, whose datamodule is `data`."""
        parser.add_class_arguments(FederatedLoop, "loop", skip={"datamodule"}, instantiate=False)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """All parsers raise instead of leaving, so that an error becomes one line."""
        return super().init_parser(**{**kwargs, "exit_on_error": False})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """An unknown key is answered with the known one that looks most like it."""
        words = sys.argv[1:] if args is None else args
        _check_yaml(words)
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            if words[:1] and words[0].partition("=")[0] in ("--config", "-c"):
                names = ", ".join(self._subcommand_parsers)
                raise ConfigError(f"config: give it behind one of {names}") from error
            keys = {a.dest for p in self._subcommand_parsers.values() for a in p._actions}
            raise ConfigError(one_line(error, sorted(keys))) from error
        subcommand = self.config.subcommand
        config = self.config[subcommand]
        _check_groups(config)
        check_nulls(self._parser(subcommand), config)
        if config.seed_everything is False:
            raise ConfigError(
                "seed_everything: false; it must be a whole number, which repeats the run"
            )

    def _parse_ckpt_path(self) -> None:
        # Lightning reads the file here for hyperparameters, which our checkpoints do not have.
        path = self.config[self.config.subcommand].get("ckpt_path")
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"ckpt_path: {path or repr(path)} is not a file")
        if path is not None:
            try:  # memory-mapped: this reads names, not tensors
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:  # whatever a damaged file leads to
                raise ConfigError(f"ckpt_path: {path} is not a checkpoint") from error
            if not isinstance(content, dict) or "federated" not in content:
                raise ConfigError(f"ckpt_path: {path} is not a checkpoint of a federated run")

    def _set_seed(self) -> None:
        with _about("seed_everything"):
            super()._set_seed()

    def instantiate_classes(self) -> None:
        """Put the loop around the data, and give the recorder the configuration."""
        config = self.config[self.subcommand]
        # As the user gave it, before the seed is filled in: a saved configuration with another
        # `seed_everything` is another run. null is a value here (batch_size: null).
        given = self._parser(self.subcommand).dump(config, skip_unset=False)
        data = config.data.init_args
        if data.get("seed") is None:  # one seed for everything, where no other is given
            data.seed = int(config.seed_everything)
        super().instantiate_classes()
        self.datamodule = FederatedLoop(self.datamodule, **config.loop.as_dict())
        self.trainer.recorder.config = given

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """What Lightning's Trainer refuses becomes one line."""
        with _about("trainer"):
            return super().instantiate_trainer(**kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        with told_of_signals(self.trainer):
            super()._run_subcommand(subcommand)


@contextmanager
def _about(key: str) -> Iterator[None]:
    """What a constructor refuses is the user's mistake, at this key unless it names one itself."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise ConfigError(f"{key}: {error}") from error


def _check_yaml(args: list[str]) -> None:
    """Name the file and the line, which the parser does not."""
    words = [word for arg in args for word in arg.split("=", 1)]
    for path in (value for key, value in pairwise(words) if key in ("--config", "-c")):
        if Path(path).is_file():
            try:
                content = yaml.safe_load(Path(path).read_text())
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise ConfigError(f"config: {path}: {error}") from error
            if not isinstance(content, dict):
                found = shorten(repr(content), 60)
                raise ConfigError(f"config: {path}: {found}; it must have keys: model, data, ...")
            _check_groups(content)


def _check_groups(content: dict[str, Any] | Namespace) -> None:
    """What is no group would silently stand for the defaults, or for what another file says."""
    for key in ("trainer", "loop"):
        group = content.get(key, {})
        if not isinstance(group, dict | Namespace):
            found = "null" if group is None else shorten(repr(group), 60)
            raise ConfigError(f"{key}: {found}; it must hold options, or be left out")
