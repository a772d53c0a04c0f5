"""Before the first round the server prints what each party's policy lets it tell, and no more."""

import pytest

from datamodules import SplitOwn, TableDataModule
from pfl.deploy import schema
from pfl.deploy.app import read_node, run_server
from pfl.deploy.data import OwnSamples
from pfl.deploy.overview import other_versions, overview_of, overview_text, versions
from pfl.deploy.wire import WireError
from tests.deploy.hospitals import Direct, deployed, party
from tests.refusal import refused

# Of class 0: 20, 50 and 28 years; the second row has no pressure, the fifth one no age.
FILE = "age,pressure,y\n20,100,0\n30,,1\n50,130,0\n41,90,1\n,140,1\n28,110,0\n"


def test_an_overview_counts_what_the_samples_had_before_gaps_were_filled(tmp_path):
    (tmp_path / "own.csv").write_text(FILE)
    table = TableDataModule(
        tmp_path / "own.csv",
        "y",
        missing="mean",
        num_clients=1,
        protocol=SplitOwn(test=0.0, validation=0.0),
    )
    data = OwnSamples(table, 1, 3, seed=0)
    data.setup()
    found = overview_of(data)
    assert found == {
        "classes": [3, 3],
        "missing": [1, 1],
        "ranges": [[20.0, 50.0], [90.0, 140.0]],
    }
    shown = overview_text({"here": found}, ["alive", "dead"], data.feature_names)
    rows = [line.split() for line in shown.splitlines()]
    assert ["alive", "3"] in rows and ["dead", "3"] in rows
    assert ["age", "20", "to", "50,", "1", "missing"] in rows
    assert ["pressure", "90", "to", "140,", "1", "missing"] in rows


def test_names_of_others_are_one_line_and_end_somewhere():
    told = {"party 0": {"classes": [1, 2]}}
    shown = overview_text(told, ["a\x1b[2J\nb", "x" * 99], None)
    assert shown.count("\n") == 4 and "\x1b" not in shown and "x" * 41 not in shown
    shown = overview_text({"party 0": {"classes": [0] * 100}}, None, None)
    assert shown.endswith("and 60 more rows\n")


@pytest.fixture
def app(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return deployed(tmp_path)


def tell(*parts):
    return {"policy": {"overview": list(parts)}}


@pytest.mark.cli
def test_the_server_shows_what_the_parties_policies_let_them_tell(app, capsys):
    """Party 0 tells ranges, party 1 class counts, and party 2 nothing; it has other packages."""
    policies = [tell("ranges", "missing"), tell("classes"), {}]
    workers = [read_node(party(app, k, more))[0] for k, more in enumerate(policies)]
    assert [{*worker.facts["overview"]} for worker in workers] == [
        {"ranges", "missing"},
        {"classes"},
        set(),
    ]
    workers[2].facts["versions"] = {**versions(), "torch": "0.1"}
    run_server(Direct(workers), app, {"name": "run", "runs": "runs", "timeout": 60.0, "parties": 3})
    lines = capsys.readouterr().out.splitlines()
    assert "party 0: 3 samples to train with, 0 to validate, 0 to test" in lines
    one = f"party 2: 2 samples to train with, 0 to validate, 0 to test; torch 0.1 (here {torch()})"
    assert one in lines
    rows = [" ".join(line.split()) for line in lines]
    assert "training samples of class party 1" in rows
    assert "home 1" in rows and "moved 1" in rows and "readmitted 0" in rows
    assert "values of party 0" in rows
    assert "age 40 to 60" in rows and "pressure 100 to 120" in rows


def torch():
    return versions()["torch"]


def test_versions_that_differ_are_named():
    assert other_versions({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == ["b 2 (here 3)"]
    assert other_versions({"c": "1"}, {}) == ["c 1 (here none)"]


@pytest.mark.cli
def test_class_counts_tell_sizes(app):
    with refused("policy.overview: classes tells numbers of samples, and share_sizes is false"):
        read_node(party(app, 0, {**tell("classes"), "share_sizes": False}))
    with refused("policy.overview: ['rows']; it must be some of classes, missing, ranges"):
        read_node(party(app, 0, tell("rows")))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("versions", []),
        ("versions", {"torch": 2}),
        ("versions", {"=cmd": "2"}),
        ("versions", {"torch": 61 * "x"}),
        ("versions", {f"p{number}": "1" for number in range(17)}),
        ("overview", []),
        ("overview", {"classes": [-1]}),
        ("overview", {"classes": [1.0]}),
        ("overview", {"missing": [1 << 31]}),
        ("overview", {"missing": {"a": 1}}),
        ("overview", {"ranges": [[1.0]]}),
        ("overview", {"ranges": [[2.0, 1.0]]}),
        ("overview", {"ranges": [[0.0, float("nan")]]}),
        ("overview", {"ranges": [[0.0, 1e31]]}),
        ("overview", {"ranges": [["=1", 1.0]]}),
        ("noise", "yes"),
    ],
)
def test_a_party_tells_nothing_out_of_its_range(key, value):
    hello = {"client": 0, "hides": False, "sizes": [1, 0, 0]}
    hello |= {"input": ["float32", [2]], "target": ["int64", []], "levels": {}}
    told = schema.read_facts(hello, 1)
    assert (told["versions"], told["noise"]) == ({}, False)
    assert told["overview"] == {"classes": None, "missing": None, "ranges": None}
    with pytest.raises(WireError):
        schema.read_facts({**hello, key: value}, 1)
