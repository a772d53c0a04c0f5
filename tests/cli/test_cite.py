"""`pfl cite`: every method has an entry, which says what the method's own file says."""

import inspect
import re
import sys
import unicodedata

import pytest
import yaml

import pfl.algorithms
import pfl.datamodules
import pfl.models
from pfl import __version__
from pfl.cli.cite import FRAMEWORK, NO_PAPER, references
from tests.commands import QUICKSTART, ROOT, call

pytestmark = pytest.mark.cli
ENTRIES = references()
METHODS = {*pfl.algorithms.__all__} - {"FederatedAlgorithm", *NO_PAPER}


def plain(text):
    """Returns text without TeX's accents and braces, and with single spaces."""
    text = re.sub(r"\\[\"'v]", "", text).replace("{", "").replace("}", "")
    text = unicodedata.normalize("NFD", text).encode("ascii", "ignore").decode()
    return " ".join(text.split())


def fields(entry):
    return dict(re.findall(r"(?m)^  (\w+) = \{(.*)\},$", entry))


def docstrings(name):
    """Returns what a class and its module say, plainly."""
    for package in (pfl.algorithms, pfl.datamodules, pfl.models):
        if hasattr(package, name):
            found = getattr(package, name)
            return plain(f"{sys.modules[found.__module__].__doc__} {inspect.getdoc(found)}")
    raise AssertionError(f"there is no class {name}")


def test_every_method_has_one_entry():
    named = [name for classes, _ in ENTRIES for name in classes]
    assert METHODS - {*named} == set()
    assert not [name for name in METHODS if named.count(name) != 1]
    for name in named:
        assert name == FRAMEWORK or docstrings(name)
    keys = [re.match(r"@\w+\{(\w+),", entry)[1] for _, entry in ENTRIES]
    assert len({*keys}) == len(keys)


@pytest.mark.parametrize(("classes", "entry"), ENTRIES[1:], ids=lambda value: str(value)[:30])
def test_an_entry_says_what_the_file_says(classes, entry):
    stored = fields(entry)
    title = plain(stored["title"])
    texts = [text for text in map(docstrings, classes) if title.lower() in text.lower()]
    assert texts, title
    assert any(stored["year"] in text for text in texts), title
    surnames = [author.partition(",")[0] for author in plain(stored["author"]).split(" and ")]
    lists = [", ".join(surnames), ", ".join(surnames).replace("T Dinh", "T. Dinh")]
    whole = any(words in text for text in texts for words in lists)
    assert (
        whole
        or any(f"{surnames[0]} et al." in text for text in texts)
        or (any(surnames[0] in text and len(surnames) == 1 for text in texts))
    ), surnames
    if "eprint" in stored and {*classes} & METHODS:
        assert any(f"arXiv {stored['eprint']}" in text for text in texts)


def test_the_frameworks_entry_is_that_of_citation_cff():
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    stored = fields(ENTRIES[0][1])
    assert plain(stored["title"]) == content["title"]
    assert plain(stored["author"]) == content["authors"][0]["name"]
    assert stored["note"] == f"Version {__version__}"


@pytest.mark.slow
def test_a_run_is_cited(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--trainer.max_epochs", "1", "--trainer.callbacks", "[]"]
    assert call("fit", "--config", QUICKSTART, *words)[0] == 0
    status, out, err = call("cite", "runs")
    assert (status, err) == (0, "")
    entries = {name: entry for classes, entry in ENTRIES for name in classes}
    for name in (FRAMEWORK, "FedSLR", "DigitsDataModule"):
        assert f"% {name}\n{entries[name]}" in out
    assert out.count("\n@") == 3
    assert "% SmallCNN: no paper is known" in out


def test_the_networks_of_a_family_and_the_messenger_are_cited(tmp_path):
    networks = {"small": "ResNet18", "middle": "mine.Net", "large": "mine.Net"}
    family = {"networks": {name: {"class_path": path} for name, path in networks.items()}}
    arguments = {
        "network": {"class_path": "pfl.models.Family", "init_args": family},
        "messenger": {"class_path": "CNN"},
    }
    model = {"class_path": "FedKD", "init_args": arguments}
    config = {"model": model, "data": {"class_path": "DigitsDataModule"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "metrics.csv").write_text("round\n1\n")
    status, out, err = call("cite", tmp_path)
    assert (status, err) == (0, "")
    entries = {name: entry for classes, entry in ENTRIES for name in classes}
    for name in (FRAMEWORK, "FedKD", "DigitsDataModule", "ResNet18", "CNN"):
        assert f"% {name}\n{entries[name]}" in out
    assert out.count("\n@") == 5
    assert out.count("no paper is known") == out.count("% mine.Net: no paper is known") == 1


def test_a_folder_without_a_run_gets_one_line(tmp_path):
    status, out, err = call("cite", tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"cite: {tmp_path} has no metrics.csv" in err
