"""Classes, columns and transforms mean the same at all parties, or a party is refused."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from datamodules import TableDataModule
from pfl.deploy.app import read_node, run_server
from pfl.deploy.data import RemoteData
from pfl.deploy.wire import pack, unpack
from tests.commands import call
from tests.deploy.hospitals import Direct, deployed, party
from tests.refusal import refused

pytestmark = pytest.mark.cli

MISSING = "data.transforms: Normalize has no numbers"


@pytest.fixture
def app(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return deployed(tmp_path)


def test_the_labels_and_inputs_of_each_party_are_those_of_the_run(app):
    """Home is 0, moved 1, readmitted 2, also where a file lacks some of them."""
    expected = {0: [0, 2, 1], 1: [1, 0], 2: [2, 2]}
    for client, labels in expected.items():
        worker, socket = read_node(party(app, client))
        assert socket == app.parent / "abc"[client] / "own.sock"
        assert worker.facts["class_names"] == ["home", "moved", "readmitted"]
        assert worker.facts["classes"] == 3
        data = worker.build(None).loop.datamodule
        every = torch.arange(len(labels))
        inputs, targets = data.samples.gather(every)
        assert targets.tolist() == labels
    # 70 and 80 years, pressures 140 and 100
    normal = data.transforms(inputs, torch.full((2,), 2), every)
    torch.testing.assert_close(normal, torch.tensor([[2.0, 2.0], [3.0, 0.0]]))


def test_a_run_of_files_is_the_simulation_of_one_file(app):
    channel = Direct([read_node(party(app, client))[0] for client in range(3)])
    options = {"name": "run", "runs": "runs", "timeout": 60.0, "parties": 3}
    run_server(channel, app, options)
    status, _, error = call("fit", "--config", "run.yaml", "--trainer.default_root_dir", "one")
    assert status == 0, error
    models = []
    for folder in ("runs", "one"):
        saved = torch.load(Path(folder, "run/checkpoints/last.ckpt"), weights_only=True)
        models.append(saved["state_dict"])
    assert models[0].keys() == models[1].keys() and len(models[0]) > 0
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            {"class_names": ["readmitted", "home", "moved"]},
            [
                "class_names: party 0 has ['readmitted', 'home', 'moved'], and the run has "
                "['home', 'moved', 'readmitted']"
            ],
        ),
        (
            {"feature_columns": ["pressure", "age"]},
            ["feature_names: party 0 has ['pressure', 'age'], and the run has ['age', 'pressure']"],
        ),
        (
            {
                "transforms": [
                    {"class_path": "Normalize", "init_args": {"mean": [0, 0], "std": [1, 1]}}
                ]
            },
            [
                "transforms: party 0 has ['Normalize(mean=[0.0, 0.0], std=[1.0, 1.0])'], and the "
                "run has ['Normalize(mean=[50.0, 100.0], std=[10.0, 20.0])']"
            ],
        ),
        ({"transforms": [{"class_path": "Normalize"}]}, [MISSING, "as the run has them"]),
    ],
)
def test_a_party_whose_samples_mean_something_else_is_refused(app, arguments, parts):
    with refused(*parts):
        read_node(party(app, 0, **arguments))


def test_a_party_is_checked_without_a_server(app):
    """Its own file has three rows, of which all are trained on."""
    status, out, error = call("node", "--config", party(app, 0), "--check")
    assert status == 0, error
    lines = out.split("\n\n")[0].splitlines()
    rows = dict(line.strip().split("  ", 1) for line in lines[1:])
    rows = {key: value.strip() for key, value in rows.items()}
    assert out.startswith("party 0 agrees with run.yaml and server.yaml:\n")
    assert rows["class names"] == "['home', 'moved', 'readmitted']"
    assert rows["input"] == "['float32', [2]]"
    assert rows["samples"] == "3 to train with, 0 to validate, 0 to test"
    wrong = party(app, 0, feature_columns=["pressure", "age"])
    status, out, error = call("node", "--config", wrong, "--check")
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert "feature_names: party 0 has ['pressure', 'age'], and the run has" in error


WARDS = {
    "a": ["40,A,home", "60,2,moved"],
    "b": ["55,A,moved", "45,3,home"],
    "c": ["70,3,home", "80,2,moved"],
}
"""The ages, wards and outcomes of three hospitals, of which none has all wards.

The wards of hospital c alone are numbers.
"""


@pytest.mark.parametrize(("categories", "columns"), [("codes", 2), ("one-hot", 4)])
def test_a_level_has_one_number_at_all_parties(tmp_path, monkeypatch, categories, columns):
    """2 is 0, 3 is 1 and A is 2, also where a file lacks some of them."""
    monkeypatch.chdir(tmp_path)
    words = ["--data.categories", categories, "--data.transforms", "[]"]
    words += ["--model.network.in_features", columns]
    words += ["--model.network.num_classes", 2]
    app = deployed(tmp_path, *words, head="age,ward,outcome", all_rows=WARDS)
    own = {"categories": categories, "transforms": []}
    workers = []
    for client, rows in enumerate(WARDS.values()):
        worker, _ = read_node(party(app, client, **own))
        workers.append(worker)
        assert worker.facts["levels"] == {"ward": ["2", "3", "A"]}
        inputs = worker.build(None).loop.datamodule.samples.gather(torch.arange(2))[0]
        wards = ["23A".index(row.split(",")[1]) for row in rows]
        if categories == "codes":
            assert inputs[:, 1].tolist() == wards
        else:
            assert inputs[:, 1:].tolist() == torch.eye(3)[wards].tolist()
    run_server(Direct(workers), app, {"name": "run", "runs": "runs", "timeout": 60.0, "parties": 3})
    checkpoint = "runs/run/checkpoints/last.ckpt"
    status, _, error = call("export", "--ckpt_path", checkpoint, "--global", "--out", "m")
    assert status == 0, error
    card = json.loads(Path("m/global/card.json").read_text())
    assert card["input"]["levels"] == {"ward": ["2", "3", "A"]}
    whose = {"codes": "levels: party 0 has {'ward': ['3', '2', 'A']}, and the run has"}
    whose["one-hot"] = "feature_names: party 0 has ['age', 'ward=3', 'ward=2', 'ward=A'], and the"
    with refused(whose[categories]):
        read_node(party(app, 0, **own, levels={"ward": ["3", "2", "A"]}))
    file = app.parent / "a" / "own.csv"
    file.write_text(file.read_text() + "50,D,home\n")
    with refused("the column 'ward' holds 'D'; it must be one of its levels, which are 2, 3, A"):
        read_node(party(app, 0, **own))


def test_whole_numbers_are_numbers_where_the_run_has_numbers(tmp_path, monkeypatch):
    """Alone, the file of hospital b would have the classes 2 and 4."""
    monkeypatch.chdir(tmp_path)
    stays = {"a": ["40,1.5", "60,2"], "b": ["55,4", "45,2"], "c": ["70,0.5"]}
    words = ["--data.transforms", "[]", "--model.network.in_features", 1]
    words += ["--model.network.num_classes", 1]
    app = deployed(tmp_path, *words, head="age,outcome", all_rows=stays)
    for client, expected in enumerate(([1.5, 2.0], [4.0, 2.0], [0.5])):
        worker, _ = read_node(party(app, client, transforms=[]))
        assert worker.facts["target"] == ["float32", []]
        samples = worker.build(None).loop.datamodule.samples
        assert samples.gather(torch.arange(len(expected)))[1].tolist() == expected


def test_a_class_that_the_run_does_not_have_is_named(app):
    own = app.parent / "c" / "own.csv"
    own.write_text(own.read_text() + "60,100,died\n")
    with refused("'died'; it must be one of class_names, which are home, moved, readmitted"):
        read_node(party(app, 2))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("class_names", ["moved", "home", "readmitted"]),
        ("feature_names", ["pressure", "age"]),
        ("levels", {"age": ["40", "60"]}),
        ("transforms", []),
    ],
)
@pytest.mark.parametrize("has", [True, False], ids=["the run has names", "the run has none"])
def test_the_server_compares_what_parties_tell(app, key, value, has):
    """Where the run's file has nothing, the party that came first decides."""
    workers = [read_node(party(app, client))[0] for client in range(3)]
    others = workers[0].facts[key]
    whose = "the run"
    if not has:
        whose = "party 0"
        content = yaml.safe_load((app / "server.yaml").read_text())
        del content["data"]["init_args"][key]
        (app / "server.yaml").write_text(yaml.safe_dump(content))
        for worker in workers:
            del worker.agreed[f"data.{key}"]
    workers[1].facts[key] = value
    options = {"name": "run", "runs": "runs", "timeout": 1.0, "parties": 3}
    line = f"{key}: party 1 has {value}, and {whose} has {others}; all parties must have the same"
    with pytest.warns(UserWarning, match="a party is refused"), refused(line):
        run_server(Direct(workers), app, options)


def test_a_run_without_the_numbers_is_not_deployed(app):
    """The mean of the seven ages is 400 / 7, that of the pressures 790 / 7."""
    words = [
        "--config",
        "run.yaml",
        "--data.transforms",
        "[{class_path: Normalize, init_args: {mean: null, std: null}}]",
    ]
    status, _, error = call("deploy", *words, "--out", "other")
    assert status == 2 and error.count("\n") == 1
    assert MISSING in error and "mean: [57.14, 112.9], std: [" in error
    assert not Path("other").exists()


def test_a_run_with_numbers_of_each_client_is_not_deployed(app):
    """Clients of a simulation may have numbers of their own, which are none for all parties."""
    words = ["--config", "run.yaml", "--data.transforms"]
    words.append("[{class_path: Normalize, init_args: {mean: null, std: null, of: client}}]")
    status, _, error = call("deploy", *words, "--out", "other")
    assert status == 2 and error.count("\n") == 1
    assert MISSING in error and error.endswith("give mean and std in the run's file\n")
    assert not Path("other").exists()


def test_hello_tells_names_and_no_counts(app):
    worker, _ = read_node(party(app, 2))
    told = unpack(worker.answer(pack({"do": "hello", "agreed": worker.agreed})))
    assert told["feature_names"] == ["age", "pressure"]
    assert told["transforms"] == ["Normalize(mean=[50.0, 100.0], std=[10.0, 20.0])"]
    remote = RemoteData(3)
    remote.connect(lambda: {2: told})
    remote.setup()
    assert remote.class_names == ["home", "moved", "readmitted"]
    assert remote.feature_names == ["age", "pressure"]


def test_a_table_takes_a_list_of_classes(tmp_path):
    """The order of the list is that of the numbers, and a class may have no row."""
    file = tmp_path / "a.csv"
    file.write_text("x,grade\n1,3\n2,1\n3,3\n4,3\n")
    data = TableDataModule(file, "grade", class_names=[1, 2, 3], num_clients=1)
    assert data.samples.targets.tolist() == [2, 0, 2, 2]
    assert data.class_names == ["1", "2", "3"] and data.num_classes == 3
    assert TableDataModule(file, "grade", num_clients=1).samples.targets.tolist() == [1, 0, 1, 1]
    for names in ([], ["1", "1"]):
        with refused("TableDataModule.class_names", "a list of different names"):
            TableDataModule(file, "grade", class_names=names, num_clients=1)
