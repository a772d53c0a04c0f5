"""What the documents show runs as it stands there."""

import gc
import importlib
import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import griffe
import matplotlib
import numpy as np
import pytest
import torch

import datamodules
import models
import pfl.algorithms
from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl.cli import main
from pfl.method import FederatedAlgorithm
from tests.commands import QUICKSTART, call, finish, table
from tests.problems import run

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks(document: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.S)


METHODS = {block.split()[1]: block for block in python_blocks("docs/add-a-method.md")}


def load(name: str, folder: Path, monkeypatch) -> ModuleType:
    """A block of docs/add-a-method.md, saved under its name in a folder and imported from there."""
    (folder / name).write_text(METHODS[name])
    forget(Path(name).stem, folder, monkeypatch)
    return importlib.import_module(Path(name).stem)


def forget(module: str, folder: Path, monkeypatch) -> None:
    """Makes a module of a folder importable until the end of the test."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, module, ModuleType(module))  # its end takes the module away
    del sys.modules[module]


def printed(document: str, module: str, folder: Path, monkeypatch) -> str:
    """What the command of a document prints, in a folder with a module, after a single round."""
    forget(module, folder, monkeypatch)
    monkeypatch.chdir(folder)
    (command,) = re.findall(r"^pfl (fit .*)$", (ROOT / document).read_text(), re.M)
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
def test_the_metric_of_add_a_metric_is_measured(tmp_path, monkeypatch):
    """Sick samples with the classes 1, 2 and 2; the two most likely of each are those below."""
    (block,) = python_blocks("docs/add-a-metric.md")
    (tmp_path / "clinic.py").write_text(block)
    metric = runpy.run_path(str(tmp_path / "clinic.py"))["TopTwoOfTheSick"]()
    likely = torch.tensor([[0.1, 0.5, 0.4], [0.5, 0.4, 0.1], [0.5, 0.1, 0.4], [1.0, 0.0, 0.0]])
    metric.update(likely, torch.tensor([1, 2, 2, 0]))  # {1, 2}, {0, 1}, {0, 2}, and a healthy one
    assert metric.compute().item() == pytest.approx(2 / 3)
    out = printed("docs/add-a-metric.md", "clinic", tmp_path, monkeypatch)
    assert "test top_two_of_the_sick" in out


@pytest.mark.cli
def test_the_loss_of_add_a_loss_trains(tmp_path, monkeypatch):
    """With focus 0 it is cross entropy; log 1 and log 3 have the probabilities 1/4, 3/4."""
    (block,) = python_blocks("docs/add-a-loss.md")
    (tmp_path / "focal.py").write_text(block)
    kind = runpy.run_path(str(tmp_path / "focal.py"))["FocalLoss"]
    scores, targets = torch.tensor([[1.0, 3.0]] * 2).log(), torch.tensor([0, 1])
    p = torch.tensor([0.25, 0.75])
    torch.testing.assert_close(kind(focus=0.0)(scores, targets), -p.log())
    torch.testing.assert_close(kind(focus=2.0)(scores, targets), -((1 - p) ** 2) * p.log())
    assert "test accuracy" in printed("docs/add-a-loss.md", "focal", tmp_path, monkeypatch)


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
    assert "| two domains, natural | 57.1 ± 6.8 |" in page  # which the leaderboard calls Per-FedAvg
    assert "| mean rank | 14.57 |" in HOOKS["method_page"]("FedAvg")


def test_the_advice_has_the_numbers_of_the_leaderboard():
    """Of each row the means over the groups of problems; and who is ahead where labels differ."""
    page = (ROOT / "docs" / "choose-a-method.md").read_text()
    scores, worst = {}, {}
    for row in table(ROOT / "docs" / "data" / "results" / "leaderboard" / "comparison.csv"):
        of, problem = row["method"], row["problem"]
        scores.setdefault(of, {})[problem] = 100 * float(row[row["model"]] or "nan")
        worst.setdefault(of, {})[problem] = 100 * float(row["worst 10%"] or "nan")
    iid = [problem for problem in scores["FedAvg"] if problem.endswith("IID")]
    domains = ["two domains, natural"]
    labels = sorted({*scores["FedAvg"]} - {*iid, *domains})
    rows = re.findall(r"^\| ([\w-]+) \|((?: [\d.]+ \|){5})$", page, re.MULTILINE)
    assert len(rows) == 16 and len(labels) == 6
    for name, cells in rows:
        own, there = scores[name], [scores[name], scores[name], worst[name], scores[name]]
        means = [
            np.mean([numbers[problem] for problem in problems])
            for numbers, problems in zip(there, (iid, labels, labels, domains), strict=True)
        ]
        behind = max(scores["FedAvg"][problem] - own[problem] for problem in own)
        printed = list(map(float, cells.split("|")[:-1]))
        np.testing.assert_allclose(printed, [*means, behind], atol=0.0501, err_msg=name)
    (ahead,) = re.findall(r"^\| labels \| (.*): each", page, re.MULTILINE)
    for name in re.findall(r"`(.*?)`", ahead):
        for other in ("FedAvg", "LocalTrain"):
            assert all(scores[name][problem] > scores[other][problem] for problem in labels)


def test_the_leaderboard_marks_the_best_federated_method():
    rows = ["| method | a | mean rank |", "|---|---|---|", "| GlobalTrain | 9.0 ± 1 | 1.0 |"]
    rows += ["| X | 8.5 ± 1 | 3.0 |", "| Y | 10.5 ± 2 | 2.5 |", "| Z | – | – |", ""]
    marked = [*rows[:4], "| Y | **10.5 ± 2** | **2.5** |", *rows[5:]]
    assert HOOKS["mark_best"]("\n".join(rows)) == "\n".join(marked)
    untouched = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert HOOKS["mark_best"](untouched) == untouched


def test_a_site_of_github_links_the_notebook_in_colab(monkeypatch):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tutorial.md"))
    text = (ROOT / "docs" / "tutorial.md").read_text()
    link = "https://colab.research.google.com/github/owner/name/blob/main/docs/tutorial.ipynb"
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert "colab" not in HOOKS["on_page_markdown"](text, page, None, None)
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    assert f"[open it in Colab]({link})" in HOOKS["on_page_markdown"](text, page, None, None)


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith("test_")])
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


def test_the_test_of_add_a_method_passes(tmp_path, monkeypatch):
    load("test_fedprox.py", tmp_path, monkeypatch).test_one_round_equals_numpy(tmp_path)


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
    lines = (ROOT / "docs" / "methods.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    heads = [number for number, row in enumerate(rows) if row[0] == "method"]
    assert len(heads) == 3
    for begin, end in zip(heads, [*heads[1:], len(rows)], strict=True):
        assert {len(row) for row in rows[begin:end]} == {len(rows[begin])}
    return [row for row in rows if row[0].startswith("`")]


def test_every_method_has_one_row_in_the_table_of_methods():
    named = [name for row in rows_of_methods() for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(set(pfl.algorithms.__all__) - {"FederatedAlgorithm"})


def test_the_table_of_methods_names_tests_that_exist():
    """The last cell of each row, and the text above the tables, which names some in folders."""
    folder = ROOT / "tests" / "algorithms"
    for row in rows_of_methods():
        named = re.findall(r"`(test_\w+\.py)`", row[-1])
        assert named, row[0]
        assert not [name for name in named if not (folder / name).exists()], row[0]
    text = (ROOT / "docs" / "methods.md").read_text()
    for name in re.findall(r"`((?:tests/\w+/)?test_\w+\.py)`", text):
        assert (folder / name).exists() or (ROOT / name).exists(), name


def test_links_lead_somewhere():
    broken = [
        f"{document.name}: {target}"
        for document in DOCUMENTS
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert broken == []
