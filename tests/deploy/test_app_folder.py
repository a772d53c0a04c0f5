"""Nothing that a command did not make is replaced or removed; the files of an app are valid."""

import json
import platform
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from pfl.deploy.app import read_link, read_node, run_server
from pfl.deploy.app_folder import MARKER, toml_text, write_folder
from pfl.deploy.worker import Worker, listener
from tests.commands import call
from tests.refusal import refused

WORDS = ["--config", "quickstart", "--data.num_clients", 3, "--loop.clients_per_round", "null"]
WORDS += ["--trainer.callbacks", "[]"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- the folder ---------------------------------------------------------------------------------


@pytest.mark.cli
def test_files_of_a_project_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".flwr").mkdir()
    for name in ("pyproject.toml", "run.yaml", ".flwr/config.toml"):
        (tmp_path / name).write_text(f"mine: {name}")
    before = contents(tmp_path)
    status, _, error = call("deploy", *WORDS, "--out", ".")
    assert status == 2 and error.count("\n") == 1
    assert "deploy: --out: . has files that pfl deploy has not written" in error
    assert contents(tmp_path) == before


def test_an_app_is_written_into_a_new_an_empty_or_its_own_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new/within"):
        folder = tmp_path / name
        write_folder(folder, {"a": "one", ".flwr/b": "two"})
        (folder / "states").mkdir()
        (folder / "states" / "mine").write_text("mine")
        for text in ("three", "one"):
            write_folder(folder, {"a": text, ".flwr/b": "two", "c": text})
            assert [(folder / "a").read_text(), (folder / ".flwr/b").read_text()] == [text, "two"]
        assert (folder / "states" / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["a", ".flwr/b"])
def test_a_file_that_a_person_has_changed_is_named_and_stays(tmp_path, name):
    write_folder(tmp_path, {"a": "one", ".flwr/b": "two"})
    (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with refused(f"deploy: --out: {tmp_path / name} was changed since pfl deploy wrote it"):
        write_folder(tmp_path, {"a": "three", ".flwr/b": "four"})
    assert contents(tmp_path) == before
    (tmp_path / name).unlink()
    write_folder(tmp_path, {"a": "three", ".flwr/b": "four"})


def test_a_file_that_somebody_has_put_there_is_named_and_stays(tmp_path):
    write_folder(tmp_path, {"a": "one"})
    (tmp_path / "c").write_text("mine")
    (tmp_path / "d").symlink_to(tmp_path / "elsewhere")
    for name in ("c", "d"):
        with refused(f"deploy: --out: {tmp_path / name}"):
            write_folder(tmp_path, {"a": "one", name: "two"})
    assert (tmp_path / "c").read_text() == "mine" and (tmp_path / "d").is_symlink()


def test_what_a_killed_command_has_left_is_replaced(tmp_path, monkeypatch):
    """It has written its marker and one of two files."""
    write_folder(tmp_path, {"a": "one", "b": "one"})
    with monkeypatch.context() as patch:
        patch.setattr("pfl.deploy.app_folder.files.write", stop_at(tmp_path / "b"))
        with pytest.raises(KeyboardInterrupt):
            write_folder(tmp_path, {"a": "two", "b": "two"})
    assert [(tmp_path / name).read_text() for name in "ab"] == ["two", "one"]
    write_folder(tmp_path, {"a": "three", "b": "three"})
    assert [(tmp_path / name).read_text() for name in "ab"] == ["three", "three"]


def test_a_marker_that_a_killed_command_has_half_written_is_removed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()  # it has ended, and nothing else has its number yet
    left = tmp_path / f"{MARKER}.{platform.node()}.{process.pid}.part"
    left.write_text("{")
    write_folder(tmp_path, {"a": "one"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [MARKER, "a"]


def stop_at(last):
    def write(path, text):
        if path == last:
            raise KeyboardInterrupt
        Path(path).write_text(text)

    return write


def test_a_damaged_marker_is_one_line(tmp_path):
    write_folder(tmp_path, {"a": "one"})
    (tmp_path / MARKER).write_text("{")
    with refused(f"{tmp_path / MARKER}: it is damaged"):
        write_folder(tmp_path, {"a": "two"})
    assert (tmp_path / "a").read_text() == "one"


# ---- the files ----------------------------------------------------------------------------------


@pytest.mark.cli
@pytest.mark.parametrize("name", ['a"b', r"a\b", 'x", runs = "/etc', "@RUNS@", "Köln 🏥"])
def test_a_name_stays_itself_in_the_project_file(tmp_path, monkeypatch, name):
    tomllib = pytest.importorskip("tomllib")
    monkeypatch.chdir(tmp_path)
    status, _, error = call("deploy", *WORDS, "--trainer.name", name, "--out", "app")
    assert status == 0, error
    config = tomllib.loads((tmp_path / "app/pyproject.toml").read_text())["tool"]["flwr"]["app"]
    expected = {
        "name": name,
        "runs": str(tmp_path / "runs"),
        "parties": 3,
        "timeout": 600.0,
        "nodes": "",
    }
    assert config["config"] == expected


@pytest.mark.parametrize("text", ["a\nb", 'a\x7f\x00"\\', "🏥\u2028\t"])
def test_every_text_is_one_line_of_toml(text):
    tomllib = pytest.importorskip("tomllib")
    line = toml_text(text)
    assert "\n" not in line
    assert tomllib.loads(f"x = {line}") == {"x": text}


@pytest.mark.cli
def test_runs_that_parties_cannot_have_are_not_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = {
        "trainer.name: 'a\\nb'; it must be a name": ["--trainer.name", "a\nb"],
        "model: GlobalTrain trains on the samples of all clients": [
            *["--model", "GlobalTrain", "--model.network", "SmallCNN", "--model.lr", 0.1],
        ],
        "loop.unseen: it is for simulations": ["--loop.unseen", "[1]"],
        "loop.clock: it is for simulations": ["--loop.clock", "Clock"],
        "loop.attackers: it is for simulations": [
            *["--loop.attackers.clients", "[1]", "--loop.attackers.attack", "SignFlip"],
        ],
        "model.network: Family is for simulations; real parties all have the same network": [
            *["--config", Path(__file__).parents[2] / "configs" / "hospitals.yaml"],
        ],
        "trainer.devices: '2'; it must be 1": ["--trainer.devices", 2],
        "trainer.callbacks: LocalBaseline needs the clients' samples": [
            "--trainer.callbacks",
            "[{class_path: LocalBaseline}]",
        ],
    }
    for line, words in lines.items():
        status, _, error = call("deploy", *WORDS, *words, "--out", "app")
        assert status == 2 and error.count("\n") == 1 and line in error
        assert list(tmp_path.iterdir()) == []


# ---- a party's file -----------------------------------------------------------------------------


@pytest.mark.cli
def test_options_of_a_party_are_read_strictly(app):
    file = app / "party.yaml"
    wrong = {
        "share_sizes": ["false", "no", 0, None],
        "accelerator": ["cuda", "mps", 0, True, None, ["gpu"]],
        "message_limit": [-1, 0, "5GB", 1.5, True, None],
        "folder": [5, None],
        "socket": [True],
        "app": [["."]],
    }
    for key, values in wrong.items():
        for value in values:
            file.write_text(yaml.safe_dump({"client": 0, key: value}))
            with refused(f"{file}: {key}: {value!r}; it must be "):
                read_node(file)
    for value in (False, True):
        file.write_text(yaml.safe_dump({"client": 0, "share_sizes": value, "message_limit": 5000}))
        worker, _ = read_node(file)
        told = worker.facts["sizes"][0]
        assert (told > 1, worker.sizes, worker.limit) == (value, value, 5000)


@pytest.mark.cli
def test_a_key_that_is_no_text_is_named(app):
    """YAML reads `on` as true; of keys of two types, Python sorts none."""
    file = app / "party.yaml"
    for key in ("policy", "superlink"):
        within = {"client": 0, key: {"address": "here:1", 1: 2, "other": 3}}
        for content, line in ((within, f"{key}: 1: the keys"), ({1: 2, "a": 3}, f"{file}: 1: the")):
            file.write_text(yaml.safe_dump(content))
            with refused(line):
                read_node(file)
                read_link(file)


@pytest.mark.cli
def test_paths_of_a_party_may_begin_at_the_home(app, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = app / "party.yaml"
    (tmp_path / "ca.crt").touch()
    link = {"address": "here:1", "certificates": "~/ca.crt"}
    file.write_text(yaml.safe_dump({"client": 0, "folder": "~/states", "superlink": link}))
    worker, socket = read_node(file)
    assert (worker.folder, socket) == (tmp_path / "states", tmp_path / "states" / "0.sock")
    assert worker.folder.is_dir() and not (app / "~").exists()
    assert read_link(file).certificates == tmp_path / "ca.crt"


@pytest.mark.cli
@pytest.mark.parametrize(
    ("key", "value"),
    [("timeout", "60"), ("timeout", True), ("timeout", 0), ("parties", 2.0), ("parties", 4)]
    + [("nodes", value) for value in ("1,2", "1,2,2", "1,2,x", "1,2,-3", 5, None)],
)
def test_options_of_the_server_are_read_strictly(app, key, value):
    options = {"name": "run", "runs": "runs", "timeout": 60.0, "parties": 3, key: value}
    with refused(f"{key}: {value!r}; it must be "):
        run_server(None, app, options)


@pytest.mark.cli
def test_paths_of_the_data_begin_where_they_were_written(tmp_path, monkeypatch):
    """Those of the run in the folder of `pfl deploy`, and those of a party at its file."""
    (tmp_path / "party").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for folder, value in ((tmp_path, 1), (tmp_path / "party", 2)):
        lines = ["x,y", *(f"{value},{row % 2}" for row in range(40))]
        (folder / "a.csv").write_text("\n".join(lines))
    words = ["--config", "quickstart", "--model", "FedAvg", "--model.network", "LogisticRegression"]
    words += ["--model.network.in_features", 1, "--model.network.num_classes", 2]
    words += ["--data", "TableDataModule", "--data.file", "a.csv", "--data.target_column", "y"]
    words += ["--data.num_clients", 2, "--data.partition", "IID", "--loop.clients_per_round=null"]
    monkeypatch.chdir(tmp_path)
    status, _, error = call("deploy", *words, "--trainer.callbacks", "[]", "--out", "app")
    assert status == 0, error
    monkeypatch.chdir(tmp_path / "elsewhere")
    arguments = {"file": "a.csv", "target_column": "y", "num_clients": 1}
    data = {"class_path": "TableDataModule", "init_args": arguments}
    file = tmp_path / "party" / "party.yaml"
    file.write_text(yaml.safe_dump({"app": "../app", "client": 1, "data": data}))
    for path, value in ((tmp_path / "app/party.yaml", 1), (file, 2)):
        worker, _ = read_node(path)
        samples = worker.build(None).loop.datamodule.samples
        assert samples.inputs.unique().tolist() == [value]


# ---- the socket ---------------------------------------------------------------------------------


def test_a_file_at_the_place_of_the_socket_stays(tmp_path):
    file = tmp_path / "precious.csv"
    file.write_text("mine")
    (tmp_path / "link").symlink_to(file)
    for path in (file, tmp_path / "link"):
        with refused(f"socket: {path} is there, and is not a socket"):
            listener(path)
    assert file.read_text() == "mine" and (tmp_path / "link").is_symlink()


def test_a_long_path_of_a_socket_is_told_before_the_party_is_ready(tmp_path):
    said = []
    worker = Worker(0, {}, {}, lambda classes: None, tmp_path)
    with refused("socket: there can be no socket", "give a short path in a folder that exists"):
        worker.serve(tmp_path / ("a" * 120), lambda: said.append("ready"))
    with refused("socket: there can be no socket", "No such file or directory"):
        worker.serve(Path("nowhere/0.sock"), lambda: said.append("ready"))
    assert said == []


def test_the_socket_of_an_ended_worker_is_replaced_and_that_of_a_running_one_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # a short path
    path = Path("0.sock")
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    with listener(path) as running:
        assert path.stat().st_mode & 0o777 == 0o600
        with refused("socket: another process answers at 0.sock"):
            listener(path)
        asked = threading.Thread(target=lambda: running.accept().close())
        asked.start()
        asked.join(10)


def test_the_marker_says_who_has_written_the_folder(tmp_path):
    write_folder(tmp_path, {"a": "one"})
    content = json.loads((tmp_path / MARKER).read_text())
    assert content["written by"] == "pfl deploy" and list(content["files"]) == ["a"]


@pytest.mark.cli
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model", "GlobalTrain"], "model: GlobalTrain trains on the samples of all clients"),
        (["--model", "FedAsync"], "model: FedAsync is asynchronous, which is for simulations"),
        (["--model", "FedBuff"], "model: FedBuff is asynchronous, which is for simulations"),
        (["--loop.unseen", "[1]"], "loop.unseen: it is for simulations; parties take null"),
        (["--loop.clock", "{speed: 2.0}"], "loop.clock: it is for simulations"),
        (["--trainer.callbacks", "[LocalBaseline]"], "LocalBaseline needs the clients' samples"),
        (["--trainer.callbacks", "LocalBaseline"], "LocalBaseline needs the clients' samples"),
        (["--trainer.devices", 2], "trainer.devices: '2'; it must be 1; a server has one process"),
        (["--trainer.num_nodes", 2], "trainer.num_nodes: 2; it must be 1; a server has one"),
        (["--trainer.precision", "bf16-mixed"], "parties take 32-true or 64-true"),
    ],
)
def test_what_cannot_run_with_parties_is_refused_at_once(tmp_path, monkeypatch, words, line):
    monkeypatch.chdir(tmp_path)
    first = ["--config", "quickstart", "--data.num_clients", 3, "--trainer.callbacks", "[]"]
    status, _, error = call("deploy", *first, *words, "--out", "app")
    assert status == 2 and line in error and error.count("\n") == 1
    assert not Path("app").exists()


@pytest.mark.cli
@pytest.mark.parametrize(
    ("words", "begin"),
    [
        (["--model.loss", "torch.nn.MSELoss"], "loss: MSELoss cannot compare outputs ["),
        (["--model.network.num_classes", 9], "network: SmallCNN gives outputs of shape [9] for"),
        (["--loop.clients_per_round", 4], "loop.clients_per_round: 4; it must be from 1 to 3"),
    ],
)
def test_what_does_not_fit_the_data_is_refused_as_by_fit(tmp_path, monkeypatch, words, begin):
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "--model.network", "SmallCNN", *words]
    status, _, expected = call("fit", *words)
    assert status == 2 and expected.startswith(f"error: {begin}")
    assert call("deploy", *words, "--out", "app") == (2, "", expected)
    assert not Path("app").exists()
