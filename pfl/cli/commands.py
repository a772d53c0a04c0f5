"""What the commands beside `fit`, `validate`, `test` and `predict` do.

Everything that takes long to import is imported when a command runs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pfl.errors import ConfigError
from pfl.machine import refuse_windows

if TYPE_CHECKING:
    from pfl.experiments.grid import G

LEAF = {
    "femnist": "FEMNISTDataModule",
    "celeba": "CelebADataModule",
    "shakespeare": "ShakespeareDataModule",
    "sent140": "Sent140DataModule",
}
TABLES = (".csv", ".parquet")
OR_PARTY = ", or --party with a party's file"


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
        file = _part(file, given, "compare")
        out = file.folder("compare", given.out)
        try:
            results = file.run(
                out,
                jobs=given.jobs,
                share=given.share or (1, 1),
                keep=given.keep,
                live=given.live,
                paper=given.latex,
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


def _part(experiment: G, given: argparse.Namespace, command: str) -> G:
    """Returns the row or the seed of an experiment that the options choose, or all of it."""
    try:
        return experiment.part(given.only, given.seed)
    except ConfigError as error:
        raise ConfigError(f"{command}: {error}") from error


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
        figure = _part(figure, given, "reproduce")
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
    elif given.out is not None:
        shape = list(module.samples.input_shape)
        print(f"--out draws images only: inputs {shape} are none with one or three channels.")


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
    given: dict[str, str] = {}
    for word, following in zip(options, [*options, ""][1:], strict=True):
        if word.startswith("--"):
            option, _, value = word.removeprefix("--").removeprefix("data.").partition("=")
            given[option] = value or following
    said = {"num_clients", "partition", "client_column"} & given.keys()
    if key != "root" and not said and not _has_clients(path, given):
        words += ["--data.num_clients", "1"]
    for word in options:
        if word.startswith("--") and not word.startswith("--data"):
            word = f"--data.{word.removeprefix('--')}"
        words.append(word)
    return words


def _has_clients(path: Path, given: dict[str, str]) -> bool:
    """Returns whether an .npz file has ids, or images in folders have clients by these options."""
    from pfl.datamodules.sources.arrays import has_ids
    from pfl.datamodules.sources.image_folder import has_clients

    if path.is_dir():
        return has_clients(path, given.get("levels"), given.get("table"))
    return has_ids(path)


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
    """Write models of a finished or stopped run for other programs.

    The files are safetensors, or ONNX, which needs nothing of pfl, and a card about the origin of
    the model.
    """
    if not (given.client or given.with_global):
        raise ConfigError("export: give --client with names, numbers or all, --global, or both")
    if given.ckpt_path is not None and given.run_folder is not None:
        raise ConfigError("export: RUN and --ckpt_path: give one of them")
    run = given.ckpt_path or _run_of("export", given)
    from pfl.export import export as write

    clients = given.client
    if "all" in (clients or []):
        clients = None
    options = {"form": given.format, "factored": given.factored, "states": given.states}
    try:
        write(run, given.out, clients, with_global=given.with_global, **options)
    except ImportError as error:
        needed = "safetensors"
        if given.format == "onnx":
            needed = "onnx onnxruntime onnxscript"
        raise ConfigError(f"export: {error.name} is missing; pip install {needed}") from error


def _run_of(command: str, given: argparse.Namespace, otherwise: str = "") -> Path:
    """Returns the folder of a run, or a checkpoint in it, that a command was given."""
    if given.run_folder is None:
        raise ConfigError(f"{command}: RUN: give the folder of a run{otherwise}")
    run: Path = given.run_folder
    return run


def _only_with_party(command: str, given: argparse.Namespace, *others: str) -> None:
    """Refuses what a party's own model does not take."""
    for name in others:
        if getattr(given, name):
            word = {"run_folder": "RUN", "with_global": "--global"}.get(name, f"--{name}")
            raise ConfigError(f"{command}: {word} and --party: give one of them")


def evaluate(given: argparse.Namespace) -> None:
    """Score each model of a run on each client's samples, or on those of other data.

    `scores.csv`, `matrix.csv` and `matrix.png` are written: models by clients.
    """
    if given.party is not None:
        _only_with_party("evaluate", given, "run_folder", "data", "client", "metric")
        from pfl.export.party import evaluate_party, splits_of

        print(evaluate_party(given.party, splits_of(given.split), given.out))
        return
    from pfl.export.evaluate import evaluate as write

    options = {"data": given.data, "split": given.split, "metric": given.metric}
    write(_run_of("evaluate", given, OR_PARTY), given.out, clients=given.client, **options)


def predict_rows(given: argparse.Namespace) -> None:
    """Write what a run's models predict for the rows of a new table, with the rows' ids."""
    from pfl.export.predict import predict, predict_at_party

    if given.party is not None:
        _only_with_party("predict", given, "run_folder", "client", "with_global")
        print(predict_at_party(given.party, given.rows, given.out, given.id))
        return
    models = {"client": given.client, "with_global": given.with_global}
    run = _run_of("predict", given, OR_PARTY)
    print(predict(run, given.rows, given.out, given.id, **models))


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
    from pfl.cli.pfllib import clients_of, translate
    from pfl.cli.pfllib_files import write_dataset

    file = None
    if given.folder is not None:
        file = Path(f"{given.folder.resolve().name}.npz")
        write_dataset(given.folder, file, clients_of(given.line))
    print(translate(given.line, file), end="")
