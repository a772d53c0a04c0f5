"""The commands: what names them, what they say about mistakes, and how soon they answer."""

import sys

import pytest

from pfl import __version__
from pfl.cli import main
from pfl.cli.main import RUNS
from pfl.cli.options import COMMANDS
from tests.commands import call, finish, python

pytestmark = pytest.mark.cli
ALL = [*RUNS, *COMMANDS]


@pytest.mark.parametrize("words", [[], ["train"], ["comapre", "a.yaml"]])
def test_all_commands_are_named(words):
    _, out, err = call(*words)
    assert not [name for name in ALL if name not in out + err]
    assert err.count("\n") == bool(words)
    assert ("did you mean 'compare'?" in err) == ("comapre" in words)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_the_options(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"usage: pfl {command}" in capsys.readouterr().out


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"pfl {__version__}\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        "['--help']",
        "[]",
        "['tarin']",
        "['compare', '--jobs', '0']",
        "['new', 'method', 'Mine']",
        "['import', 'pfllib', 'main.py -algo Ditto']",
    ],
)
def test_an_answer_imports_nothing_that_takes_long(words, tmp_path):
    code = f"import sys\nfrom pfl.cli import main\ntry:\n    main({words})\nexcept SystemExit:\n"
    code += "    pass\nprint([*sys.modules])"
    names = finish("-c", code, cwd=tmp_path, fresh=True).splitlines()[-1]
    heavy = ("torch", "lightning", "jsonargparse", "scipy", "matplotlib")
    assert not [name for name in heavy if f"'{name}'" in names]


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", [["data", "a.csv"], ["import", "pfllib", "main.py -algo Ditto"]])
def test_a_command_whose_reader_has_gone_ends_without_a_word(tmp_path, words, buffered):
    """Python writes what was printed at once or at the end; 13 is SIGPIPE."""
    (tmp_path / "a.csv").write_text("age\n1\n")
    code = "import os, sys\nfrom pfl.cli import main\nend, start = os.pipe()\nos.close(end)\n"
    code += f"os.dup2(start, 1)\nsys.stdout.reconfigure(write_through={not buffered})\n"
    code += f"sys.exit(main({words}))"
    done = python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (128 + 13, "")


def test_another_pipe_that_breaks_is_an_error(monkeypatch):
    def broken(folders):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("pfl.cli.cite.cited", broken)
    with pytest.raises(BrokenPipeError):
        main(["cite", "run"])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("fit", ["fit: ", "--config"]),
        ("fit quickstart", ["fit: quickstart", "--config quickstart"]),
        ("fit --config quickstart --lr 1", ["lr: ", "'model.lr'"]),
        ("fit --config quickstart --num_clients 1", ["num_clients: ", "'data.num_clients'"]),
        ("fit --config quickstart --trainer.epochs 1", ["trainer.epochs: ", "'max_epochs'"]),
        ("fit --model.help FedAvgg", ["there is no class 'FedAvgg'", "'FedAvg'"]),
        ("partition", ["partition: ", "--config"]),
        ("deploy quickstart", ["deploy: quickstart", "--config quickstart"]),
        ("compare quickstart", ["quickstart.yaml is a configuration of `pfl fit`", "common"]),
    ],
)
def test_a_mistake_gets_one_line(words, parts):
    status, out, err = call(*words.split())
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ") and not [part for part in parts if part not in err], err


def test_the_folder_that_is_missing_is_named(tmp_path):
    status, _, err = call("compare", tmp_path, tmp_path / "gone")
    assert (status, err.count("\n")) == (2, 1)
    assert f"compare: {tmp_path / 'gone'}: there is no such folder" in err


def test_the_help_of_a_method_is_a_page(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--model.help", "FedSLR"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 125  # 1,490 with all classes of torch.nn; other tests bring classes
    options = [line.split()[0] for line in lines if line.startswith("  --")]
    assert {"--model.low_rank_penalty", "--model.lr", "--model.network"} <= set(options)
    assert not [line for line in lines if "torch.nn" in line]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_script_completes_words(shell):
    pytest.importorskip("shtab")
    status, out, _ = call("--completion", shell)
    words = [*ALL, "--baseline", "--trainer.max_epochs", "--model.low_rank_penalty", "FedSLR"]
    assert status == 0 and not [word for word in words if word not in out]


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    status, out, err = call("--completion", "bash")
    assert (status, out, err.count("\n")) == (2, "", 1) and "shtab" in err and "pip" in err
