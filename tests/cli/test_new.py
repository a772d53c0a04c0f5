"""`pfl new`: what it writes runs at once, and its test fails until it is right."""

import importlib
import inspect
import itertools
import subprocess
import sys

import pytest

from pfl.cli.new import RUN, TEMPLATES, filled
from pfl.cli.options import KINDS
from tests.commands import QUICKSTART, call

pytestmark = pytest.mark.cli
RUNS = itertools.count()
RIGHT = {  # of each kind: lines of the class and of the test before and after somebody wrote them
    "method": [
        (
            "return self.local_sgd(clients, w)",
            "return self.local_sgd(clients, w, prox_weight=self.penalty, prox_center=w)",
        ),
        ("LR * gradient(v)", "LR * (gradient(v) + PENALTY * (v - w))"),
    ],
    "data": [
        ("", ""),
        (
            "SAMPLES = None  # such as 800\nCLIENTS = None  # such as 20\nSHAPE = None  # of one "
            "sample, such as (1, 8, 8)\nCLASSES = None",
            "SAMPLES = 800\nCLIENTS = 20\nSHAPE = (1, 8, 8)\nCLASSES = 10",
        ),
    ],
    "network": [
        ("", ""),
        ("PARAMETERS = None", f"PARAMETERS = {64 * 32 + 32 + 32 * 10 + 10}"),
    ],
    "stage": [
        ("values = message.values", "values = self.strength * message.values"),
        ("return values.copy()", "return STRENGTH * values"),
    ],
}


def write(folder, monkeypatch, kind, name):
    """Lets `pfl new` write into a folder; returns what it prints."""
    monkeypatch.chdir(folder)
    status, out, err = call("new", kind, name)
    assert (status, err) == (0, ""), err
    return out


def judge(folder, name):
    """Returns the tests of a class that fail, and what they say."""
    for module in (name.lower(), f"test_{name.lower()}"):
        sys.modules.pop(module, None)  # as it was before somebody wrote in it
    importlib.invalidate_caches()
    module = importlib.import_module(f"test_{name.lower()}")
    failed = {}
    for test, function in vars(module).items():
        if not test.startswith("test_"):
            continue
        words = {}
        if "tmp_path" in inspect.signature(function).parameters:
            words["tmp_path"] = folder / f"run{next(RUNS)}"
        try:
            function(**words)
        except AssertionError as error:
            failed[test] = str(error)
    return failed


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_test_fails_until_the_class_is_right(kind, tmp_path, monkeypatch):
    name = f"Mine{kind}"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the files change within a second
    out = write(tmp_path, monkeypatch, kind, name)
    assert out.splitlines()[0] == f"{name.lower()}.py, test_{name.lower()}.py"
    (words,) = judge(tmp_path, name).values()  # nothing but what somebody has to write
    assert "HERE" in words
    files = (f"{name.lower()}.py", f"test_{name.lower()}.py")
    for file, (before, after) in zip(files, RIGHT[kind], strict=True):
        text = (tmp_path / file).read_text()
        assert before in text
        (tmp_path / file).write_text(text.replace(before, after))
        if file == files[0] and before:  # the class alone is not enough: NumPy is asked
            (test,) = judge(tmp_path, name)
            assert test.endswith("numpy")
    assert judge(tmp_path, name) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_at_once(kind, tmp_path, monkeypatch):
    name = f"AtOnce{kind}"
    out = write(tmp_path, monkeypatch, kind, name)
    command = out.splitlines()[1]
    assert command == f"pfl fit --config quickstart {filled(RUN[kind], name)}"
    monkeypatch.syspath_prepend(tmp_path)
    words = command.replace("--config quickstart", f"--config {QUICKSTART}").split()[1:]
    status, _, err = call(*words, "--trainer.max_epochs", "1", "--trainer.callbacks", "[]")
    assert status == 0, err


def test_what_is_written_is_formatted_and_checked(tmp_path, monkeypatch):
    for kind in KINDS:
        write(tmp_path, monkeypatch, kind, f"A{kind.title()}")
    for command in (["format", "--check"], ["check"]):
        words = [sys.executable, "-m", "ruff", *command, "--no-cache", tmp_path]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "there", "parts"),
    [
        ("my-method", "", ["new: my-method", "the name of a Python class"]),
        ("class", "", ["new: class", "the name of a Python class"]),
        ("Mine", "mine.py", ["new: mine.py", "there already"]),
        ("Mine", "test_mine.py", ["new: test_mine.py", "there already"]),
        ("Random", "", ["new: Random", "module 'random' already"]),
    ],
)
def test_nothing_is_replaced(name, there, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if there:
        (tmp_path / there).write_text("mine")
    status, out, err = call("new", "method", name)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert not [part for part in parts if part not in err], err
    assert [path.name for path in tmp_path.iterdir()] == [there] * bool(there)
    assert not there or (tmp_path / there).read_text() == "mine"


def test_every_kind_has_its_templates():
    expected = {f"{kind}{end}.txt" for kind in KINDS for end in ("", "_test")}
    assert {path.name for path in TEMPLATES.iterdir()} == expected and {*RUN} == {*KINDS}
