"""What the documents show runs as it stands there."""

import gc
import importlib
import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import griffe
import matplotlib
import numpy as np
import pytest
import torch
from scipy import stats

import datamodules
import models
import pfl.algorithms
from benchmarks import compression, published
from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl.cli import main
from pfl.method import FederatedAlgorithm
from pfl.method.checked import SIDES
from pfl.method.hooks import Method
from tests.commands import QUICKSTART, call, finish, table
from tests.problems import run

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS += [ROOT / "datamodules" / "README.md"]


def section(document: str, heading: str) -> str:
    """The text of a document below a heading; with "" all of it."""
    text = (ROOT / document).read_text()
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0] if heading else text


def python_blocks(document: str, heading: str = "") -> list[str]:
    """The Python blocks of a document, or of a section of it."""
    return re.findall(r"```python\n(.*?)```", section(document, heading), re.S)


METHODS = {
    block.split()[1]: block
    for place in (("docs/add-a-method.md", ""), ("docs/extend.md", "Methods"))
    for block in python_blocks(*place)
}


def load(name: str, folder: Path, monkeypatch) -> ModuleType:
    """A block of the pages for authors of methods, saved in a folder and imported from there."""
    (folder / name).write_text(METHODS[name])
    forget(Path(name).stem, folder, monkeypatch)
    return importlib.import_module(Path(name).stem)


def forget(module: str, folder: Path, monkeypatch) -> None:
    """Makes a module of a folder importable until the end of the test."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, module, ModuleType(module))  # its end takes the module away
    del sys.modules[module]


def printed(document: str, heading: str, module: str, folder: Path, monkeypatch) -> str:
    """What the command of a section prints, in a folder with a module, after a single round."""
    forget(module, folder, monkeypatch)
    monkeypatch.chdir(folder)
    (command,) = re.findall(r"^pfl (fit .*)$", section(document, heading), re.M)
    words = command.replace("--config quickstart", f"--config {QUICKSTART}").split()
    status, out, err = call(*words, "--trainer.max_epochs", "1", "--trainer.callbacks", "[]")
    assert status == 0, err
    return out


@pytest.fixture(autouse=True)
def forgotten():
    """Classes of the documents are gone afterwards, or short names of ours would be ambiguous."""
    yield
    gc.collect()


@pytest.mark.cli
def test_the_method_of_add_a_method_runs_from_the_command_line(tmp_path):
    """In another process, as jsonargparse keeps the classes that it has met."""
    (tmp_path / "fedper.py").write_text(METHODS["fedper.py"])
    arguments = ["fit", "--config", QUICKSTART, "--model", "fedper.FedPer", "--model.lr", "0.1"]
    arguments += ["--trainer.max_epochs", "2", "--trainer.callbacks", "[]"]
    out = finish("-m", "pfl", *arguments, cwd=tmp_path)

    saved = torch.load(tmp_path / "runs/quickstart/checkpoints/last.ckpt", weights_only=True)
    assert saved["federated"]["algorithm"] == "FedPer"
    # SmallCNN's body: convolutions 9*1*16 and 9*16*32, two GroupNorms 2*16 and 2*32 = 4,848
    # values; its head 128*10 + 10 = 1,290 stays at home. Two rounds of five clients, 4 bytes each.
    body, head = 9 * 16 + 9 * 16 * 32 + 2 * 16 + 2 * 32, 128 * 10 + 10
    assert saved["federated"]["bytes"] == [2 * 5 * 4 * body] * 2
    assert saved["federated"]["clients"]["h"]["parts"][0]["rows"].shape[1] == head
    assert saved["federated"]["parameters"] == body + head
    assert "personalized" in out


@pytest.mark.cli
def test_the_comparison_of_add_a_method_has_both_methods(tmp_path):
    """With one seed and one round, and in another process, as above."""
    text = (ROOT / "docs" / "add-a-method.md").read_text()
    (block,) = re.findall(r"```yaml\n# mine.yaml\n(.*?)```", text, re.S)
    (tmp_path / "mine.yaml").write_text(block.replace("seeds: 3", "seeds: 1"))
    (tmp_path / "fedper.py").write_text(METHODS["fedper.py"])
    change = ("--change", "trainer.max_epochs=1")
    finish("-m", "pfl", "compare", "mine.yaml", *change, cwd=tmp_path)
    rows = table(tmp_path / "runs/compare/mine/comparison.csv")
    assert [row["method"] for row in rows] == ["FedAvg", "mine"]


@pytest.mark.cli
def test_the_metric_of_the_reference_for_authors_is_measured(tmp_path, monkeypatch):
    """Sick samples with the classes 1, 2 and 2; the two most likely of each are those below."""
    (block,) = python_blocks("docs/extend.md", "Metrics")
    (tmp_path / "clinic.py").write_text(block)
    metric = runpy.run_path(str(tmp_path / "clinic.py"))["TopTwoOfTheSick"]()
    likely = torch.tensor([[0.1, 0.5, 0.4], [0.5, 0.4, 0.1], [0.5, 0.1, 0.4], [1.0, 0.0, 0.0]])
    metric.update(likely, torch.tensor([1, 2, 2, 0]))  # {1, 2}, {0, 1}, {0, 2}, and a healthy one
    assert metric.compute().item() == pytest.approx(2 / 3)
    out = printed("docs/extend.md", "Metrics", "clinic", tmp_path, monkeypatch)
    assert "test top_two_of_the_sick" in out


@pytest.mark.cli
def test_the_stages_of_the_page_act(tmp_path, monkeypatch):
    """Half of 64 16 + 16 + 16 10 + 10 values of 4 bytes up; the network of the quick start."""
    (block,) = python_blocks("docs/stages.md")
    (tmp_path / "mystages.py").write_text(block)
    forget("mystages", tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    words = ["--trainer.max_epochs", "1", "--trainer.callbacks", "[]"]
    words += ["--loop.stages", "[mystages.UpdateNorm, mystages.HalfPrecision]"]
    status, _, err = call("fit", "--config", QUICKSTART, *words)
    assert status == 0, err
    (row,) = table(tmp_path / "runs/quickstart/metrics.csv")
    assert 2 * float(row["comm/uplink_bytes"]) == float(row["comm/downlink_bytes"])
    assert float(row["train/update_norm"]) > 0


def test_the_loss_of_the_reference_for_authors_trains(tmp_path, monkeypatch):
    """With focus 0 it is cross entropy; scores log 1 and log 3 mean probabilities 1/4 and 3/4."""
    (block,) = python_blocks("docs/extend.md", "Losses")
    (tmp_path / "focal.py").write_text(block)
    kind = runpy.run_path(str(tmp_path / "focal.py"))["FocalLoss"]
    scores, targets = torch.tensor([[1.0, 3.0]] * 2).log(), torch.tensor([0, 1])
    p = torch.tensor([0.25, 0.75])
    torch.testing.assert_close(kind(focus=0.0)(scores, targets), -p.log())
    torch.testing.assert_close(kind(focus=2.0)(scores, targets), -((1 - p) ** 2) * p.log())
    out = printed("docs/extend.md", "Losses", "focal", tmp_path, monkeypatch)
    assert "test accuracy" in out


@pytest.mark.cli
@pytest.mark.slow
def test_the_tutorial_can_be_followed(tmp_path, monkeypatch, capsys):
    """With fewer rounds, and one seed of the comparison."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pfl"])
    text = (ROOT / "docs" / "tutorial.md").read_text()
    for name, block in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", text, re.S):
        block = block.replace('("compare.yaml")', '("compare.yaml", [{"trainer.max_epochs": 1}])')
        Path(name).write_text(block.replace("seeds: 5", "seeds: 1"))
    commands = re.findall(r"```sh\n(.*?)```", text, re.S)
    rounds = {"fit": ["--trainer.max_epochs", "2"], "compare": ["--change", "trainer.max_epochs=1"]}
    for words in map(str.split, commands):
        if words[0] == "python":
            made = runpy.run_path(words[1])
        else:
            assert main([*words[1:], *rounds[words[1]]]) == 0
    assert [words.split()[1] for words in commands] == [
        "make_data.py",
        "fit",
        "fit",
        "compare",
        "compare.py",
    ]
    assert len(list(Path("runs").rglob("summary.json"))) == 2 + 3
    assert Path("runs/compare/compare/comparison.md").is_file()
    shown = table(Path("runs/compare/compare/comparison.csv"))
    scores = {
        row["method"]: row["personalized"] for row in made["results"].table().to_dict("records")
    }
    assert [row["method"] for row in shown] == [*scores]
    assert float(shown[1]["personalized"]) == scores["FedRep"]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """With two rounds instead of 40; the outputs that it stores have the lines of this run."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    cells = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert code.count("ROUNDS = 40") == 1
    exec(code.replace("ROUNDS = 40", "ROUNDS = 2"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "worst tenth" in line] == [
        "FedAvg",
        "FedRep",
        "Ditto",
    ]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    stored = "".join("".join(output["text"]) for output in outputs if "text" in output)
    assert stored.count(", 40 rounds, ") == 3
    begins = [[line.split()[0] for line in text if line] for text in (stored.splitlines(), lines)]
    assert begins[0] == begins[1]
    assert [list(output["data"]) for output in outputs if "data" in output] == [
        ["image/png", "text/plain"]
    ]


HOOKS = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))
DOCSTRINGS = runpy.run_path(str(ROOT / "docs" / "site" / "docstrings.py"))


def test_the_reference_of_the_data_has_all_public_names():
    extensions = griffe.load_extensions(DOCSTRINGS["Docstrings"])
    package = griffe.load("pfl", search_paths=[ROOT], extensions=extensions, submodules=True)
    assert set(package["datamodules"].exports) == set(datamodules.__all__)
    assert set(package["models"].exports) == set(models.__all__)


def test_the_reference_of_methods_has_all_hooks():
    page = (ROOT / "docs" / "reference" / "method.md").read_text()
    assert "\n::: pfl.method.hooks.Method\n" in page
    assert SIDES.keys() <= vars(Method).keys()
    assert not vars(FederatedAlgorithm).keys() & SIDES.keys()


def test_formulas_of_docstrings_are_typeset():
    table = '<table class="formula"><tr><td>I:</td><td>x<sub>0</sub></td></tr>'
    table += "<tr><td></td><td>y</td></tr><tr><td colspan=2>z</td></tr></table>"
    for plain, shown in {
        "w_i <- w - η_max g_i(w)": "w<sub>i</sub> ← w - η<sub>max</sub> g<sub>i</sub>(w)",
        "Prox_{λ η_g} mean_[M]": "Prox<sub>λ η<sub>g</sub></sub> mean<sub>[M]</sub>",
        "<γ_i, v> < |x|^2 M^-1.1": "⟨γ<sub>i</sub>, v⟩ &lt; |x|<sup>2</sup> M<sup>-1.1</sup>",
        "|n^(-1/4)|_1 μ^τ_i": "|n<sup>-1/4</sup>|<sub>1</sub> μ<sup>τ<sub>i</sub></sup>",
        "local_epochs and `w_i`": "local_epochs and `w_i`",
        "I:  x_0\n    y\nz": table,
    }.items():
        assert DOCSTRINGS["markdown"](plain, True) == shown


def test_the_page_of_a_method_has_its_rows_of_the_tables():
    page = HOOKS["method_page"]("PerFedAvg")
    assert "| **gradients** | 2 (FO), 4 (HF) |" in page
    assert re.findall(r"^\| (\S+) \| PerFedAvg", page, re.M) == [
        "PFLlib", "FL-bench", "FL-bench", "fluke", "pFedMe",
    ]  # fmt: skip
    assert "The method is not on [a leaderboard](../record/leaderboard.md)." in page
    page = HOOKS["method_page"]("Ditto")  # its two models, at one of the problems
    assert re.findall(r"^\| (?:model|groups) \| (.*) \|$", page, re.M) == [
        "personalized", "88.8 ± 1.6", "global", "88.1 ± 2.1",
    ]  # fmt: skip


def test_the_advice_has_the_numbers_of_the_leaderboard():
    """The table of baselines and best methods, from the table on the leaderboard's page."""
    found = HOOKS["tables"]("record/leaderboard.md")
    (head, rows) = next((head, rows) for _, head, rows in found if "mean rank" in head)
    page = (ROOT / "docs" / "choose-a-method.md").read_text()
    lines = re.findall(r"^\| (\w+) \| .+ \| (.+ \| .+ \| .+ \| .+ \| .+ \| .+) \|$", page, re.M)
    behind = []  # how far fine-tuning is from the best model
    assert [name for name, _ in lines] == ["problem", *head[2:-1]]
    for name, cells in lines[1:]:
        scores = {(row[0], row[1]): float(row[head.index(name)].split()[0]) for row in rows}
        baselines = ("LocalTrain", "FedAvg", "FedAvg + fine-tuning")
        kinds = zip(baselines, ("personalized", "global", "finetuned/10"), strict=True)
        own = [scores[base] for base in kinds]
        others = [v for k, v in scores.items() if k[0] not in (*baselines, "GlobalTrain")]
        *told, one, two, three = cells.split(" | ")
        assert [f"{v:.1f}" for v in own] == told
        behind.append(max([*own, *others]) - own[2])
        best = [cell.rsplit(" ", 1) for cell in (one, two, three)]
        assert [f"{v:.1f}" for v in sorted(others)[:-4:-1]] == [number for _, number in best]
        for method, number in best:
            assert scores[method, "personalized"] == float(number)
    assert max(behind) < 1.55 and "at most 1.5 points behind the best" in page


def test_the_readme_names_every_method_by_family():
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Methods") : text.index("## Cite")]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    named = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(named) == sorted(set(pfl.algorithms.__all__) - {"FederatedAlgorithm"})
    links = dict(re.findall(r"\[`(\w+)`\]\((http[^)]*)\)", section))
    papers = {}
    for row in rows_of_methods():
        for link in re.findall(r"\((http[^)]*)\)", row[1]):
            papers |= dict.fromkeys(re.findall(r"`(\w+)`", row[0]), link)
    assert links == papers and len(links) > 40


def test_the_leaderboard_has_the_numbers_of_its_runs():
    """Every cell of its four tables, the ranks, and the critical difference of its caption."""
    page = (ROOT / "docs" / "record" / "leaderboard.md").read_text()
    runs: dict[Any, list[dict[str, float]]] = {}
    for row in published.rows("results/leaderboard/rounds"):
        key = row.pop("problem"), row.pop("method"), row.pop("model"), row.pop("seed")
        runs.setdefault(key, []).append({name: float(value) for name, value in row.items()})
    problems = list(dict.fromkeys(key[0] for key in runs))
    rows = list(dict.fromkeys(key[1:3] for key in runs))
    ends: dict[Any, list[dict[str, float]]] = {}  # FedAvg's last rounds
    for key, rounds in runs.items():
        if key[1:3] == ("FedAvg", "global"):
            ends.setdefault(key[0], []).append(rounds[-1])

    def scores(problem, row, what, limit=None):
        """Each seed's number in its best round on validation data, of those within the limit."""
        found = []
        for seed in "23456":
            rounds = runs[(problem, *row, seed)]
            if limit:  # 0.1 % more is the same
                most = 1.001 * np.mean([end[limit] for end in ends[problem]])
                rounds = [one for one in rounds if one[limit] <= most]
            best = max([one["validation"] for one in rounds])
            found.append(next(one[what] for one in rounds if one["validation"] == best))
        diverged = any(runs[(problem, *row, seed)][-1]["diverged"] for seed in "23456")
        return [np.nan] * 5 if diverged else [100 * one for one in found]

    ranks: dict[Any, list[float]] = {row: [] for row in rows if row[0] != "GlobalTrain"}
    for problem in problems:
        means = {row: np.mean(scores(problem, row, "test")) for row in ranks}
        filled = {row: -1.0 if np.isnan(mean) else mean for row, mean in means.items()}
        for row, mean in filled.items():  # 1 + the better ones + half of the equal others
            better = sum(other > mean for other in filled.values())
            equal = sum(other == mean for other in filled.values()) - 1
            ranks[row].append(1 + better + equal / 2)
    for row in rows:
        for what, limit in (
            ("test", None), ("worst10", None), ("test", "gradients"), ("test", "bytes")
        ):  # fmt: skip
            cells = []
            for problem in problems:
                values = scores(problem, row, what, limit)
                spread = (
                    f" ± {np.std(values, ddof=1):.1f}" if (what, limit) == ("test", None) else ""
                )
                cells.append("–" if np.isnan(values).any() else f"{np.mean(values):.1f}{spread}")
            if (what, limit) == ("test", None):
                cells.append(f"{np.mean(ranks[row]):.2f}" if row in ranks else "–")
            assert f"| {' | '.join([*row, *cells])} |" in page, (row, what, limit)
    for problem in problems:  # FedAvg's mean accuracy in the round nearest to three quarters
        of_seeds = [runs[(problem, "FedAvg", "global", seed)] for seed in "23456"]
        numbers = [one["round"] for one in of_seeds[0]]
        late = min(numbers, key=lambda number: abs(number - 0.75 * numbers[-1]))
        ends_at = []
        for number in (late, numbers[-1]):
            reached = [rounds[numbers.index(number)]["test"] for rounds in of_seeds]
            ends_at.append(f"{number:.0f}: {100 * np.mean(reached):.1f}")
        both = ("FedAvg", "global"), ("GlobalTrain", "global")
        cells = [f"{np.mean(scores(problem, row, 'test')):.1f}" for row in both]
        assert f"| {' | '.join([problem, *ends_at, *cells])} |" in page
    longer: dict[Any, dict[str, list[float]]] = {}
    for row in published.rows("results/leaderboard/longer"):
        key = row["method"], row["model"]
        longer.setdefault(key, {}).setdefault(row["problem"], []).append(100 * float(row["test"]))
    for row, found in longer.items():
        cells = []
        for problem in ("users", "schools"):
            cells += [np.mean(scores(problem, row, "test")), np.mean(found[problem])]
        assert f"| {row[0]} | {' | '.join(f'{cell:.1f}' for cell in cells)} |" in page
    attention = published.rows("results/leaderboard/attention")
    late = [100 * float(row["share"]) for row in attention if row["round"] == "60"]
    early = [100 * float(row["share"]) for row in attention if row["round"] == "2"]
    alike = [100 * float(row["pairs"]) for row in attention]
    assert len(late) == len(early) == 5
    for words, shares in (("in round 60, {} to {} %", late), ("make {} to {} %", alike)):
        assert words.format(f"{min(shares):.0f}", f"{max(shares):.0f}") in page
    assert f"in round 2 it is {min(early):.0f} to {max(early):.0f} %" in page
    k, blocks = len(ranks), len(problems)
    # Demšar 2006, Table 5(a), has q for up to ten; the studentized range gives them for more.
    q = stats.studentized_range.ppf(0.95, k, np.inf) / np.sqrt(2)
    assert f"critical difference is {q * np.sqrt(k * (k + 1) / (6 * blocks)):.2f}" in page


def test_the_compression_page_has_the_numbers_of_its_runs():
    """The table is that of the file, and one of its cells is computed here."""
    page = (ROOT / "docs" / "record" / "compression.md").read_text()
    assert compression.table(compression.Runs()) in page + "\n"
    assert len(page.split("|---|")[0].split()) + len(page.rpartition("|")[2].split()) <= 600
    rows = published.rows("results/compression/runs")
    found: dict[Any, dict[str, list[dict[str, str]]]] = {}
    for row in rows:
        place = row["problem"], row["method"], row["sent"]
        found.setdefault(place, {}).setdefault(row["rate"], []).append(row)
    scores = {}
    for place, rates in found.items():
        best = max(rates.values(), key=lambda runs: sum(float(run["validation"]) for run in runs))
        scores[place] = [
            100 * float(run["test"]) for run in sorted(best, key=lambda run: run["seed"])
        ]
    plain = scores["groups", "FedSLR", "all"]
    lost = [a - b for a, b in zip(plain, scores["groups", "FedSLR", "RandomK 1/30"], strict=True)]
    cell = f"{sum(lost) / 2:.1f} ± {abs(lost[0] - lost[1]) / 2:.1f}"
    (line,) = re.findall(r"^\| RandomK 1/30 \|.*$", page, re.M)
    assert line.endswith(f"| {cell} |")


def test_the_movielens_page_has_the_numbers_of_its_runs():
    """Every row of its tables: means and deviations over five seeds, of what the runs found."""
    page = (ROOT / "docs" / "record" / "movielens.md").read_text()
    rows: dict[Any, list[dict[str, str]]] = {}
    for name, keys in (
        ("closed-form", ["head"]),
        ("runs", ["users", "trained", "method", "model"]),
    ):
        for row in published.rows(f"results/movielens/{name}"):
            rows.setdefault(tuple(row[key] for key in keys), []).append(row)
    for key, seeds in rows.items():
        assert sorted(row["seed"] for row in seeds) == list("12345"), key
        test, worst = (100 * np.array([float(s[n]) for s in seeds]) for n in ("test", "worst10"))
        cells = [*key[-2:], f"{test.mean():.1f} ± {test.std(ddof=1):.1f}", f"{worst.mean():.1f}"]
        if "bytes" in seeds[0]:
            cells.append(f"{np.mean([int(s['bytes']) for s in seeds]) / 1e6:.2f}")
            cells.append(f"{np.mean([int(s['gradients']) for s in seeds]) / 1e3:.0f}")
        assert f"| {' | '.join(cells)} |" in page, key
    means = {key: 100 * np.mean([float(s["test"]) for s in seeds]) for key, seeds in rows.items()}
    lora = {key[1:]: value for key, value in means.items() if key[0] == "63"}
    both = [key for key in lora if key[0] == "LoRA" and ("head", *key[1:]) in lora]
    gains = [lora[key] - lora[("head", *key[1:])] for key in both]
    assert f"from {min(gains):.1f} to {max(gains):+.1f} points".replace("-", "−") in page
    for trained, text in (
        ("LoRA", "by {:.1f} points with LoRA"),
        ("head", "and {:.1f} with heads"),
    ):
        first, second = sorted((v for key, v in lora.items() if key[0] == trained))[:-3:-1]
        assert text.format(first - second) in page
    assert abs(lora["LoRA", "FedSALoRA", "personalized"] - lora["LoRA", "FedAvg", "global"]) < 0.7
    mean = {key: value for key, value in means.items() if key[0] != "63"}
    shared = {key[2]: value for key, value in mean.items() if key[3:] == ("global",)}
    own = {key[2]: value for key, value in mean.items() if key[3:] not in ((), ("global",))}
    gains = [own[name] - shared[name] for name in own.keys() & shared.keys()]
    assert f"by {min(gains):.1f} to {max(gains):.1f} points" in page
    drawn, alone, common = (mean[f"{k}",] for k in (
        "own head, drawn to the one for all", "own head", "one head for all"
    ))  # fmt: skip
    gains = [common - value for value in shared.values()]
    assert f"closed form is {min(gains):.1f} to {max(gains):.1f} points ahead" in page
    assert f"gains {drawn - alone:.1f} points" in page
    assert f"and is {drawn - max(own.values()):.1f} points" in page
    assert f"is {alone - own['LocalTrain']:.1f} behind" in page
    assert f"level**, {abs(own['FedSLR'] - own['FedAvg + fine-tuning']):.1f} points" in page


def test_the_leaderboard_marks_the_best_federated_method():
    rows = ["| method | a | mean rank |", "|---|---|---|", "| GlobalTrain | 9.0 ± 1 | 1.0 |"]
    rows += ["| X | 8.5 ± 1 | 3.0 |", "| Y | 10.5 ± 2 | 2.5 |", "| Z | – | – |", ""]
    marked = [*rows[:4], "| Y | **10.5 ± 2** | **2.5** |", *rows[5:]]
    assert HOOKS["mark_best"]("\n".join(rows)) == "\n".join(marked)
    untouched = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert HOOKS["mark_best"](untouched) == untouched


def test_the_pages_are_listed_for_programs_by_section():
    def page(title, url):
        return SimpleNamespace(is_section=False, is_page=True, title=title, url=url)

    pages = [page("Tune", "tune.html"), page("FedAvg", "methods/FedAvg.html")]
    guides = SimpleNamespace(is_section=True, title="Guides", children=pages)
    found = HOOKS["listed"]("name", "What it is", [page("Home", ""), guides])
    assert found == (
        "# name\n\n> What it is\n\n## Start\n\n- [Home](index.html)\n\n"
        "## Guides\n\n- [Tune](tune.html)\n- [FedAvg](methods/FedAvg.html)\n"
    )


def test_a_site_of_github_links_the_notebook_in_colab(monkeypatch):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tutorial.md"))
    text = (ROOT / "docs" / "tutorial.md").read_text()
    link = "https://colab.research.google.com/github/owner/name/blob/main/docs/tutorial.ipynb"
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert "colab" not in HOOKS["on_page_markdown"](text, page, None, None)
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    assert f"[open it in Colab]({link})" in HOOKS["on_page_markdown"](text, page, None, None)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_add_a_method_does_not_depend_on_chunks(name, tmp_path, monkeypatch):
    """Four of six clients train in a round, one at a time or all together."""
    (kind,) = (
        value
        for value in vars(load(name, tmp_path, monkeypatch)).values()
        if isinstance(value, type)
        and issubclass(value, FederatedAlgorithm)
        and value is not FederatedAlgorithm
    )
    states = []
    for at_once in (1, 4):
        torch.manual_seed(0)
        method = kind(MLP(64, (4,)), lr=0.05, local_epochs=2)
        data = DigitsDataModule(6, Dirichlet(1.0), seed=0)
        sizes = {"clients_per_round": 4, "clients_at_once": at_once}
        run(method, data, 3, root=tmp_path, **sizes)
        rows = [method.store.read(state, np.arange(6)) for state in method.store.names]
        states.append([method.global_model, *rows])
        assert method.rounds == 3 and method.row["train/loss"] < np.log(10)  # that of a guess
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_the_python_example_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks("README.md")
    code = block.replace("max_epochs=20", "max_epochs=2")
    exec(compile(code, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    accuracy = [line for line in lines if re.fullmatch(r"[01]\.\d+", line)]
    assert len(accuracy) == 1 and 0 < float(accuracy[0]) <= 1
    assert (tmp_path / "runs/from-python/summary.json").exists()


@pytest.mark.cli
def test_the_own_data_command_of_the_readme_runs(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 3, 2000)
    inputs = rng.normal(size=(2000, 20)).astype(np.float32) + targets[:, None]
    np.savez(tmp_path / "my.npz", inputs=inputs, targets=targets)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pfl"])
    text = (ROOT / "README.md").read_text()
    command = next(c for c in re.findall(r"^pfl (fit [^`]*?)\n(?!    )", text, re.M) if "npz" in c)
    arguments = command.replace("\\\n", " ").split()
    assert main([*arguments, "--trainer.max_epochs", "1", "--trainer.callbacks", "[]"]) == 0
    clients = (tmp_path / "runs/quickstart/clients.csv").read_text().splitlines()
    assert len(clients) == 1 + 50


def rows_of_methods() -> list[list[str]]:
    """The cells of the rows of docs/methods.md, without heads; all of a table are equally long."""
    text = (ROOT / "docs" / "methods.md").read_text()
    lines = text.partition("\n## Which methods refuse")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    heads = [number for number, row in enumerate(rows) if row[0] == "method"]
    assert len(heads) == 4
    for begin, end in zip(heads, [*heads[1:], len(rows)], strict=True):
        assert {len(row) for row in rows[begin:end]} == {len(rows[begin])}
    return [row for row in rows if row[0].startswith("`")]


def test_every_method_has_one_row_in_the_table_of_methods():
    named = [name for row in rows_of_methods() for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(set(pfl.algorithms.__all__) - {"FederatedAlgorithm"})


def test_the_table_of_methods_names_tests_that_exist():
    """Files begin with the name of a method, but for those that the text above the tables names."""
    folder = ROOT / "tests" / "algorithms"
    own = " ".join(path.stem.replace("_", "") for path in folder.glob("test_*.py"))
    text = (ROOT / "docs" / "methods.md").read_text().partition("\n## One global model")[0]
    named = re.findall(r"`((?:tests/\w+/)?test_\w+\.py)`", text)
    for name in named:
        assert (folder / name).exists() or (ROOT / name).exists(), name
    elsewhere = "".join((folder / name).read_text() for name in named if "/" not in name)
    elsewhere += (ROOT / "tests" / "method" / "test_family.py").read_text()
    for name in set(pfl.algorithms.__all__) - {"FederatedAlgorithm"}:
        if f"test{name.lower()}" not in own:
            assert re.search(rf"\b{name}\b", elsewhere), name


def test_errata_of_the_papers_name_tests_that_exist():
    written = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page in (ROOT / "docs" / "record").glob("*.md"):
        named = re.findall(r"`(test_\w+)`", page.read_text())
        assert [name for name in named if f"def {name}(" not in written] == [], page.name


def test_links_lead_somewhere():
    broken = [
        f"{document.name}: {target}"
        for document in DOCUMENTS
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert broken == []


def test_the_menu_of_the_site_has_all_results_of_benchmarks():
    menu = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "benchmarks" / "results").glob("*.md"):
        assert f"benchmarks/{path.name}" in menu
