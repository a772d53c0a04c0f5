"""`pfl export`: exported models score as in the run, in a process without the framework."""

import copy
import json
import math
import re
import shutil
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import models as models_package
from datamodules import DigitsDataModule, Dirichlet
from models import SmallCNN
from pfl.cli.main import main
from pfl.cli.options import add_parsers
from pfl.export.run import RestoredRun
from pfl.files import write_records
from tests.cli.configurations import SMALL, changed, write
from tests.commands import call, finish, table
from tests.refusal import refused

pytestmark = pytest.mark.cli

MLP = {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [8]}}
WIDE = {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [16]}}
SIZES = {"num_classes": 10, "image_size": 8, "in_channels": 1, "width": 4}
BATCH_NORM = {"class_path": "CelebACNN", "init_args": SIZES}
GROUP_NORM = {"class_path": "models.replace_batch_norm", "init_args": {"network": BATCH_NORM}}
CNN = {"class_path": "SmallCNN", "init_args": {"width": 4}}
FAMILY = {
    "class_path": "Family",
    "init_args": {"networks": {"small": MLP, "a wide one": WIDE}, "features": 8},
}
LOW_RANK = {"low_rank_penalty": 0.25, "proximal_step": 1.0}
# The run -> (the method, its arguments, the network, what is exported). Client 5 never trains.
RUNS = {
    "global": ("FedAvg", {}, GROUP_NORM, ["--global"]),
    "both": ("FedSLR", LOW_RANK, MLP, ["--client", "all", "--global", "--factored"]),
    "head": ("FedRep", {}, CNN, ["--client", "0", "3"]),
    "attention": ("FedAMP", {}, MLP, ["--client", "2", "5"]),
    "statistics": ("Ditto", {"buffers": "local"}, BATCH_NORM, ["--client", "0", "1"]),
    "adapted": ("PerFedAvg", {}, MLP, ["--client", "4"]),
    "factors": ("Ditto", {"trainable": "lora"}, WIDE, ["--client", "1", "--global"]),
    "valve": ("GPFL", {}, MLP, ["--client", "0", "5"]),
    "policy": ("FedCP", {}, MLP, ["--client", "2", "5"]),
    "family": ("FedProto", {}, FAMILY, ["--client", "0", "1", "5"]),
    "bottleneck": ("FedAvg", {"trainable": "adapter"}, MLP, ["--global"]),
}
# Runs the lines of each README, as its reader would, and scores the network.
SCORE = """
import json, os, re, sys, torch
from torch.nn.functional import cross_entropy
result = {}
for folder in sys.argv[1:]:
    os.chdir(folder)
    scope = {}
    exec(re.search(r"```python\\n(.*?)```", open("README.md").read(), re.S)[1], scope)
    samples = torch.load("samples.pt")
    with torch.no_grad():
        outputs = scope["network"](samples["inputs"])  # the factored one, if there is one
    loss = cross_entropy(outputs, samples["targets"]).item()
    accuracy = (outputs.argmax(1) == samples["targets"]).double().mean().item()
    result[folder] = accuracy, loss
allowed = re.compile(r"pfl(\\.models.*|\\.current_folder|\\._short_names)?$")
of_pfl = [name for name in sys.modules if name.split(".")[0] in ("pfl", "lightning")]
assert all(map(allowed.match, of_pfl)), of_pfl
print(json.dumps(result))
"""


def fit(folder, name, method, arguments, network):
    config = copy.deepcopy(SMALL)
    config["trainer"] |= {"name": name, "default_root_dir": str(folder / "runs")}
    config["trainer"] |= {"enable_progress_bar": False}
    config["model"]["class_path"] = method
    config["model"]["init_args"] |= {"network": network, **arguments}
    config["loop"]["unseen"] = [5]
    assert main(["fit", "--config", str(write(folder / f"{name}.yaml", config))]) == 0
    return folder / "runs" / name


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """For each run its folder, and the folder of its exported models."""
    folder = tmp_path_factory.mktemp("export")
    result = {}
    for name, (*run, words) in RUNS.items():
        made = fit(folder, name, *run)
        out = folder / "out" / name
        assert main(["export", str(made), *words, "--out", str(out)]) == 0
        result[name] = made, out
    return result


def models(exported):
    """(The run's folder, the model's folder, its client or None) of every exported model."""
    for run, out in exported.values():
        for folder in out.iterdir():
            name = re.fullmatch(r"client(\d+)|global", folder.name)
            yield run, folder, None if name[1] is None else int(name[1])


def test_models_are_those_that_were_asked_for(exported):
    names = {run: {folder.name for folder in out.iterdir()} for run, (_, out) in exported.items()}
    assert names["global"] == {"global"}
    assert names["both"] == {"global", *(f"client{i}" for i in range(6))}
    assert names["head"] == {"client0", "client3"}


def test_all_clients_and_one_of_them_are_all(exported, tmp_path):
    path = exported["head"][0] / "checkpoints" / "last.ckpt"
    words = ["--client", "0", "all", "--client", "3", "--out", str(tmp_path)]
    assert main(["export", "--ckpt_path", str(path), *words]) == 0
    assert {folder.name for folder in tmp_path.iterdir()} == {f"client{i}" for i in range(6)}


@pytest.mark.slow
@pytest.mark.processes
def test_models_score_without_the_framework_as_in_the_run(exported, tmp_path):
    """The expected scores are from the run's own evaluation, clients.csv."""
    data = DigitsDataModule(6, Dirichlet(1.0), seed=0)
    data.setup()
    for _, folder, client in models(exported):
        owners = range(5) if client is None else [client]
        index = np.concatenate([data.partition.test.of(np.array([i])) for i in owners])
        inputs, targets = data.samples.gather(torch.from_numpy(index).long())
        torch.save({"inputs": inputs, "targets": targets}, folder / "samples.pt")
    folders = [folder for _, folder, _ in models(exported)]
    scores = json.loads(finish("-c", SCORE, *folders, cwd=tmp_path, fresh=True))
    for run, folder, client in models(exported):
        rows = table(run / "clients.csv")[:5]
        if client is None:  # all samples together: the mean weighs clients by their samples
            sizes = [int(row["test_samples"]) for row in rows]
            expected = [
                np.average([float(row[f"test/global/{k}"]) for row in rows], weights=sizes)
                for k in ("accuracy", "loss")
            ]
        else:
            kind = "unseen/0" if client == 5 else "personalized"
            row = table(run / "clients.csv")[client]
            expected = [float(row[f"test/{kind}/{k}"]) for k in ("accuracy", "loss")]
        np.testing.assert_allclose(scores[str(folder)], expected, rtol=2e-6)


def test_the_card_has_the_origin_of_the_model(exported):
    run, out = exported["both"]
    card = json.loads((out / "client3" / "card.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    row = table(run / "clients.csv")[3]
    assert card["method"]["class_path"].endswith("FedSLR")
    assert card["method"]["init_args"]["low_rank_penalty"] == 0.25
    assert card["network"]["init_args"] == {"in_features": 64, "hidden": [8], "num_classes": 10}
    assert card["parameters"] == 64 * 8 + 8 + 8 * 10 + 10
    assert (card["model"], card["client"], card["rounds"]) == ("personalized", 3, 2)
    assert card["input"] == {"shape": [1, 8, 8], "dtype": "float32"}
    assert card["partition_hash"] == summary["partition_hash"]
    assert card["seed"] == {"seed_everything": 0, "data": 0, "loop": 0}
    assert card["data"]["init_args"]["partition"]["init_args"]["alpha"] == 1.0
    assert card["versions"]["run"] == summary["versions"]
    assert card["scores"]["test/personalized/loss"] == float(row["test/personalized/loss"])
    assert card["scores"]["train_samples"] == int(row["train_samples"])
    whole = json.loads((out / "global" / "card.json").read_text())
    assert whole["scores"]["test/global/accuracy"] == summary["test/global/accuracy"]
    assert "client" not in whole


def test_the_factored_global_model_has_the_parameters_that_the_run_counts(exported):
    run, out = exported["both"]
    summary = json.loads((run / "summary.json").read_text())
    sizes = json.loads((out / "global" / "card.json").read_text())["factored"]
    assert sizes["parameters"]["dense"] == 64 * 8 + 8 + 8 * 10 + 10
    assert sizes["parameters"]["factored"] == summary["parameters/global"] < 610
    assert sizes["milliseconds"].keys() == {"dense", "factored"} and sizes["batch"] == 20
    # The outputs are of the size of 1; float32 has 7 digits.
    assert sizes["largest_difference"] < 1e-5
    table = (out / "global" / "README.md").read_text()
    assert "`pfl.models` is in the package lightning-pfl" in table
    assert f"| factored | {summary['parameters/global']:,} |" in table


@pytest.mark.slow
def test_onnx_graphs_give_the_networks_outputs(exported, tmp_path):
    from onnxruntime import InferenceSession

    run, out = exported["both"]
    words = ["--ckpt_path", str(run / "checkpoints/last.ckpt"), "--client", "3", "--factored"]
    assert main(["export", *words, "--format", "onnx", "--out", str(tmp_path)]) == 0
    network = models_package.MLP(64, (8,))
    network.load_state_dict(load_file(out / "client3" / "model.safetensors"))
    inputs = torch.rand(7, 1, 8, 8)  # another number of samples than the graph was made with
    for name in ("model", "factored"):
        session = InferenceSession(tmp_path / "client3" / f"{name}.onnx")
        (outputs,) = session.run(None, {"inputs": inputs.numpy()})
        np.testing.assert_allclose(outputs, network(inputs).detach(), rtol=1e-4, atol=1e-5)
    text = (tmp_path / "client3" / "README.md").read_text()
    assert "InferenceSession" in text
    assert "package lightning-pfl" not in text  # nothing of it is needed


def copied_run(run, folder):
    """A copy of what an export reads of a run, but its summary."""
    copied = folder / "run"
    (copied / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "clients.csv", "checkpoints/last.ckpt"):
        (copied / name).write_bytes((run / name).read_bytes())
    return copied


def test_scores_of_another_round_are_left_out(tmp_path, exported):
    """The run went on for a round, but the checkpoint is that of the round before."""
    run, _ = exported["head"]
    summary = json.loads((run / "summary.json").read_text())
    copied = copied_run(run, tmp_path)
    (copied / "summary.json").write_text(json.dumps({**summary, "round": 3}))
    words = ["--ckpt_path", str(copied / "checkpoints/last.ckpt"), "--client", "0"]
    assert main(["export", *words, "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "client0/card.json").read_text())["scores"] == {}


@pytest.mark.parametrize("words", [["--client", "0"], ["--global"]])
def test_a_score_that_is_no_number_of_json_is_null(tmp_path, exported, words):
    """A loss can be infinite where the model is finite; readers of JSON know no Infinity."""
    run, _ = exported["both"]
    copied = copied_run(run, tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    infinite = {**summary, "test/global/loss": math.inf}
    (copied / "summary.json").write_text(json.dumps(infinite))
    rows = table(run / "clients.csv")
    rows[0]["test/global/loss"] = "inf"
    write_records(copied / "clients.csv", rows)
    checkpoint = str(copied / "checkpoints/last.ckpt")
    assert main(["export", "--ckpt_path", checkpoint, *words, "--out", str(tmp_path)]) == 0
    (card,) = tmp_path.glob("*/card.json")
    scores = json.loads(card.read_text(), parse_constant=pytest.fail)["scores"]
    assert scores["test/global/loss"] is None
    assert scores["test/global/accuracy"] is not None


def test_an_export_changes_nothing_in_the_folder_of_the_run(exported, tmp_path):
    run, _ = exported["head"]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    threads = torch.get_num_threads()
    words = ["--ckpt_path", str(run / "checkpoints/last.ckpt"), "--client", "1"]
    assert main(["export", *words, "--out", str(tmp_path)]) == 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert torch.get_num_threads() == threads


def test_tensors_have_the_plain_names_and_the_clients_own_head(exported):
    _, out = exported["head"]
    one, other = (load_file(out / name / "model.safetensors") for name in ("client0", "client3"))
    assert one.keys() == SmallCNN(width=4).state_dict().keys()
    same = {name for name in one if torch.equal(one[name], other[name])}
    assert same == {name for name in one if name.startswith("body.")}  # FedRep shares the body


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        (
            "head",
            ["--client", "6"],
            "--client: 6; it must be a client's number from 0 to 5, or all",
        ),
        ("head", ["--client", "0", "--factored"], "--factored: FedRep has no low-rank model"),
        ("head", ["--client", "0", "--format", "pt"], "invalid choice: 'pt'"),
        ("factors", ["--global", "--format", "peft"], "peft; it needs a Pretrained network"),
        (
            "head",
            ["--client", "x"],
            "--client: x; it must be a client's number from 0 to 5, or all",
        ),
        ("head", ["--global"], "--global: FedRep has no global model; give --client"),
        ("global", ["--client", "0"], "FedAvg has one model for all clients; give --global"),
        ("head", [], "give --client with names, numbers or all, --global, or both"),
        (
            "head",
            ["--client", "0", "--states", "s"],
            "--states: s, but the run has no real parties",
        ),
        ("head", ["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (None, ["--global"], "; it must be the folder of a run, or a checkpoint in it"),
    ],
)
def test_mistakes_are_one_line(run, words, message, exported, tmp_path, capsys):
    folder = tmp_path if run is None else exported[run][0]
    path = str(folder / "checkpoints" / "last.ckpt")
    out = tmp_path / "out"
    assert main(["export", "--ckpt_path", path, *words, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not out.exists()


def test_a_checkpoint_without_the_configuration_of_its_run_is_refused(exported, tmp_path, capsys):
    """First there is no configuration, then that of a run with another partition."""
    run, _ = exported["head"]
    path = tmp_path / "checkpoints" / "last.ckpt"
    path.parent.mkdir()
    path.write_bytes((run / "checkpoints" / "last.ckpt").read_bytes())
    words = ["--ckpt_path", str(path), "--client", "0", "--out", str(tmp_path / "out")]
    assert main(["export", *words]) == 2
    assert f"{tmp_path / 'config.yaml'} is missing" in capsys.readouterr().err
    config = yaml.safe_load((run / "config.yaml").read_text())
    write(tmp_path / "config.yaml", changed(config, "seed_everything", 7))
    assert main(["export", *words]) == 2
    assert "the checkpoint's partition is" in capsys.readouterr().err


def test_a_run_is_given_by_its_folder_or_by_a_checkpoint(exported, tmp_path, capsys):
    """An interrupted run has no summary, and the card of its model no scores."""
    run, out = exported["head"]
    stopped = tmp_path / "stopped"
    shutil.copytree(run, stopped)
    (stopped / "summary.json").unlink()
    last = stopped / "checkpoints" / "last.ckpt"
    for number, words in enumerate(([stopped], [last], ["--ckpt_path", stopped])):
        folder = tmp_path / str(number)
        assert call("export", *words, "--client", "0", "--out", folder)[0] == 0
        written = (folder / "client0" / "model.safetensors").read_bytes()
        assert written == (out / "client0" / "model.safetensors").read_bytes()
        assert json.loads((folder / "client0" / "card.json").read_text())["scores"] == {}
    options = ["--client", "0", "--out", tmp_path / "none"]
    for words, line in (
        ([], "export: RUN: give the folder of a run"),
        ([run, "--ckpt_path", last], "export: RUN and --ckpt_path: give one of them"),
    ):
        status, _, error = call("export", *words, *options)
        assert (status, error) == (2, f"error: {line}\n")
    last.unlink()
    status, _, error = call("export", stopped, *options)
    assert status == 2
    assert error.startswith(f"error: export: {stopped}; it has no checkpoints/last.ckpt: no round")


def test_a_checkpoint_in_the_current_folder(exported, tmp_path, monkeypatch):
    run, out = exported["head"]
    monkeypatch.chdir(run / "checkpoints")
    words = ["--ckpt_path", "last.ckpt", "--client", "0", "--out", tmp_path / "out"]
    assert call("export", *map(str, words))[0] == 0
    written, expected = (
        folder / "client0" / "model.safetensors" for folder in (tmp_path / "out", out)
    )
    assert written.read_bytes() == expected.read_bytes()


def test_clients_and_classes_keep_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, classes = ["Bern | West", "Köln", "Oslo"], ["<ill>", "well"]
    rows = [f"{i % 7},{i % 5},{classes[i % 2]},{names[i % 3]}" for i in range(60)]
    Path("a.csv").write_text("\n".join(["age,dose,outcome,hospital", *rows]), encoding="utf-8")
    data = ["--data=TableDataModule", "--data.file=a.csv", "--data.target_column=outcome"]
    data += ["--data.client_column=hospital", "--data.partition=Natural", "--data.num_clients=null"]
    network = "--model FedPer --model.network MLP --model.network.in_features 2"
    words = f"{network} --model.network.num_classes 2 --trainer.name a --trainer.max_epochs 1"
    status, text, _ = call("fit", *data, *words.split(), "--loop.clients_per_round=null")
    assert status == 0 and "lowest: " in text and "Köln" in text
    assert [row["name"] for row in table(Path("runs/a/clients.csv"))] == names
    status, text, _ = call("partition", *data, "--out", "part")
    assert status == 0 and all(name in text for name in names)
    assert [row["name"] for row in table(Path("part/partition.csv"))] == names
    assert call("report", "runs/a")[0] == 0
    page = Path("runs/a/report.html").read_text(encoding="utf-8")
    assert all(name in page for name in [*names, "well"]) and "<ill>" not in page
    checkpoint = "runs/a/checkpoints/last.ckpt"
    assert call("export", "--ckpt_path", checkpoint, "--client", "0", "--out", "out")[0] == 0
    card = json.loads(Path("out/client0/card.json").read_text(encoding="utf-8"))
    assert (card["client_name"], card["classes"]) == (names[0], classes)
    text = Path("out/client0/README.md").read_text(encoding="utf-8")
    assert "| Client | Bern &#124; West |" in text and "| Classes | &lt;ill&gt;, well |" in text


def test_a_name_of_digits_is_that_client_and_no_number():
    """The hospitals 1 and 2 are the clients 0 and 1; a word that is no name is a number."""
    data = SimpleNamespace(num_clients=2, datamodule=SimpleNamespace(client_names=["1", "2"]))
    run = SimpleNamespace(datamodule=data)
    assert [RestoredRun.number(run, word) for word in ("1", "2", "0", 0, 1)] == [0, 1, 0, 0, 1]
    with refused("export: --client: 3; it must be a client's name, its number from 0 to 1, or all"):
        RestoredRun.number(run, "3")


def test_clients_may_be_named_in_several_words():
    parser = ArgumentParser()
    add_parsers(parser.add_subparsers())
    words = "export --ckpt_path a --out b --client 007 --client 7 8 --global"
    given = parser.parse_args(words.split())
    assert given.client == ["007", "7", "8"]


@pytest.mark.parametrize(
    ("network", "messenger"), [(WIDE, MLP), (FAMILY, None)], ids=["given", "first of the family"]
)
def test_a_client_of_fedmrl_loads_with_its_messenger(network, messenger, tmp_path, monkeypatch):
    """Its outputs need both networks; the expected loss is that of the run's own evaluation."""
    run = fit(tmp_path, "nested", "FedMRL", {"messenger": messenger}, network)
    words = ["--ckpt_path", str(run / "checkpoints/last.ckpt"), "--client", "0", "1"]
    assert main(["export", *words, "--out", str(tmp_path)]) == 0
    data = DigitsDataModule(6, Dirichlet(1.0), seed=0)
    data.setup()
    for client in (0, 1):
        monkeypatch.chdir(tmp_path / f"client{client}")
        scope = {}
        exec(re.search(r"```python\n(.*?)```", Path("README.md").read_text(), re.S)[1], scope)
        index = torch.from_numpy(data.partition.test.of(np.array([client]))).long()
        inputs, targets = data.samples.gather(index)
        loss = torch.nn.functional.cross_entropy(scope["network"](inputs), targets).item()
        expected = float(table(run / "clients.csv")[client]["test/personalized/loss"])
        np.testing.assert_allclose(loss, expected, rtol=2e-6)
