"""Without the folder of chains runs have other engines, and one that began with a chain goes on."""

import json
import shutil

import pytest
import torch
import yaml

from tests.commands import ROOT, call, python

COMMANDS = "import json, sys; from pfl.cli import main; [main(c) for c in json.loads(sys.argv[1])]"
NETWORKS = {
    "mlp": {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [8]}},
    "cnn": {"class_path": "SmallCNN", "init_args": {"width": 4}},
}


def config(folder, name):
    """The path of a configuration: FedAvg of 6 clients with handwritten digits."""
    written = {
        "seed_everything": 0,
        "trainer": {"name": name, "default_root_dir": str(folder), "enable_progress_bar": False},
        "model": {
            "class_path": "FedAvg",
            "init_args": {"network": NETWORKS[name], "lr": 0.1, "batch_size": 20},
        },
        "data": {"class_path": "DigitsDataModule", "init_args": {"num_clients": 6}},
        "loop": {"clients_per_round": 3},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(written))
    return path


def ended(folder):
    """The summary of a run, and its last global model."""
    summary = json.loads((folder / "summary.json").read_text())
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return summary, saved["federated"], saved["state_dict"]


@pytest.mark.slow
@pytest.mark.cli
@pytest.mark.processes
def test_every_run_goes_on_with_another_engine(tmp_path):
    copy = tmp_path / "copy"
    for package in ("pfl", "models", "datamodules", "configs"):
        ignored = shutil.ignore_patterns("__pycache__", "chains")
        shutil.copytree(ROOT / package, copy / package, ignore=ignored)
    runs = {name: tmp_path / name for name in ("whole", "begun", "without")}
    paths = {}
    for name, folder in runs.items():
        folder.mkdir()
        paths[name] = {network: config(folder, network) for network in NETWORKS}
    for name, rounds in (("whole", 2), ("begun", 1)):
        fit = ("fit", "--config", paths[name]["mlp"], "--trainer.max_epochs", rounds)
        assert call(*fit)[0] == 0
    checkpoint = runs["begun"] / "mlp" / "checkpoints" / "last.ckpt"
    chain = ended(runs["whole"] / "mlp")[0]["engine"]
    assert "chain" in chain
    assert ended(runs["begun"] / "mlp")[1]["ran_with"] == chain

    resumed = ["fit", "--config", str(paths["begun"]["mlp"]), "--ckpt_path", str(checkpoint)]
    fits = [["fit", "--config", str(path)] for path in paths["without"].values()]
    commands = [[*fit, "--trainer.max_epochs", "2"] for fit in (*fits, resumed)]
    done = python("-c", COMMANDS, json.dumps(commands), cwd=tmp_path, path=copy)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in (done.stdout + done.stderr).splitlines() if "goes on with" in line]
    assert said == [
        f"warning: engine: the run began with {chain!r} and goes on with 'vmap', which gives the "
        f"same values to rounding"
    ]
    assert ended(runs["without"] / "cnn")[0]["engine"] == "sequential"
    assert ended(runs["without"] / "mlp")[0]["engine"] == "vmap"
    expected = ended(runs["whole"] / "mlp")[2]
    for name in ("without", "begun"):
        summary, _, model = ended(runs[name] / "mlp")
        assert summary["engine"] == "vmap" and summary["round"] == 2
        assert model.keys() == expected.keys()
        for key, values in model.items():
            torch.testing.assert_close(values, expected[key], rtol=1e-4, atol=1e-5)
