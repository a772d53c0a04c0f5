"""The options of the commands beside `fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pfl.cli import commands
from pfl.errors import ConfigError

BUDGETS = ("rounds", "bytes", "gradients", "virtual_seconds")
KINDS = ("method", "data", "network", "stage")
FORMATS = ("safetensors", "onnx", "peft")
SHARE = re.compile(r"([1-9]\d*)/([1-9]\d*)$")


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises its complaints, with the name of the command before them."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog.removeprefix('pfl ')}: {message}")


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}; it must be a whole number, at least 1")
    return int(text)


def _share(text: str) -> tuple[int, int]:
    match = SHARE.match(text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text}; it must be like 1/3, the first of three")
    return int(match[1]), int(match[2])


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be a positive number, such as 1e8")
    return value


def _budget(text: str) -> tuple[str, float]:
    name, _, limit = text.partition("=")
    if name not in BUDGETS or not limit:
        raise argparse.ArgumentTypeError(
            f"{text}; it must be one of {', '.join(BUDGETS)} and a number: bytes=2e6"
        )
    return name, _positive(limit)


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words) or words == ["percent"]:
        raise argparse.ArgumentTypeError(f"{text}; it must be columns, such as percent,score,worst")
    return words


def add_parsers(parsers: Any) -> None:
    """Adds the parsers of all commands; `run` of what they return runs the command."""

    def command(run: Callable[[argparse.Namespace], None], words: str) -> Any:
        """Adds a command, described by the docstring of its function."""
        name = run.__name__.rstrip("_")  # `import` is a word of Python
        parser = parsers.add_parser(name, help=words, description=run.__doc__)
        parser.set_defaults(run=run)
        return parser

    def runs(parser: CommandParser, what: str) -> None:
        """Adds the options of all commands that make runs."""
        jobs = f"{what} at a time; default: as many as fit"
        text = "changes every run, such as trainer.max_epochs=2; can be repeated"
        parser.add_argument("--out", type=Path, help="the folder of runs and results")
        parser.add_argument("--jobs", type=_at_least_one, help=jobs)
        live = "writes live.html, a page that shows how far all are, for the browser"
        parser.add_argument("--live", action="store_true", help=live)
        parser.add_argument("--change", action="append", default=[], metavar="KEY=VALUE", help=text)

    def rows(parser: CommandParser) -> None:
        """Adds the options that choose of a file's runs one row, one seed, or both."""
        row = "a row, such as 'FedSLR, problem users', or all rows of a run, such as FedSLR"
        parser.add_argument("--only", metavar="ROW", help=row)
        parser.add_argument("--seed", type=int, help="one of the file's seeds")

    one = command(commands.data, "show what is in a file before any training")
    one.usage = "pfl data FILE [--target_column COLUMN] [--client_column COLUMN] [--KEY VALUE ...]"
    one.allow_abbrev = False
    one.add_argument("--out", type=Path, help="draws three images there, samples.png")

    one = command(commands.new, "write a class that runs, and a test that fails until it is right")
    one.add_argument("kind", choices=KINDS, help="what the class is")
    one.add_argument("name", help="the name of the class, such as MyMethod")

    one = command(commands.import_, "translate a command of PFLlib")
    one.usage = 'pfl import pfllib "main.py -data MNIST -algo Ditto ..." [--folder FOLDER]'
    one.add_argument("program", choices=("pfllib",), help="the other framework")
    one.add_argument("line", metavar="COMMAND", help="its command, in quotes")
    samples = "samples as PFLlib has written them, such as PFLlib/dataset/MNIST"
    one.add_argument("--folder", type=Path, help=samples)

    one = command(commands.partition, "show who has which samples")
    one.usage = "pfl partition --config FILE [--data.KEY VALUE ...] [--out FOLDER]"
    one.allow_abbrev = False
    files = "writes partition.npz, .csv, .png and clients.parquet there"
    one.add_argument("--out", type=Path, help=files)
    pfllib = "writes the clients' samples there, as PFLlib reads them"
    one.add_argument("--pfllib", type=Path, help=pfllib)

    one = command(commands.compare, "run several methods, and say which differ by more than noise")
    files = "a YAML file, or folders of finished runs"
    one.add_argument("what", nargs="+", metavar="FILE_OR_FOLDER", help=files)
    runs(one, "runs")
    rows(one)
    one.add_argument("--share", type=_share, help="k/n: the k-th of n shares, for n machines")
    keep = "keeps checkpoints, for `pfl export` of the models"
    one.add_argument("--keep", action="store_true", help=keep)
    one.add_argument("--baseline", help="the method with which the others are compared")
    one.add_argument("--metric", help="the score that counts, such as f1_score")
    one.add_argument("--budget", type=_budget, help="such as bytes=2e6: cuts all runs there")
    one.add_argument("--wandb", metavar="PROJECT", help="sends tables and figures to W&B")
    bandwidth = "bits a second of a client, such as 1e8: a figure"
    one.add_argument("--bandwidth", type=_positive, help=bandwidth)
    printed = "paper.tex: percent, score, worst and headings of the table, with commas between them"
    one.add_argument("--latex", type=_words, default=[], metavar="COLUMNS", help=printed)

    one = command(commands.tune, "search hyperparameters, with as many trials for each method")
    one.add_argument("file", help="a YAML file of `pfl compare` with the key `tune`")
    runs(one, "methods")

    one = command(
        commands.search, "judge edits of one method file, in tries and on seeds never seen"
    )
    one.add_argument("step", choices=("try", "judge", "show"), help="what to do")
    one.add_argument("file", help="a YAML file of `pfl compare` with two runs and the key `search`")
    one.add_argument("--out", type=Path, help="the folder of runs and records")
    one.add_argument("--jobs", type=_at_least_one, help="runs at a time; default: as many as fit")

    one = command(commands.report, "make a page of runs for the browser")
    folders = "folders of runs, or folders that hold such folders"
    one.add_argument("folder", nargs="+", type=Path, help=folders)
    one.add_argument("--out", type=Path, help="the page; default: report.html in the folder")
    one.add_argument("--title", help="the title of the page")
    one.add_argument("--metric", help="the score that counts, such as finetuned/5/accuracy")

    one = command(commands.cite, "print BibTeX of what a run was made of")
    one.add_argument("folder", nargs="+", type=Path, help=folders)

    one = command(commands.export, "write models of a run for other programs")
    folder = "the folder of a run, or a checkpoint in it"
    one.add_argument("run_folder", type=Path, metavar="RUN", nargs="?", help=folder)
    one.add_argument("--ckpt_path", type=Path, metavar="RUN", help="another way to give it")
    one.add_argument(
        "--client", nargs="+", action="extend", default=[], help="names or numbers, or all"
    )
    one.add_argument("--global", action="store_true", dest="with_global", help="the global model")
    one.add_argument("--out", type=Path, required=True, help="the folder of the models")
    one.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="of the files")
    one.add_argument("--factored", action="store_true", help="FedSLR's thin layers, too")
    one.add_argument("--states", type=Path, help="the folder of a real party's states")

    one = command(
        commands.evaluate, "score a run's models on each client's samples, or on other data"
    )
    one.add_argument("run_folder", type=Path, metavar="RUN", nargs="?", help=folder)
    there = "a party's file: its own model, on its own samples, without a server"
    one.add_argument("--party", type=Path, metavar="FILE", help=there)
    file = "a configuration with other `data`; default: the run's own"
    one.add_argument("--data", type=Path, metavar="FILE", help=file)
    which = "of whose samples; default: all of other data, else test"
    one.add_argument("--split", choices=("train", "val", "test", "all"), help=which)
    whose = "whose models: names or numbers; default: all"
    one.add_argument("--client", nargs="+", action="extend", help=whose)
    one.add_argument("--metric", help="the score of the matrix, such as loss")
    one.add_argument("--out", type=Path, help="the folder of the tables and the picture")

    one = command(commands.reproduce, "run and draw a figure or a table of a paper")
    one.add_argument("figure", nargs="*", help="such as fedpd-figure2, or a YAML file")
    one.add_argument("--full", action="store_true", help="the paper's size, where that is long")
    runs(one, "runs")
    rows(one)
    one.add_argument("--list", action="store_true", help="the figures there are")
    plan = "shows the runs, their sizes and our choices"
    one.add_argument("--dry-run", action="store_true", help=plan)

    one = command(commands.deploy, "write a Flower app that runs with real parties")
    one.usage = "pfl deploy --config FILE [--model.KEY VALUE ...] --out FOLDER"
    one.allow_abbrev = False
    one.add_argument("--out", type=Path, required=True, help="the folder of the app")
    tls = "write certificates and keys, too; HOST is where the parties reach the server"
    one.add_argument("--tls", metavar="HOST", help=tls)

    one = command(commands.node, "serve as a party of a Flower app")
    one.add_argument("--config", type=Path, required=True, help="the party's file")
    one.add_argument("--client", type=int, help="the party's number; default: the file's")
    one.add_argument("--check", action="store_true", help="compares the party with the run")
    wait = "how long --check waits for the server to ask; default: 60"
    one.add_argument("--seconds", type=_positive, default=60.0, help=wait)
    there = "host:port of the SuperLink; default: the file's"
    one.add_argument("--superlink", metavar="ADDRESS", help=there)


def predict_parser() -> CommandParser:
    """Returns the parser of `pfl predict RUN --rows FILE`, beside that of LightningCLI."""
    one = CommandParser(prog="pfl predict", description=commands.predict_rows.__doc__)
    one.set_defaults(run=commands.predict_rows, command="predict_rows")
    folder = "the folder of a run, or a checkpoint in it"
    one.add_argument("run_folder", type=Path, metavar="RUN", nargs="?", help=folder)
    there = "a party's file: its own model predicts, without a server"
    one.add_argument("--party", type=Path, metavar="FILE", help=there)
    what = "new samples as the run's: a .csv, .parquet or .npz file, or a folder of images"
    one.add_argument("--rows", type=Path, required=True, help=what)
    one.add_argument(
        "--id", metavar="COLUMN", help="the column of the ids; default: the row number"
    )
    whose = "whose model: a name or number; default: the client that each row names"
    one.add_argument("--client", help=whose)
    one.add_argument("--global", action="store_true", dest="with_global", help="the global model")
    out = Path("predictions.csv")
    one.add_argument("--out", type=Path, default=out, help="the file; default: predictions.csv")
    return one


COMMANDS = (
    "data",
    "partition",
    "compare",
    "tune",
    "search",
    "report",
    "export",
    "evaluate",
    "reproduce",
    "deploy",
    "node",
    "new",
    "cite",
    "import",
)
OPEN = ("data", "partition", "deploy")
"""Commands whose other words are the same as for `pfl fit`."""
LIGHT = ("new", "import")
"""Commands that need no PyTorch, and answer at once."""
