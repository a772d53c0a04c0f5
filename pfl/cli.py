"""The command line: LightningCLI for federated runs."""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import datamodules  # noqa: F401 (makes its classes known by their short names)
import models  # noqa: F401
from datamodules import FederatedDataModule
from pfl.algorithms import FederatedAlgorithm
from pfl.errors import ConfigError
from pfl.loop import FederatedLoop
from pfl.trainer import Trainer
from pfl.usererrors import one_line


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
            parser_kwargs={"exit_on_error": False},
            args=args,
        )

    trainer: Trainer

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `loop`, whose datamodule is `data`."""
        parser.add_class_arguments(FederatedLoop, "loop", skip={"datamodule"}, instantiate=False)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """All parsers raise instead of leaving, so that an error becomes one line."""
        return super().init_parser(**{**kwargs, "exit_on_error": False})

    def _parse_ckpt_path(self) -> None:
        # Lightning reads the file here for hyperparameters, which our checkpoints do not have.
        path = self.config[self.config.subcommand].get("ckpt_path")
        if path and not Path(path).is_file():
            raise ConfigError(f"ckpt_path: {path} is not a file")

    def before_instantiate_classes(self) -> None:
        """One seed for everything, where no other is given."""
        config = self.config[self.subcommand]
        data = config.data.init_args
        if data.get("seed") is None:
            data.seed = int(config.seed_everything)

    def instantiate_classes(self) -> None:
        """Put the loop around the data, and give the recorder the configuration."""
        super().instantiate_classes()
        config = self.config[self.subcommand]
        self.datamodule = FederatedLoop(self.datamodule, **config.loop.as_dict())
        parser = self._parser(self.subcommand)
        # null is a value here (batch_size: null); jsonargparse 4.49 renamed the option.
        new = "skip_unset" in inspect.signature(parser.dump).parameters
        keep_null: dict[str, Any] = {"skip_unset" if new else "skip_none": False}
        self.trainer.recorder.config = parser.dump(config, **keep_null)


def main(args: list[str] | None = None) -> int:
    """Run the command line; a user's mistake is one line and exit status 2."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    try:
        FederatedCLI(args)
    except (ConfigError, MisconfigurationException) as error:
        return _refuse(" ".join(str(error).split()))
    except ArgumentError as error:
        return _refuse(one_line(error))
    except ValueError as error:
        # What a constructor raises comes wrapped by the parser.
        if not str(error).startswith("Does not validate against"):
            raise
        return _refuse(one_line(error))
    return 0


def _refuse(line: str) -> int:
    print(f"error: {line}", file=sys.stderr)
    return 2
