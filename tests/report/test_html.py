"""The page of `pfl report`: what it says, and that a browser draws it without a network."""

import csv
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from pfl.cli.main import main
from pfl.report.comparison_figures import columns_by_title
from pfl.scores.runs import Run, read_runs
from pfl.scores.table import append_scores
from tests.commands import call

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
NAMES = ("FedAvg", "FedSLR")


def write_run(folder, name="FedAvg", seed=0, clients=3, rounds=2, bonus=0.0, **summary):
    """A run folder with made-up numbers; returns its summary."""
    folder.mkdir(parents=True)
    rows = []
    for number in range(1, rounds + 1):
        row = {"round": number, "train/samples": 10.0 * number, "train/loss": 1 / number}
        row |= {"comm/uplink_bytes": 5e5 * number, "comm/downlink_bytes": 15e5 * number}
        for split, shift in (("val", 0.01), ("test", 0.0)):
            row[f"{split}/global/accuracy"] = 0.123456 * number + bonus + shift
            row[f"{split}/global/accuracy_worst10"] = 0.05 * number + bonus
        rows.append(row)
    write_csv(folder / "metrics.csv", rows)
    scores = [
        {"client": i, "train_samples": 5 + i, "label_0": i, "label_1": 5} for i in range(clients)
    ]
    for i, row in enumerate(scores):
        row |= {"test/global/accuracy": 0.2 * i + bonus, "test/local/accuracy": 0.25}
        row |= {"uplink_bytes": 100, "downlink_bytes": 300}
    write_csv(folder / "clients.csv", scores)
    (folder / "config.yaml").write_text(
        f"seed_everything: {seed}\nmodel:\n  class_path: {name}\n  note: '</pre><script>bad()'\n"
    )
    content = {"algorithm": name, "seed": seed, "finished": True}
    content |= {
        "protocol": f"{clients} clients <&>",
        "partition_hash": f"hash{seed}",
        "wall_seconds": 2.5,
        "versions": {"torch": "2.x"},
    }
    content |= rows[-1] | summary
    (folder / "summary.json").write_text(json.dumps(content))
    return content


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def add_column(path, name, values):
    """Adds a column to a table."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    write_csv(path, [{**row, name: value} for row, value in zip(rows, values, strict=True)])


class Page(HTMLParser):
    """The tables of a page (rows of exact values), its text outside of scripts, its addresses."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.words, self.addresses, self.scripts = [], [], [], []
        self.inside, self.elements = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, sorted(attributes)))
        self.addresses += [attributes[key] for key in ("src", "href") if key in attributes]
        self.addresses += [tag] * (tag in ("link", "iframe", "img", "object"))
        if tag == "table":
            self.tables.append([[]])
        if tag == "tr" and self.tables[-1] != [[]]:
            self.tables[-1].append([])
        if tag == "td":
            self.tables[-1][-1].append(attributes["data-value"])
        if tag not in ("meta", "link", "br"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        assert self.inside.pop() == tag  # well-formed

    def handle_data(self, data):
        if self.inside and self.inside[-1] == "script":
            self.scripts.append(data)
        elif self.inside and self.inside[-1] != "style":
            self.words.append(data)
            if "th" in self.inside:
                self.tables[-1][0].append(data)


@pytest.fixture
def folder(tmp_path):
    """A folder of four runs: two methods, two seeds."""
    for place, name in enumerate(NAMES):
        for seed in (0, 1):
            write_run(tmp_path / "runs" / name / f"seed{seed}", name, seed, bonus=0.1 * place)
    return tmp_path / "runs"


def report(folder, *words):
    """The page of `pfl report`."""
    status, _, err = call("report", folder, *words)
    assert (status, err) == (0, ""), err
    return (folder / "report.html").read_text()


def figures(page):
    """The data of all figures: the first argument of each call of Plotly that is JSON."""
    decode, found = json.JSONDecoder().raw_decode, []
    for script in page.scripts:
        if match := re.match(
            r"\s*window\.PLOTLYENV.*?Plotly\.newPlot\(\s*\"[^\"]+\",\s*", script, re.S
        ):
            found.append(decode(script, match.end())[0])
    return found


def test_the_page_needs_nothing_from_elsewhere(folder):
    page = Page(report(folder))
    assert page.addresses and all(address.startswith("#run-") for address in page.addresses)
    own = [script for script in page.scripts if len(script) < 1e6]
    assert len(page.scripts) == len(own) + 1  # the other one is Plotly itself
    assert not re.search(r"https?://(?!plot\.ly)|import\(|fetch\(", "".join(own))


def test_the_numbers_are_those_of_the_runs(folder):
    heads, *rows = Page(report(folder)).tables[0]
    assert [(row[0], row[1]) for row in rows] == [(n, s) for n in NAMES for s in "01"]
    for row, place in zip(rows, (0, 0, 1, 1), strict=True):
        values = dict(zip(heads, row, strict=True))
        summary = json.loads((folder / NAMES[place] / "seed0" / "summary.json").read_text())
        assert float(values["global"]) == summary["test/global/accuracy"]
        assert float(values["worst 10%"]) == summary["test/global/accuracy_worst10"]
        assert float(values["MB up"]) == summary["comm/uplink_bytes"] / 1e6
        assert float(values["seconds"]) == 2.5
        # Clients score 0, 0.2, 0.4 plus a bonus of 0 or 0.1; their local baseline scores 0.25.
        assert float(values["gained"]) == pytest.approx((1 / 3, 2 / 3)[place])


def test_another_model_can_count(folder):
    """Of FedSLR the models after 5 steps count, unless `--metric` names another model."""
    path = folder / "FedSLR" / "seed0" / "metrics.csv"
    add_column(path, "test/finetuned/5/accuracy", [0.75, 0.75])
    heads, *table = Page(report(folder)).tables[0]
    row = dict(zip(heads, next(r for r in table if r[:2] == ["FedSLR", "0"]), strict=True))
    assert (row["model"], row["finetuned/5"], row["worst 10%"]) == ("finetuned/5", "0.75", "")
    status, _, error = call("report", folder, "--metric", "global/loss")
    assert status == 2 and "the runs have accuracy" in error
    heads, *table = Page(report(folder, "--metric", "global/accuracy")).tables[0]
    assert {row[heads.index("model")] for row in table} == {"global"}


def test_the_last_round_and_the_best_by_validation_are_named(folder):
    """Validation is best in round 1, whose test score is 0.123456; round 2 has twice as much."""
    path = folder / "FedAvg" / "seed0" / "metrics.csv"
    add_column(path, "val/global/accuracy", [0.9, 0.1])
    page = Page(report(folder))
    words = " ".join(" ".join(page.words).split())
    assert "Last round: round 2, test global accuracy 0.2469." in words
    assert "Best by validation: round 1, test global accuracy 0.1235." in words
    heads, first = page.tables[0][:2]
    row = dict(zip(heads, first, strict=True))
    assert float(row["score of the last round"]) == 0.246912
    assert (float(row["score that counts"]), float(row["round that counts"])) == (0.123456, 1)


def test_curves_of_fine_tuned_models_have_its_gradients(folder):
    """Five steps of fine-tuning cost 30 sample gradients, beside the 10 of each round."""
    run = folder / "FedSLR" / "seed0"
    add_column(run / "metrics.csv", "test/finetuned/5/accuracy", [0.5, 0.75])
    summary = json.loads((run / "summary.json").read_text())
    summary["finetuning_samples"] = {"5": 30}
    (run / "summary.json").write_text(json.dumps(summary))
    found = {t.get("name"): t for t in figures(Page(report(run)))[0]}
    lines = [name for name in found if name]
    axes = {kind: next(found[n] for n in lines if n.endswith(kind)) for kind in ("global", "/5")}
    assert axes["global"]["meta"]["x"]["sample gradients"] == [10, 20]
    assert axes["/5"]["meta"]["x"]["sample gradients"] == [40, 50]


def test_curves_have_every_axis(folder):
    """Two rounds, of 2 MB and 10 gradients each."""
    data = figures(Page(report(folder)))[0]
    line = next(trace for trace in data if trace.get("name") == "FedSLR, global")
    expected = {"rounds": [1, 2], "MB sent and received": [2, 4], "sample gradients": [10, 20]}
    assert line["meta"] == {"score": "test accuracy", "x": expected}
    scores = {trace["meta"]["score"]: trace["visible"] for trace in data}
    assert scores == {"test accuracy": True, "validation accuracy": False, "train/loss": False}


def test_curves_of_training_scores_have_a_choice_with_all_models():
    """`loop.evaluate: [train, test]` writes them; other columns of `train/` stay by themselves."""
    row = {"round": 1.0, "train/loss": 0.5, "train/global/gap": 0.1}
    for split, model in (("train", "global"), ("train", "personalized"), ("test", "global")):
        for end in ("", "_std", "_worst10", "_pooled"):
            row[f"{split}/{model}/accuracy{end}"] = 0.5
    runs = [Run("A", 0, Path(), rows=[row])]
    assert columns_by_title(runs) == {
        "test accuracy": {"global": "test/global/accuracy"},
        "training accuracy": {
            "global": "train/global/accuracy",
            "personalized": "train/personalized/accuracy",
        },
        "train/loss": {"": "train/loss"},
        "train/global/gap": {"": "train/global/gap"},
    }
    worst = columns_by_title(runs, "_worst10")["training accuracy"]
    assert worst["personalized"] == "train/personalized/accuracy_worst10"


def test_the_text_of_a_client_has_labels_sizes_scores_and_gain(folder):
    texts = next(f for f in figures(Page(report(folder))) if "text" in f[0])[0]["text"]
    assert texts[2].split("<br>") == [
        "<b>client 2</b>",
        "samples: 7 training",
        "labels: 1: 5, 0: 2",
        "global: 0.4000",
        "local: 0.2500",
        "gain over local: +0.1500",
        "sent 100 B, received 300 B",
    ]


def page_of_texts(root, word):
    """The page of two runs in which every text is `word`: values, names and headings."""
    folder = root / word.replace("/", "")
    texts = ("algorithm", "engine", "partition_hash", "protocol")
    write_run(folder, word, versions={word: word}, **dict.fromkeys(texts, word))
    (folder / "outcome.json").write_text(json.dumps({"label": word}))
    (folder / "config.yaml").write_text(json.dumps({"model": {"class_path": word}}))
    for name in ("name", f"label_{word}"):
        add_column(folder / "clients.csv", name, [word] * 3 if name == "name" else range(3))
    # Slashes part the name of a score.
    for name in (word, f"train/{word}", f"test/{word.replace('/', '-')}/accuracy"):
        add_column(folder / "clients.csv", name, range(3))
        add_column(folder / "metrics.csv", name, [0.5, 0.5])
    write_csv(
        folder / "collaboration.csv",
        [{"round": 2, "client": 0, "partner": 1, "weight": 1, word: 1}],
    )
    write_run(root / "z", "FedSLR")
    return Page(report(root, "--title", word))


@pytest.mark.parametrize("evil", ['"><script>alert(1)</script>', "'--></title></pre><img src=x>"])
def test_texts_of_a_run_are_escaped_in_the_page(tmp_path, evil):
    """Texts change neither the elements of the page nor their attributes."""
    page, plain = (page_of_texts(tmp_path / word[0], word) for word in (evil, "plain"))
    assert page.elements == plain.elements
    assert all(address.startswith("#run-") for address in page.addresses)
    assert [evil, evil] in page.tables[2] and ["engine", evil] in page.tables[2]
    (text, *_) = next(f for f in figures(page) if "text" in f[0])[0]["text"]
    assert html.escape(evil) in text and evil not in text  # which Plotly reads as HTML


def test_named_clients_have_their_names(tmp_path):
    write_run(tmp_path / "runs" / "a")
    names = [f"hospital {number}" for number in range(3)]
    add_column(tmp_path / "runs" / "a" / "clients.csv", "name", names)
    page = Page(report(tmp_path / "runs"))
    assert [row[:2] for row in page.tables[1][1:]] == [[str(i), f"hospital {i}"] for i in range(3)]
    text = next(f for f in figures(page) if "text" in f[0])[0]["text"][2]
    assert text.startswith("<b>client 2, hospital 2</b>")


DAMAGE: dict[str, list[str | None]] = {
    "summary.json": ["{", "[]", '{"seed": "x"}', '{"select_by": 1}', "[" * 5000],
    "clients.csv": [
        "",
        "client\nx\n",
        "client,train_samples\n0,1\n",
        "client,train_samples\n",
        "client\n0\n2\n1\n",  # sorted by somebody
        "client\n0\n1\n1\n",
        None,
    ],
    "metrics.csv": ["round,a\n1,b\n", "round,a\n,1\n"],
    "config.yaml": ["a: [", "- 1", "\0", "model: 3"],
    "outcome.json": ["[1]", "[" * 5000],
    "client_scores.npy": ["text", "\x93NUMPY\x01\x00"],
    "local_scores.npy": ["text"],
    "collaboration.csv": ["round,client\n1,x\n", ""],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name in DAMAGE for content in DAMAGE[name]]
)
@pytest.mark.parametrize("command", ["report", "compare"])
@pytest.mark.usefixtures("quick_figures")
def test_a_damaged_folder_gets_one_line(tmp_path, monkeypatch, capsys, command, name, content):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a", clients=3)
    if name == "config.yaml" and content != "a: [":  # whose content the summary may lack
        path = tmp_path / "runs" / "a" / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "seed": None, "algorithm": 0}))
    if name == "clients.csv" and "train" in str(content):  # fewer clients than in the scores
        loss = {"test/global/accuracy": np.zeros(3)}
        append_scores(tmp_path / "runs" / "a" / "client_scores.npy", 2, loss)
    path = tmp_path / "runs" / "a" / name
    path.unlink() if content is None else path.write_text(content, "latin-1")
    status, errors = main([command, "runs"]), capsys.readouterr().err
    if status:
        assert status == 2 and errors.startswith("error: runs/a"), errors
        assert errors.count("\n") == 1 and ("damaged" in errors or "client" in errors)
    else:  # the command does not read this file
        assert command == "compare" and name in ("collaboration.csv", "clients.csv")


def test_the_configuration_and_versions_are_there(folder):
    page = Page(report(folder))
    assert ["torch", "2.x"] in page.tables[-1] and ["partition_hash", "hash1"] in page.tables[-1]
    assert any("class_path: FedSLR" in words for words in page.words)


def test_the_page_of_a_private_run_has_its_epsilon(tmp_path):
    summary = {"privacy": "delta 0.01, not against the server", "privacy/epsilon": 2.34567}
    write_run(tmp_path / "a", **summary)
    write_run(tmp_path / "b", seed=1)
    words = " ".join(Page(report(tmp_path)).words)
    assert words.count("Privacy: epsilon 2.346, delta 0.01, not against the server.") == 1


def test_many_clients_are_thinned_from_worst_to_best(tmp_path):
    write_run(tmp_path / "runs" / "a", clients=2501)
    page = Page(report(tmp_path / "runs"))
    rows = page.tables[1][1:]
    ids = np.array([int(float(row[0])) for row in rows])
    assert len(rows) == 1000 and ids[0] == 0 and ids[-1] == 2500 and (np.diff(ids) <= 3).all()
    assert "Of 2,501 clients, 1,000 are shown" in "".join(page.words)


def test_a_run_that_has_not_ended_is_shown(tmp_path):
    write_run(tmp_path / "runs" / "a")
    for name in ("summary.json", "clients.csv"):
        (tmp_path / "runs" / "a" / name).unlink()
    page = Page(report(tmp_path / "runs"))
    assert page.tables[0][1][:3] == ["FedAvg", "0", "2.0"]
    assert "Not finished: FedAvg, seed 0." in "".join(page.words)


def test_a_run_that_diverged_in_its_first_round_is_named(tmp_path):
    """Such a run of a comparison has its configuration and its outcome, and no round."""
    write_run(tmp_path / "runs" / "a")
    lost = tmp_path / "runs" / "b"
    lost.mkdir()
    (lost / "config.yaml").write_text("seed_everything: 0\nmodel:\n  class_path: FedPD\n")
    (lost / "outcome.json").write_text(json.dumps({"status": "diverged"}))
    page = Page(report(tmp_path / "runs"))
    words = "".join(page.words)
    assert "Diverged, and left out: FedPD, seed 0." in words and "The run diverged." in words
    assert page.tables[0][2][:4] == ["FedPD", "0", "", ""]


def test_runs_of_different_configurations_have_different_labels(tmp_path):
    """Seeds of one configuration share a label; two configurations of a method do not."""
    for value, seed in ((1, 0), (1, 1), (2, 0)):
        folder = tmp_path / f"mu={value}" / f"seed{seed}"
        write_run(folder, seed=seed)
        (folder / "config.yaml").write_text(f"seed_everything: {seed}\nmodel:\n  mu: {value}\n")
    folders = sorted(path.parent for path in tmp_path.rglob("metrics.csv"))
    runs = [(run.label, run.seed) for run in read_runs(folders)]
    assert runs == [("mu=1", 0), ("mu=1", 1), ("mu=2", 0)]


@pytest.mark.parametrize(
    "words, expected", [(["none"], "none"), ([], "arguments"), (["."], "metrics.csv")]
)
def test_a_mistake_gets_one_line(tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: report: ") and expected in error and error.count("\n") == 1


# ---- in a browser --------------------------------------------------------------------------------

CLICKS = """
<script>
const errors = [];
window.onerror = (message) => errors.push(message);
const head = [...document.querySelectorAll("th")].find((th) => th.innerText.startsWith("global"));
const first = () => document.querySelector("tbody tr").cells[head.cellIndex].dataset.value;
const seen = [];
for (let i = 0; i < 2; i++) { head.querySelector("button").click(); seen.push(first()); }
const axis = document.getElementById("axis"), score = document.getElementById("score");
axis.value = "sample gradients"; score.value = "train/loss";
score.dispatchEvent(new Event("change"));
document.querySelector("td a").click();
const plot = document.querySelector(".curves .js-plotly-plot");
const shown = plot.data.filter((t) => t.visible && t.name);
const result = { seen, errors, x: shown.map((t) => t.x), scores: shown.map((t) => t.meta.score),
  title: plot.layout.xaxis.title.text,
  lines: plot.querySelectorAll(".scatterlayer .js-line").length,
  plots: document.querySelectorAll(".js-plotly-plot .main-svg").length,
  opened: document.querySelectorAll("section details[open]").length,
  fits: [...document.querySelectorAll(".curves")].every(
    (box) => box.getBoundingClientRect().right <= innerWidth) };
document.body.dataset.result = JSON.stringify(result);
</script>
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [600, 1400])
def test_a_browser_draws_sorts_and_changes_axes(folder, tmp_path, width):
    path = tmp_path / "page.html"
    path.write_text(report(folder).replace("</body>", CLICKS + "</body>"))
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    switches += [f"--window-size={width},900", "--host-resolver-rules=MAP * ~NOTFOUND"]
    switches += [f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [BROWSER, *switches, path.as_uri()], capture_output=True, text=True, timeout=120
    )
    found = re.search(r'data-result="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    result = json.loads(found[1].replace("&quot;", '"'))
    low, high = (2 * 0.123456 + bonus for bonus in (0, 0.1))  # ascending, then descending
    assert [float(value) for value in result["seen"]] == pytest.approx([low, high])
    assert result["errors"] == [] and result["fits"]
    assert result["scores"] == ["train/loss"] * 2 and result["x"] == [[10, 20]] * 2
    assert result["title"] == "sample gradients" and result["lines"] == 2
    assert result["plots"] >= 2 * 3 and result["opened"] == 1
