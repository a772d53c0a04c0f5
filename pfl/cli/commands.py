"""The commands beside `fit`, `validate`, `test` and `predict`: their options, and what they do.

Everything that takes long to import is imported when a command runs.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pfl.errors import ConfigError
from pfl.machine import refuse_windows

BUDGETS = ("rounds", "bytes", "gradients", "virtual_seconds")
KINDS = ("method", "data", "network", "stage")
FORMATS = ("safetensors", "onnx", "peft")
LEAF = {
    "femnist": "FEMNISTDataModule",
    "celeba": "CelebADataModule",
    "shakespeare": "ShakespeareDataModule",
    "sent140": "Sent140DataModule",
}
TABLES = (".csv", ".parquet")
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


def compare(given: argparse.Namespace) -> None:
    """Run several methods with several seeds on the same partitions and cohorts.

    Tables, paired statistics and figures are written. Runs that were finished with the same
    configuration, code and data are not repeated, and a killed run continues where it was.
    """
    from dataclasses import replace

    from pfl.configuration import files
    from pfl.experiments import Results, comparison_of
    from pfl.experiments.comparison import Missing
    from pfl.experiments.grid import parse_changes

    begun = time.monotonic()
    settings = {key: getattr(given, key) for key in ("baseline", "metric", "bandwidth", "budget")}
    settings = {key: value for key, value in settings.items() if value is not None}
    folders = [Path(word) for word in given.what]
    if any(folder.is_dir() for folder in folders):
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"compare: {folder}: there is no such folder of finished runs")
    if all(folder.is_dir() for folder in folders):
        for option in ("jobs", "share", "change", "keep", "live", "only", "seed"):
            value = getattr(given, option)
            if value or (option == "seed" and value is not None):  # the seed 0 is one, too
                raise ConfigError(f"compare: --{option}: folders of finished runs do not take it")
        out = given.out or Path("runs/comparison")
        results = Results.from_folders(folders, **settings)
    else:
        if len(folders) > 1 or files.find(given.what[0]) is None:
            raise ConfigError(
                f"compare: {' '.join(given.what)}; it must be a YAML file, or folders of finished "
                f"runs"
            )
        file = comparison_of(given.what[0], parse_changes("compare", given.change))
        try:
            if given.budget:
                settings["budget"] = dict([given.budget])
            file = replace(file, **settings)
        except ConfigError as error:
            raise ConfigError(f"compare: --{error}") from error
        try:
            file = file.part(given.only, given.seed)
        except ConfigError as error:
            raise ConfigError(f"compare: {error}") from error
        out = file.folder("compare", given.out)
        try:
            results = file.run(
                out,
                jobs=given.jobs,
                share=given.share or (1, 1),
                keep=given.keep,
                live=given.live,
            )
        except Missing as missing:
            print(missing)
            return
    print(f"\n{results}")
    if given.only is not None or given.seed is not None:
        out = out / "part"  # the tables of all rows stay
    paths = results.write(out, given.latex)
    if given.wandb is not None:
        results.send(given.wandb, paths)
    print(f"{', '.join(map(str, paths))} ({time.monotonic() - begun:.0f} s)")


def tune(given: argparse.Namespace) -> None:
    """Try values for several methods, the same number of trials for each of them.

    The best on validation data go into a file for `pfl compare`. Trials that have ended are not
    repeated, and a killed search continues where it was.
    """
    from pfl.configuration import files
    from pfl.experiments import Tuning
    from pfl.experiments.grid import parse_changes

    if files.find(given.file) is None:
        raise ConfigError(f"tune: {given.file}: there is no such file")
    tuning = Tuning.from_file(given.file, parse_changes("tune", given.change))
    out = tuning.folder("tune", given.out)
    tuned = tuning.search(out, jobs=given.jobs, live=given.live)
    print(f"\n{tuned}")
    print(", ".join(map(str, tuned.write(out))))


def search(given: argparse.Namespace) -> None:
    """Judge edits of one method file: a budget of tries, and a verdict on seeds nobody has seen.

    `try` scores the file as it stands on validation samples, `judge` tests the best try against the
    baseline on new seeds, `show` repeats all records. A record is one line of JSON.
    """
    import json

    from pfl.configuration import files
    from pfl.experiments.search import Search

    if files.find(given.file) is None:
        raise ConfigError(f"search: {given.file}: there is no such file")
    one = Search.from_file(given.file)
    out = one.folder("search", given.out)
    if given.step == "try":
        records = [one.attempt(out, given.jobs)]
    elif given.step == "judge":
        records = [one.judge(out, given.jobs)]
    else:
        records = one.records(out)
    for record in records:
        print(json.dumps(record))


def reproduce(given: argparse.Namespace) -> None:
    """Run what figures of the papers show, write their data (CSV) and draw them (PNG, PDF).

    Runs of the same configuration, code and data are not repeated, and a killed run continues
    where it was.
    """
    from pfl.experiments import Reproduction
    from pfl.experiments.grid import parse_changes
    from pfl.experiments.reproduction import figure_files

    if given.list or not given.figure:
        for name in figure_files():
            try:
                title = str(Reproduction.from_file(name).title)
            except ConfigError as error:  # the others can still be run
                title = f"broken: {error}"
            print(f"{name:<18} {title}")
        return
    changes = parse_changes("reproduce", given.change)
    for name in given.figure:
        begun = time.monotonic()
        figure = Reproduction.from_file(name, changes, full=given.full)
        if given.only is not None or given.seed is not None:
            try:
                figure = figure.part(given.only, given.seed)
            except ConfigError as error:
                raise ConfigError(f"reproduce: {error}") from error
        if given.dry_run:
            print(figure.plan())
            continue
        out = given.out or Path("runs/reproduce")
        paths = figure.reproduce(out, f"reproduce {name}", jobs=given.jobs, live=given.live)
        print(f"{', '.join(map(str, paths))} ({time.monotonic() - begun:.0f} s)")


def data(given: argparse.Namespace) -> None:
    """Show what is in a file or a data set before any training: columns, types, clients, samples.

    Options of the data module follow the file. Without `--target_column` a table is shown as it is.
    """
    from pfl.configuration.app import DataCLI
    from pfl.files import make_folder
    from pfl.report.data import data_text, has_images, table_text, write_picture

    words = list(given.others)
    if not words[0].startswith("-"):
        path = Path(words[0]).expanduser()
        options = words[1:]
        if path.suffix in TABLES:
            if not path.is_file():
                raise ConfigError(f"data: {path}: there is no such file")
            print(table_text(path))
            if not options:
                print(
                    "\n--target_column COLUMN and --client_column COLUMN show classes and clients."
                )
                return
            print()
        words = _data_options(path, options)
    module = DataCLI(["fit", *words]).datamodule
    print(data_text(module))
    if has_images(module):
        if given.out is None:
            print("--out FOLDER draws the samples.")
        else:
            make_folder(given.out, "data: --out")
            write_picture(module, given.out / "samples.png")
            print(given.out / "samples.png")


def _module_of(path: Path) -> tuple[str, str]:
    """Returns the data module that reads a file or a folder, and its argument for the path."""
    if path.suffix in TABLES:
        return "TableDataModule", "file"
    if path.suffix == ".npz":
        return "ArrayDataModule", "file"
    if not path.is_dir():
        raise ConfigError(
            f"data: {path}; it must be a .csv, .parquet or .npz file, or a folder of images; "
            "--config FILE or --data NAME shows other data sets"
        )
    if any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
        return "HuggingFaceDataModule", "path"
    for folder, name in LEAF.items():  # the files of one of them, or of the first of several
        if (path / "data" / folder / "data").is_dir():
            return name, "root"
    return "ImageFolderDataModule", "folder"


def _data_options(path: Path, options: list[str]) -> list[str]:
    """Returns a file, and options of its data module, as options of `pfl fit`."""
    name, key = _module_of(path)
    words = ["--data", name, f"--data.{key}", str(path)]
    keys = [word.removeprefix("--").partition("=")[0] for word in options if word[:2] == "--"]
    if key != "root" and not {"num_clients", "partition"} & {*keys}:
        if any(key in keys for key in ("client_column", "client_ids")) or _has_clients(
            path, options
        ):
            words += ["--data.num_clients", "null", "--data.partition", "Natural"]
        else:
            words += ["--data.num_clients", "1"]
    for word in options:
        if word.startswith("--") and not word.startswith("--data"):
            word = f"--data.{word.removeprefix('--')}"
        words.append(word)
    return words


def _has_clients(path: Path, options: list[str]) -> bool:
    """Returns whether an .npz file has ids, or the levels of a folder have clients."""
    if path.suffix == ".npz" and path.is_file():
        from zipfile import BadZipFile, ZipFile

        try:
            with ZipFile(path) as stored:
                return "client_ids.npy" in stored.namelist()
        except BadZipFile:  # the data module says what is wrong
            return False
    return path.is_dir() and any("client" in word for word in options)


def partition(given: argparse.Namespace) -> None:
    """Show who has which samples: sizes, labels, distances, overlap, hash.

    It takes all options of `pfl fit`; what does not concern the data has no effect.
    """
    from pfl.configuration.app import DataCLI
    from pfl.datamodules.exports import write_pfllib
    from pfl.files import make_folder
    from pfl.report.partition import partition_columns, partition_text, write_files

    data = DataCLI(["fit", *given.others]).datamodule
    columns = partition_columns(data)
    print(partition_text(data, columns))
    if given.out is not None:
        make_folder(given.out, "partition: --out")
        print(", ".join(map(str, write_files(data, columns, given.out))))
    if given.pfllib is not None:
        write_pfllib(data, given.pfllib)
        print(f"{given.pfllib}: {data.num_clients} clients, as PFLlib reads them")


def report(given: argparse.Namespace) -> None:
    """Write one HTML page about runs: curves, clients, maps, tables, configurations, versions.

    The page opens in any browser, without a network.
    """
    import pfl
    from pfl import files
    from pfl.report.html import page
    from pfl.scores.runs import find_runs, read_runs

    runs = read_runs(find_runs(given.folder, "report"), unfinished=True)
    out = given.out
    if out is None and len(given.folder) == 1:
        out = given.folder[0] / "report.html"
    elif out is None:
        out = Path("report.html")
    title = given.title or ", ".join(folder.resolve().name for folder in given.folder)
    files.make_folder(out.parent, "report: --out")
    files.write(out, page(runs, title, pfl.__version__, given.metric))
    if len(runs) > 1:
        print(f"{out} ({len(runs)} runs)")
    else:
        print(out)


def export(given: argparse.Namespace) -> None:
    """Write models of a finished or stopped run for other programs, which load them without pfl.

    The files are safetensors, or ONNX, and a card about the origin of the model.
    """
    if not (given.client or given.with_global):
        raise ConfigError("export: give --client with names, numbers or all, --global, or both")
    from pfl.export import export as write

    clients = given.client
    if clients == ["all"]:
        clients = None
    options = {"form": given.format, "factored": given.factored, "states": given.states}
    try:
        write(given.ckpt_path, given.out, clients, with_global=given.with_global, **options)
    except ImportError as error:
        needed = "safetensors"
        if given.format == "onnx":
            needed = "onnx onnxruntime onnxscript"
        raise ConfigError(f"export: {error.name} is missing; pip install {needed}") from error


def _checkpoint_of(run: Path) -> Path:
    """Returns a checkpoint, which is given by its path or by the folder of its run."""
    if run.is_dir():
        return run / "checkpoints" / "last.ckpt"
    if not run.exists():
        raise ConfigError(f"{run}: there is no such file; it must be the folder of a run")
    return run


def evaluate(given: argparse.Namespace) -> None:
    """Score each model of a run on each client's samples, or on those of other data.

    `scores.csv`, `matrix.csv` and `matrix.png` are written: models by clients.
    """
    from pfl.export.evaluate import evaluate as write

    options = {"data": given.data, "split": given.split, "metric": given.metric}
    write(_checkpoint_of(given.run_folder), given.out, clients=given.client, **options)


def predict_rows(given: argparse.Namespace) -> None:
    """Write what a run's models predict for the rows of a new table, with the rows' ids."""
    from pfl.export.predict import predict

    models = {"client": given.client, "with_global": given.with_global}
    print(predict(_checkpoint_of(given.run_folder), given.rows, given.out, given.id, **models))


def deploy(given: argparse.Namespace) -> None:
    """Write a Flower app whose clients are real parties, each with its own samples.

    All other words are the same as for `pfl fit`.
    """
    refuse_windows("deploy: this command")
    from pfl.deploy.app import write_app

    parties = write_app(given.others, given.out)
    print(f"{given.out} (an app for {parties} parties)")
    if given.tls is not None:
        from pfl.deploy.keys import write_keys

        print(f"{write_keys(given.out, given.tls, parties)} (certificates and keys: secret)")


def node(given: argparse.Namespace) -> None:
    """Serve as a party until a signal ends it: it trains on its own samples, and keeps its states.

    With `superlink` in its file it is a node of that SuperLink; without, `flower-supernode` must
    run beside it.
    """
    refuse_windows("node: this command")
    from pfl.deploy.app import check_server, check_text, read_link, read_node

    worker, address = read_node(given.config, given.client)
    link = read_link(given.config, given.superlink)
    where: object = address
    if link is not None:
        where = link.address

    def tell() -> None:
        print(f"party {worker.client}: ready at {where}", flush=True)

    if given.check:
        print(check_text(worker), flush=True)
        if link is not None:
            print(check_server(worker, link, tell, given.seconds))
    elif link is not None:
        worker.serve_link(link, tell)
    else:
        worker.serve(address, tell)


def cite(given: argparse.Namespace) -> None:
    """Print BibTeX of the framework, and of the methods, data sets and networks of runs."""
    from pfl.cli.cite import cited

    print(cited(given.folder))


def new(given: argparse.Namespace) -> None:
    """Write a file with a class that runs at once, and a test that fails until it is right.

    Both go into the current folder, and say with HERE where to write. No file is replaced.
    """
    from pfl.cli.new import RUN, filled, write_new

    path, test = write_new(given.kind, given.name, Path())
    print(f"{path}, {test}")
    print(f"pfl fit --config quickstart {filled(RUN[given.kind], given.name)}")
    print(f"python -m pytest {test}")


def import_(given: argparse.Namespace) -> None:
    """Print the configuration of a command of another framework, and what differs in meaning.

    `pfl import pfllib "main.py -data MNIST -algo Ditto" > ditto.yaml` writes it into a file.
    """
    from pfl.cli.pfllib import translate, write_dataset

    file = None
    if given.folder is not None:
        file = Path(f"{given.folder.resolve().name}.npz")
        write_dataset(given.folder, file)
    print(translate(given.line, file), end="")


# ---- options -------------------------------------------------------------------------------------


def add_parsers(commands: Any) -> None:
    """Adds the parsers of all commands; `run` of what they return runs the command."""

    def command(run: Callable[[argparse.Namespace], None], words: str) -> Any:
        """Adds a command, described by the docstring of its function."""
        name = run.__name__.rstrip("_")  # `import` is a word of Python
        parser = commands.add_parser(name, help=words, description=run.__doc__)
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

    one = command(data, "show what is in a file before any training")
    one.usage = "pfl data FILE [--target_column COLUMN] [--client_column COLUMN] [--KEY VALUE ...]"
    one.allow_abbrev = False
    one.add_argument("--out", type=Path, help="draws three images there, samples.png")

    one = command(new, "write a class that runs, and a test that fails until it is right")
    one.add_argument("kind", choices=KINDS, help="what the class is")
    one.add_argument("name", help="the name of the class, such as MyMethod")

    one = command(import_, "translate a command of PFLlib")
    one.usage = 'pfl import pfllib "main.py -data MNIST -algo Ditto ..." [--folder FOLDER]'
    one.add_argument("program", choices=("pfllib",), help="the other framework")
    one.add_argument("line", metavar="COMMAND", help="its command, in quotes")
    samples = "samples as PFLlib has written them, such as PFLlib/dataset/MNIST"
    one.add_argument("--folder", type=Path, help=samples)

    one = command(partition, "show who has which samples")
    one.usage = "pfl partition --config FILE [--data.KEY VALUE ...] [--out FOLDER]"
    one.allow_abbrev = False
    files = "writes partition.npz, .csv, .png and clients.parquet there"
    one.add_argument("--out", type=Path, help=files)
    pfllib = "writes the clients' samples there, as PFLlib reads them"
    one.add_argument("--pfllib", type=Path, help=pfllib)

    one = command(compare, "run several methods, and say which differ by more than noise")
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

    one = command(tune, "search hyperparameters, with as many trials for each method")
    one.add_argument("file", help="a YAML file of `pfl compare` with the key `tune`")
    runs(one, "methods")

    one = command(search, "judge edits of one method file, in tries and on seeds never seen")
    one.add_argument("step", choices=("try", "judge", "show"), help="what to do")
    one.add_argument("file", help="a YAML file of `pfl compare` with two runs and the key `search`")
    one.add_argument("--out", type=Path, help="the folder of runs and records")
    one.add_argument("--jobs", type=_at_least_one, help="runs at a time; default: as many as fit")

    one = command(report, "make a page of runs for the browser")
    folders = "folders of runs, or folders that hold such folders"
    one.add_argument("folder", nargs="+", type=Path, help=folders)
    one.add_argument("--out", type=Path, help="the page; default: report.html in the folder")
    one.add_argument("--title", help="the title of the page")
    one.add_argument("--metric", help="the score that counts, such as finetuned/5/accuracy")

    one = command(cite, "print BibTeX of what a run was made of")
    one.add_argument("folder", nargs="+", type=Path, help=folders)

    one = command(export, "write models of a checkpoint for other programs")
    one.add_argument("--ckpt_path", type=Path, required=True, help="a run's checkpoint")
    one.add_argument("--client", nargs="+", default=[], help="names or numbers, or all")
    one.add_argument("--global", action="store_true", dest="with_global", help="the global model")
    one.add_argument("--out", type=Path, required=True, help="the folder of the models")
    one.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="of the files")
    one.add_argument("--factored", action="store_true", help="FedSLR's thin layers, too")
    one.add_argument("--states", type=Path, help="the folder of a real party's states")

    one = command(evaluate, "score a run's models on each client's samples, or on other data")
    folder = "the folder of a run, or a checkpoint in it"
    one.add_argument("run_folder", type=Path, metavar="RUN", help=folder)
    file = "a configuration with other `data`; default: the run's own"
    one.add_argument("--data", type=Path, metavar="FILE", help=file)
    which = "of whose samples; default: all of other data, else test"
    one.add_argument("--split", choices=("train", "val", "test", "all"), help=which)
    one.add_argument("--client", nargs="+", help="whose models: names or numbers; default: all")
    one.add_argument("--metric", help="the score of the matrix, such as loss")
    one.add_argument("--out", type=Path, help="the folder of the tables and the picture")

    one = command(reproduce, "run and draw a figure or a table of a paper")
    one.add_argument("figure", nargs="*", help="such as fedpd-figure2, or a YAML file")
    one.add_argument("--full", action="store_true", help="the paper's size, where that is long")
    runs(one, "runs")
    rows(one)
    one.add_argument("--list", action="store_true", help="the figures there are")
    plan = "shows the runs, their sizes and our choices"
    one.add_argument("--dry-run", action="store_true", help=plan)

    one = command(deploy, "write a Flower app that runs with real parties")
    one.usage = "pfl deploy --config FILE [--model.KEY VALUE ...] --out FOLDER"
    one.allow_abbrev = False
    one.add_argument("--out", type=Path, required=True, help="the folder of the app")
    tls = "write certificates and keys, too; HOST is where the parties reach the server"
    one.add_argument("--tls", metavar="HOST", help=tls)

    one = command(node, "serve as a party of a Flower app")
    one.add_argument("--config", type=Path, required=True, help="the party's file")
    one.add_argument("--client", type=int, help="the party's number; default: the file's")
    one.add_argument("--check", action="store_true", help="compares the party with the run")
    wait = "how long --check waits for the server to ask; default: 60"
    one.add_argument("--seconds", type=_positive, default=60.0, help=wait)
    there = "host:port of the SuperLink; default: the file's"
    one.add_argument("--superlink", metavar="ADDRESS", help=there)


def predict_parser() -> CommandParser:
    """Returns the parser of `pfl predict RUN --rows FILE`, beside that of LightningCLI."""
    one = CommandParser(prog="pfl predict", description=predict_rows.__doc__)
    one.set_defaults(run=predict_rows, command="predict_rows")
    folder = "the folder of a run, or a checkpoint in it"
    one.add_argument("run_folder", type=Path, metavar="RUN", help=folder)
    one.add_argument("--rows", type=Path, required=True, help="a .csv or .parquet file of new rows")
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
