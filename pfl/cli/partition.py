"""`pfl partition`: shows who has which samples, before any training."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from datamodules import FederatedDataModule
from datamodules.exports import write_pfllib
from pfl.cli.app import FederatedCLI
from pfl.cli.parser import CommandParser
from pfl.files import run_folder_errors
from pfl.method.algorithm import FederatedAlgorithm
from pfl.report.partition import partition_columns, partition_text, write_files


class DataCLI(FederatedCLI):
    """The command line of `fit` that builds the data module only.

    Attributes:
        datamodule: The data module, with the seed of the run.
    """

    datamodule: FederatedDataModule

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the arguments of `fit`; a configuration of the data alone is enough."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.add_lightning_class_args(
            FederatedAlgorithm, "model", subclass_mode=True, required=False
        )
        parser.add_lightning_class_args(FederatedDataModule, "data", subclass_mode=True)

    def instantiate_classes(self) -> None:
        """Instantiates the data module with the seed of the run."""
        config = self.config[self.subcommand]
        data = config.data.init_args
        if data.get("seed") is None:
            data.seed = int(config.seed_everything)
        parts = self.subcommand_parser.instantiate(Namespace(data=config.data))
        self.datamodule = parts.data

    def run_subcommand(self, subcommand: str) -> None:
        """Runs nothing."""


def command(words: list[str]) -> None:
    """Runs `partition --config FILE [--out FOLDER] [--pfllib FOLDER]`.

    Args:
        words: The words behind `partition`.
    """
    parser = CommandParser(
        prog="pfl partition",
        usage="pfl partition --config FILE [--data.KEY VALUE ...] [--out FOLDER]",
        description="Show who has which samples: sizes, labels, distances, overlap, hash. All "
        "other words are those of `pfl fit`; what does not concern the data has no effect.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, help="writes partition.npz, .csv, .png and clients.parquet there"
    )
    parser.add_argument(
        "--pfllib", type=Path, help="writes the clients' samples there, as PFLlib reads them"
    )
    given, others = parser.parse_known_args(words)
    data = DataCLI(["fit", *others]).datamodule
    columns = partition_columns(data)
    print(partition_text(data, columns))
    if given.out is not None:
        with run_folder_errors(given.out, "partition: --out"):
            given.out.mkdir(parents=True, exist_ok=True)
        print(", ".join(map(str, write_files(data, columns, given.out))))
    if given.pfllib is not None:
        write_pfllib(data, given.pfllib)
        print(f"{given.pfllib}: {data.num_clients} clients, as PFLlib reads them")
