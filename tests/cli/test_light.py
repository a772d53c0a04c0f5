"""The check without PyTorch: it says what the parser says, or nothing."""

import sys
from argparse import Namespace

import pytest
from matplotlib import get_cachedir

from pfl.cli import main
from pfl.configuration import app, light, signatures
from pfl.configuration.app import CheckCLI, FederatedCLI
from pfl.configuration.files import find_configs
from pfl.configuration.keys import closest
from pfl.configuration.messages import explain
from pfl.errors import ConfigError
from tests.cli import test_cli, test_cli_values
from tests.cli.configurations import NETWORK, PARTITION, SMALL, changed, write
from tests.commands import python

program = sys.modules[main.__module__]
pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("here")]


def empty():
    """Notes of nothing."""
    return {name: {} for name in ("runs", "classes", "types", "names", "help")}


class Parsed(FederatedCLI):
    """The command line that only parses, with its notes."""

    notes: dict

    def instantiate_classes(self):
        pass

    def run_subcommand(self, subcommand):
        pass

    def parse_arguments(self, parser, args):
        words = find_configs(self.words)
        signatures.add(self.notes, words, self.parsers[-1], self._known_keys())
        super().parse_arguments(parser, args)


def built(words):
    """The line of the command that builds method, data and loop, if any."""
    try:
        CheckCLI(words)
    except ValueError as error:  # the parser wraps a ConfigError
        return explain(error)
    return None


@pytest.fixture(scope="module")
def answers():
    """A function that returns the lines of the parser and of the check."""

    class Shared(Parsed):
        notes = empty()

    def both(*words):
        words = list(map(str, words))
        full = None
        try:
            Shared(words)
        except ConfigError as error:
            full = str(error)
        try:
            light_lines = light.Check(Shared.notes, find_configs(words)).lines
        except ConfigError as error:
            light_lines = [str(error)]
        if full is None and light_lines:  # of a range, which constructors check
            full = built(words)
        return full, light_lines

    return both


FOUND = {  # in a file
    "an option": ("model.init_args.batchsize", 10),
    "a key": ("trainer.max_epoch", 10),
    "a top key": ("modell", 10),
    "a method": ("model.class_path", "FedAvgg"),
    "a network": (f"{NETWORK}.class_path", "MPL"),
    "a data module": ("data.class_path", "DigitDataModule"),
    "a callback": ("trainer.callbacks", [{"class_path": "RunFigures"}]),
    "the second callback": ("trainer.callbacks", ["RunFigure", "RunFigur"]),
    "an option of a callback": (
        "trainer.callbacks",
        [{"class_path": "RunFigure", "init_args": {"foo": 1}}],
    ),
    "a word for a number": ("model.init_args.lr", "fast"),
    "a fraction for a number of rounds": ("trainer.max_epochs", 2.5),
    "an option of a partition": (f"{PARTITION}.init_args.beta", 1.0),
    "a word": ("loop.sampling", "random"),
    "an option of an object": ("loop.privacy", {"clip": 1.0, "epsilonn": 3.0}),
    "a value of an object": ("loop.privacy", {"clip": "x", "noise_multiplier": 1.0}),
    "an option of attackers": ("loop.attackers", {"client": 0.5, "attack": "SignFlip"}),
    "an attack": ("loop.attackers", {"clients": 0.5, "attack": "SignFlipp"}),
    "a whole number for a truth": ("trainer.detect_anomaly", 1),
}


@pytest.mark.parametrize("case", FOUND)
def test_a_mistake_in_a_file_is_found_and_gets_the_line_of_the_parser(tmp_path, answers, case):
    full, lines = answers(
        "fit", "--config", write(tmp_path / "a.yaml", changed(SMALL, *FOUND[case]))
    )
    assert full and lines == [full]


FOUND_WORDS = [
    "--foo 1",
    "--train.max_epochs 1",
    "--trainer.max_epochss 1",
    "--trainer.max-epochss 1",
    "--trainer.precision foo",
    "--trainer.callbacks+=RunFigures",
    "--loop.foo 1",
    "--loop.sampling=unifrom",
    "--model FedAvgg",
    "--model.lrr 1",
    "--model.init_args.lrr 1",
    "--model.lr=fast --model.batch_size 10",
    "--model FedRep --model.local_epochss=1",
    "--model Ditto --model.penalty x",
    "--model.network SmallCNN --model.network.hidden [3]",
    "--data.partition ClassesPerClient --data.partition.classes x",
    "--data.partition SplitOwn",
    "--data.num_client 3",
    "--data TableDataModule --data.file a.csv --data.target y",  # target_column is lacking
    "--config nosuch",
    "--model Ditto --model.penalty -1",
    "--model Ditto --model.personal_epochs=0",
    "--model.batch_size 0",
    "--model.lr 1e39",
    "--loop.seed=-1",
    "--loop.clients_at_once 0",
]


@pytest.mark.parametrize("words", FOUND_WORDS)
def test_a_mistake_in_a_word_is_found_and_gets_the_line_of_the_parser(tmp_path, answers, words):
    full, lines = answers("fit", "--config", write(tmp_path / "a.yaml", SMALL), *words.split())
    assert full and lines == [full]


OTHERS = [  # right, or for the parser to decide
    "--trainer.max_epoch 3",  # an abbreviation
    "--model.lr 1e-3",
    "--model.batch_size null",
    "--model.network.hidden [8,8]",
    "--model.optimizer torch.optim.SGD",
    "--model.optimizer torch.optim.SGD --model.optimizer.momentum x",
    "--model.loss torch.nn.CrossEntropyLoss",
    "--model.network own.Net",
    "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=a",
    "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitr=a",
    "--loop.aggregation Krum --loop.aggregation.attackers 1",
    "--loop.privacy.noise 1",
    "--model.lr fast --model.lr 1",
    "--model.network.hiden x:\\ 1",
    "--data.partition.help=FedAvg",
    "--model.lr",
    "--ckpt a",
    "--data.partition Dirichlet --data.partition.alpha -1",  # the line names the class alone
    "--model pFedMe --model.penalty 300",  # with the rate; the parser knows
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # abbreviations
@pytest.mark.parametrize("words", OTHERS)
def test_the_check_says_nothing_else_than_the_parser(tmp_path, answers, words):
    full, lines = answers("fit", "--config", write(tmp_path / "a.yaml", SMALL), *words.split(" "))
    assert lines in ([], [full])


OTHER_TESTS = {**test_cli.MISTAKES, **test_cli_values.MISTAKES}


@pytest.mark.slow
def test_mistakes_of_other_tests_get_the_line_of_the_parser_or_none(tmp_path, answers):
    for key, value, _ in [*OTHER_TESTS.values()][::3]:
        path = write(tmp_path / "a.yaml", changed(SMALL, key, value))
        full, lines = answers("fit", "--config", path)
        assert lines in ([], [full]), key


def test_the_files_that_come_with_pfl_are_right(answers):
    for name in ("quickstart", "rotated", "minilm_movielens"):
        assert answers("fit", "--config", name) == (None, [])


def test_each_of_several_mistakes_has_a_line(tmp_path, answers):
    path = write(tmp_path / "a.yaml", changed(SMALL, "model.init_args.lrr", 1))
    words = ("--loop.foo", "1", "--model.lr", "fast")
    full, lines = answers("fit", "--config", path, *words)
    apart = [answers("fit", "--config", path)[0]]  # the parser's line about each alone
    path = write(tmp_path / "b.yaml", SMALL)
    for two in (words[:2], words[2:]):
        apart.append(answers("fit", "--config", path, *two)[0])
    assert full in lines and lines == apart
    assert len({*lines}) == 3


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("target", ("target_kind", "file", "target_column"), "'target_kind' or 'target_column'"),
        (
            "clients",
            ("client_column", "num_clients", "horizon"),
            "'client_column' or 'num_clients'",
        ),
        ("digits", ("tune/digits", "quickstart"), "'tune/digits'"),
        ("lrr", ("lr", "personal_lr"), "'lr'"),  # a word of none of them
        ("lr", ("a_lr", "b_lr", "c_lr", "d_lr", "l_r"), "'l_r'"),  # a word of too many
    ],
)
def test_a_wrong_name_is_one_that_shares_its_word(name, known, expected):
    assert closest(name, known) == f"; did you mean {expected}?"


def test_an_error_of_a_run_is_told_though_its_file_is_gone(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "a.yaml", SMALL)

    class Ends(FederatedCLI):
        def __init__(self, args, learns):
            path.unlink()
            raise ConfigError("planted: in round 3")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(app, "FederatedCLI", Ends)
    words = ["fit", "--config", str(path)]
    assert program._run(Namespace(command="fit"), words, everything=False, learns=True) == 2
    assert capsys.readouterr().err == "error: planted: in round 3\n"


def test_a_class_without_notes_is_for_the_parser(tmp_path):
    path = write(tmp_path / "a.yaml", changed(SMALL, "model.init_args.lrr", 1))
    words = find_configs(["fit", "--config", str(path)])
    assert light.Check(empty(), words).lines == []


def test_another_file_of_pfl_has_other_notes(tmp_path, monkeypatch):
    for name in light.PACKAGES:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(light, "ROOT", tmp_path)
    before = light.notes_file()
    assert light.notes_file() == before
    (tmp_path / "pfl" / "new.py").write_text("")
    assert light.notes_file() != before


def test_notes_replace_older_ones_of_the_same_checkout_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = []
    for checkout in (tmp_path / "one", tmp_path / "two"):
        for name in light.PACKAGES:
            (checkout / name).mkdir(parents=True)
        monkeypatch.setattr(light, "ROOT", checkout)
        light.write_notes({})
        files.append(light.notes_file())
    assert all(file.is_file() for file in files)
    (checkout / "pfl" / "new.py").write_text("")
    light.write_notes({})
    kept = {*(tmp_path / "cache" / "lightning-pfl").iterdir()}
    assert kept == {files[0], light.notes_file()}


def test_a_read_only_folder_gets_no_notes(tmp_path, monkeypatch):
    (tmp_path / "file").touch()  # no folder can be made below a file, even by root
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    light.write_notes({"runs": {"fit": {}}})
    assert light.read_notes()["runs"] == {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    light.write_notes({"runs": {"fit": {}}})
    assert light.read_notes()["runs"] == {"fit": {}}
    light.notes_file().write_text("{")  # of a disk that was full
    assert light.read_notes()["runs"] == {}
    monkeypatch.setattr(light, "LIBRARIES", ("a package without metadata",))
    light.write_notes({"runs": {"fit": {}}})
    assert light.read_notes()["runs"] == {}


def test_a_run_in_this_process_leaves_the_notes_alone(tmp_path, monkeypatch):
    """PyTorch is imported here, so that the parser takes no longer than the check."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["fit", "--config", "quickstart", "--model.lrr", "1"]) == 2
    assert list(tmp_path.glob("lightning-pfl/*")) == []


SECOND = """
import sys
from pfl.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as error:
    status = error.code
print(status, "torch" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "words", ["--config quickstart --model.lrr 1 --data.clients 3", "--model.help FedSLR"]
)
def test_the_second_answer_is_the_first_one_without_pytorch(tmp_path, monkeypatch, here, words):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MPLCONFIGDIR", get_cachedir())  # it takes seconds to list all fonts
    first = python("-c", SECOND, "fit", *words.split(), cwd=here, fresh=True)
    second = python("-c", SECOND, "fit", *words.split(), cwd=here, fresh=True)
    assert first.stderr == second.stderr
    *text, last = first.stdout.splitlines()
    assert last.endswith("True")
    assert second.stdout.splitlines() == [*text, last.replace("True", "False")]
    assert text or ("'lrr'" in first.stderr and "'clients'" in first.stderr)
