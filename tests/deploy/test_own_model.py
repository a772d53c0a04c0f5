"""A party predicts with its own model and scores it, from its states alone; no server is there."""

import shutil
from pathlib import Path

import pytest

from pfl.deploy.app import read_node, run_server
from tests.commands import call, table
from tests.deploy.hospitals import Direct, deployed, party

pytestmark = pytest.mark.cli

NETWORK = ["--model.network", "MLP", "--model.network.in_features", 2]
NETWORK += ["--model.network.hidden", "[3]", "--model.network.num_classes", 3]
TEST = "{class_path: SplitOwn, init_args: {test: 0.34, validation: 0.0}}"
DITTO = ["--model", "Ditto", *NETWORK]
METHODS = {
    "a model of its own": [*DITTO, "--loop.evaluate", "[test]"],
    "layers of its own": ["--model", "FedPer", *NETWORK, "--loop.evaluate", "[]"],
}


def trained(folder, *words):
    """Trains the three hospitals, and returns their files; the server and its run are gone."""
    app = deployed(folder, *words)
    files = [party(app, client) for client in range(3)]
    workers = [read_node(file)[0] for file in files]
    run_server(Direct(workers), app, {"name": "run", "runs": "runs", "timeout": 60.0, "parties": 3})
    shutil.rmtree("runs")
    return files


@pytest.mark.parametrize("method", METHODS)
def test_a_party_predicts_what_the_simulation_predicts_for_it(tmp_path, monkeypatch, method):
    """Layers of its own need the server's last model, which comes at the end at the latest."""
    monkeypatch.chdir(tmp_path)
    words = [*METHODS[method], "--model.lr", 0.5, "--model.batch_size", "null"]
    words += ["--seed_everything", 0]
    files = trained(tmp_path, *words)
    status, _, error = call(
        "fit", "--config", "run.yaml", *words, "--trainer.default_root_dir", "one"
    )
    assert status == 0, error
    Path("new.csv").write_text("id,age,pressure\nx,42,121\ny,71,99\n")
    for client, name in enumerate("abc"):
        rows = ["--rows", "new.csv", "--id", "id"]
        status, _, error = call("predict", "--party", files[client], *rows, "--out", "own.csv")
        assert status == 0, error
        status, _, error = call(
            "predict", "one/run", *rows, "--client", name, "--out", "simulated.csv"
        )
        assert status == 0, error
        mine = table(Path("own.csv"))
        theirs = table(Path("simulated.csv"))
        assert [row["id"] for row in mine] == ["x", "y"]
        for own, other in zip(mine, theirs, strict=True):
            assert own.pop("model") == f"party {client}" and other.pop("model") == name
            assert own == other


def test_a_party_scores_its_model_on_its_own_samples(tmp_path, monkeypatch):
    """Hospital a has three rows, of which one is a test sample."""
    monkeypatch.chdir(tmp_path)
    words = ["--data.protocol", TEST, *DITTO, "--model.lr", 0.1]
    app = deployed(tmp_path, *words)
    protocol = {"class_path": "SplitOwn", "init_args": {"test": 0.34, "validation": 0.0}}
    files = [party(app, client, protocol=protocol) for client in range(3)]
    workers = [read_node(file)[0] for file in files]
    run_server(Direct(workers), app, {"name": "run", "runs": "runs", "timeout": 60.0, "parties": 3})
    status, out, error = call("evaluate", "--party", files[0], "--out", "scores")
    assert status == 0, error
    (row,) = table(Path("scores/scores.csv"))
    assert (row["split"], row["model"], row["samples"]) == ("test", "personalized", "1")
    assert float(row["accuracy"]) in (0.0, 1.0) and float(row["loss"]) > 0
    assert "personalized" in out


def test_what_a_party_cannot_predict_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("new.csv").write_text("age,pressure\n42,121\n")
    app = deployed(tmp_path)
    file = party(app, 0)
    rows = ["--rows", "new.csv"]

    def refusal(*words):
        status, _, error = call(*words)
        assert status == 2 and error.count("\n") == 1
        return error

    line = "predict: --party: party 0: FedAvg has one model for all parties, which is in the"
    assert line in refusal("predict", "--party", file, *rows)
    shutil.rmtree("app")
    for hospital in "abc":
        shutil.rmtree(hospital)
    app = deployed(tmp_path, *DITTO, "--model.lr", 0.1)
    file = party(app, 0)
    line = "predict: --party: party 0 has no model in"
    assert line in refusal("predict", "--party", file, *rows)
    line = "error: no.yaml: it must be a party's file, a YAML file with keys: app, client, data"
    assert line in refusal("predict", "--party", "no.yaml", *rows)
    line = "predict: --client and --party: give one of them"
    assert line in refusal("predict", "--party", file, *rows, "--client", "a")
    line = "evaluate: --split: train; with --party it must be val or test"
    assert line in refusal("evaluate", "--party", file, "--split", "train")
    assert "RUN: give the folder of a run, or --party" in refusal("evaluate")
    files = trained_again(app)
    (path,) = Path("a/parties").glob("*/client-0/received.bin")
    content = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "received.bin is damaged" in refusal("predict", "--party", files[0], *rows)


def trained_again(app):
    files = [party(app, client) for client in range(3)]
    workers = [read_node(file)[0] for file in files]
    run_server(Direct(workers), app, {"name": "run", "runs": "runs", "timeout": 60.0, "parties": 3})
    return files
