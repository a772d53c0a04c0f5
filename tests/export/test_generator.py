"""`pfl export` of FedGen: the generator lies beside the models, and its lines load it."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pfl.cli.main import main
from pfl.export.run import RestoredRun, export
from tests.export.test_export import MLP, fit

NOISE, HIDDEN, CLASSES, FEATURES = 3, 5, 10, 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generator")
    sizes = {"noise": NOISE, "hidden": HIDDEN, "generated": 4, "server_steps": 3}
    run = fit(folder, "heads", "FedGen", {"shared": "head", **sizes}, MLP)
    return run / "checkpoints" / "last.ckpt"


def features(values, noise):
    """V relu(U (ε, e_y) + a) + c of each class y, by NumPy, for one ε a class."""
    cuts = np.cumsum([HIDDEN * (NOISE + CLASSES), HIDDEN, FEATURES * HIDDEN])
    first, offset, second, last = np.split(values, cuts)
    x = np.concatenate([noise, np.eye(CLASSES)], 1)
    z = np.maximum(x @ first.reshape(HIDDEN, -1).T + offset, 0)
    return z @ second.reshape(FEATURES, -1).T + last


@pytest.mark.cli
def test_the_lines_of_the_readme_load_the_generator(checkpoint, tmp_path, monkeypatch):
    """Features are inputs of the clients' heads, and those of the values in the checkpoint."""
    words = ["--ckpt_path", str(checkpoint), "--client", "1", "--out", str(tmp_path)]
    assert main(["export", *words]) == 0
    assert {one.name for one in tmp_path.iterdir()} == {"client1", "generator"}
    monkeypatch.chdir(tmp_path / "generator")
    lines = re.search(r"```python\n(.*?)```", (tmp_path / "generator/README.md").read_text(), re.S)
    scope = {}
    exec(lines[1], scope)
    values = torch.load(checkpoint, weights_only=False)["state_dict"]["generator"].double().numpy()
    assert len(values) == HIDDEN * (NOISE + CLASSES + 1) + FEATURES * (HIDDEN + 1)
    assert np.abs(values).min() > 0
    expected = features(values, scope["noise"].double().numpy())
    np.testing.assert_allclose(scope["features"].detach().numpy(), expected, atol=1e-5)
    head = load_file(tmp_path / "client1" / "model.safetensors")["head.weight"]
    assert head.shape == (CLASSES, FEATURES)


@pytest.mark.cli
def test_onnx_graphs_make_the_same_features(checkpoint, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    export(checkpoint, tmp_path, [1], form="onnx")
    session = runtime.InferenceSession(tmp_path / "generator" / "model.onnx")
    noise = np.random.default_rng(0).normal(size=(CLASSES, NOISE))
    inputs = np.concatenate([noise, np.eye(CLASSES)], 1).astype(np.float32)
    (made,) = session.run(None, {"inputs": inputs})
    run = RestoredRun(checkpoint, "export")
    expected = features(run.model.generator.double().numpy(), noise)
    np.testing.assert_allclose(made, expected, atol=1e-5)
    assert "3 numbers of standard normal noise" in (tmp_path / "generator/README.md").read_text()
