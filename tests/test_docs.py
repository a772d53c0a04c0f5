"""What the documents show runs as it stands there."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from pfl.cli import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_block(document: str) -> str:
    """The only Python block of a document."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.S)
    return block


@pytest.mark.cli
def test_the_method_of_add_a_method_runs_from_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "fedper.py").write_text(python_block("docs/add-a-method.md"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["pfl"])
    config = str(ROOT / "configs" / "quickstart.yaml")
    arguments = ["fit", "--config", config, "--model", "fedper.FedPer", "--model.lr", "0.1"]
    arguments += ["--trainer.max_epochs", "2", "--trainer.callbacks", "[]"]
    assert main(arguments) == 0

    saved = torch.load(tmp_path / "runs/quickstart/checkpoints/last.ckpt", weights_only=True)
    method = importlib.import_module("fedper").FedPer
    assert saved["federated"]["algorithm"] == method.__name__
    # SmallCNN's body: convolutions 9*1*16 and 9*16*32, two GroupNorms 2*16 and 2*32 = 4,848
    # values; its head 128*10 + 10 = 1,290 stays at home. Two rounds of five clients, 4 bytes each.
    body, head = 9 * 16 + 9 * 16 * 32 + 2 * 16 + 2 * 32, 128 * 10 + 10
    assert saved["federated"]["bytes"] == [2 * 5 * 4 * body] * 2
    assert saved["federated"]["clients"]["h"]["parts"][0]["rows"].shape[1] == head
    assert saved["federated"]["parameters"] == body + head
    assert "personalized" in capsys.readouterr().out


def test_the_python_example_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = python_block("README.md").replace("max_epochs=20", "max_epochs=2")
    exec(compile(code, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    accuracy = [line for line in lines if re.fullmatch(r"[01]\.\d+", line)]
    assert len(accuracy) == 1 and 0 < float(accuracy[0]) <= 1
    assert (tmp_path / "runs/from-python/summary.json").exists()


@pytest.mark.cli
def test_the_own_data_command_of_the_readme_runs(tmp_path, monkeypatch):
    import numpy as np

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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target
