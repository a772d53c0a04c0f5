"""A run on a column of texts: predicted and exported, and computed again by counting bytes."""

import csv
import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file
from torch import Tensor, nn

from tests.commands import call, done, table
from tests.export.test_raw_samples import outputs_of_the_lines

pytestmark = pytest.mark.cli
REVIEWS = {
    "7": [("fine", "yes"), ("bad", "no")],
    "07": [("so fine", "yes"), ("bad, bad", "no"), ("déjà vu", "no")],
}
LENGTH = 6
BYTES = 256


def bytes_of(text: str) -> list[int]:
    """A tokenizer of one's own: the bytes, from 1 to 256."""
    return [byte + 1 for byte in text.encode()]


def half(scores: Tensor) -> Tensor:
    return scores / 2


class Bag(nn.Module):
    """Adds a row of a table for each byte, and passes the sums through a function."""

    def __init__(self, last: Callable[[Tensor], Tensor] = torch.tanh):
        super().__init__()
        self.rows = nn.EmbeddingBag(BYTES + 1, 2, padding_idx=0, mode="sum")
        self.last = last

    def forward(self, tokens):
        return self.last(self.rows(tokens))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose tokenizer and last function are this file's, and files of new texts."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [[client, *pair] for client, pairs in REVIEWS.items() for pair in pairs * 4]
    with (folder / "reviews.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["user", "text", "liked"], *rows])
    (folder / "new.csv").write_text("user,text\n07,fine\n7,déjà vu\n07,7\n")
    (folder / "gap.csv").write_text("user,text\n07,fine\n7, \n")
    network = {"class_path": f"{__name__}.Bag", "init_args": {"last": f"{__name__}.half"}}
    config = {
        "trainer": {
            "name": "a", "max_epochs": 5, "default_root_dir": str(folder),
            "enable_progress_bar": False,
        },
        "model": {"class_path": "LocalTrain", "init_args": {"network": network, "lr": 1.0}},
        "data": {
            "class_path": "TableDataModule",
            "init_args": {
                "file": str(folder / "reviews.csv"), "text_column": "text", "length": LENGTH,
                "tokenizer": f"{__name__}.bytes_of", "target_column": "liked",
                "client_column": "user",
            },
        },
    }  # fmt: skip
    (folder / "a.yaml").write_text(yaml.safe_dump(config))
    done("fit", "--config", folder / "a.yaml")
    return folder


def test_each_row_is_predicted_by_the_model_of_its_client(folder, tmp_path, monkeypatch):
    """The models are read from their exported files, and their rows are added here."""
    last = folder / "a" / "checkpoints" / "last.ckpt"
    done("export", "--ckpt_path", last, "--client", "all", "--out", tmp_path)
    cards = [json.loads((tmp_path / f"client{c}/card.json").read_text()) for c in (0, 1)]
    assert [card["client_name"] for card in cards] == ["07", "7"]
    assert cards[0]["data"]["init_args"]["tokenizer"] == f"{__name__}.bytes_of"
    assert (cards[0]["input"]["dtype"], cards[0]["input"]["shape"]) == ("int64", [LENGTH])
    out = tmp_path / "predictions.csv"
    done("predict", folder / "a", "--rows", folder / "new.csv", "--out", out)
    texts = [("07", 0, "fine"), ("7", 1, "déjà v"), ("07", 0, "7")]
    for row, (name, client, text) in zip(table(out), texts, strict=True):
        weights = load_file(tmp_path / f"client{client}/model.safetensors")["rows.weight"]
        found = bytes_of(text)[:LENGTH]
        scores = sum(weights[number] for number in found) / 2
        tokens = torch.tensor([found + [0] * (LENGTH - len(found))])
        lines = outputs_of_the_lines(tmp_path / f"client{client}", tokens, monkeypatch)
        assert lines[0] == pytest.approx(scores, rel=1e-5)
        chance = 1 / (1 + np.exp(scores[0] - scores[1]))
        assert row["model"] == name
        assert float(row["probability of yes"]) == pytest.approx(chance, rel=1e-5)
        assert row["prediction"] == ["no", "yes"][int(scores[1] > scores[0])]


def test_a_row_without_a_text_is_named(folder):
    status, _, error = call("predict", folder / "a", "--rows", folder / "gap.csv")
    assert status == 2
    (line,) = error.splitlines()
    assert line.endswith("row 2 after the names has no value of 'text'; a prediction needs one")


def test_other_texts_are_read_as_the_runs_own(folder, tmp_path):
    """Their file has no "no" for the client 7, and their configuration names no tokenizer."""
    with (folder / "later.csv").open("w", newline="") as file:
        rows = [["7", "fine", "yes"], ["07", "bad, bad", "no"], ["07", "so fine", "yes"]]
        csv.writer(file).writerows([["user", "text", "liked"], *rows])
    given = {"file": str(folder / "later.csv"), "target_column": "liked", "client_column": "user"}
    content = {"data": {"class_path": "TableDataModule", "init_args": given}}
    (folder / "later.yaml").write_text(yaml.safe_dump(content))
    other = ["--data", folder / "later.yaml", "--out", tmp_path]
    done("evaluate", folder / "a", *other)
    rows = table(tmp_path / "scores.csv")
    own = {row["client"]: float(row["accuracy"]) for row in rows if row["client"] == row["site"]}
    # The texts are in the training data, which each client's model knows by heart.
    assert own == {"07": 1.0, "7": 1.0}


# Where this warning is an error, jsonargparse takes the next type of the argument, and is right.
@pytest.mark.filterwarnings("default::UserWarning")
def test_a_file_of_a_tokenizer_is_read_again(folder, tmp_path, monkeypatch):
    """The run's `config.yaml` names it as it was given; it had been "Unable to serialize ..."."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "fine": 1, "bad": 2, "so": 3, "[PAD]": 4}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    monkeypatch.chdir(tmp_path)
    file = "tokenizer.json"
    own.save(file)
    changed = ["--data.tokenizer", file, "--trainer.default_root_dir", tmp_path]
    status, _, error = call("fit", "--config", folder / "a.yaml", *changed)
    assert status == 0 and "Unable to serialize" not in error, error
    config = yaml.safe_load((tmp_path / "a/config.yaml").read_text())
    assert config["data"]["init_args"]["tokenizer"] == file
    done("predict", tmp_path / "a", "--rows", folder / "new.csv", "--out", tmp_path / "rows.csv")
    rows = table(tmp_path / "rows.csv")
    assert [row["model"] for row in rows] == ["07", "7", "07"]
