"""Small configurations of the command line, changes of them, and checks of their refusal."""

import copy
from typing import Any

import pytest
import yaml

from tests.commands import call

NETWORK = "model.init_args.network"
PARTITION = "data.init_args.partition"
SMALL: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"name": "small", "max_epochs": 2, "accelerator": "cpu"},
    "model": {
        "class_path": "FedAvg",
        "init_args": {
            "network": {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [8]}},
            "batch_size": 50,
        },
    },
    "data": {
        "class_path": "DigitsDataModule",
        "init_args": {
            "num_clients": 6,
            "partition": {"class_path": "Dirichlet", "init_args": {"alpha": 1.0}},
        },
    },
    "loop": {"clients_per_round": 3},
}


def write(path, config):
    """Writes a configuration to a YAML file; returns its path."""
    path.write_text(yaml.safe_dump(config))
    return path


def changed(config, key, value):
    """Returns a copy with another value at the dotted path `key`."""
    config = copy.deepcopy(config)
    *path, last = key.split(".")
    inner = config
    for name in path:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return config


def assert_refused(tmp_path, words, *args):
    """Checks that a command ends with one line that has all `words`, before it writes anything."""
    runs = tmp_path / "runs"
    try:
        status, out, err = call(*args, "--trainer.default_root_dir", runs)
    except SystemExit as error:
        pytest.fail(f"left by sys.exit({error.code})")
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ") and len(err) < 600, err
    assert not [word for word in words if word not in err], err
    assert not runs.exists()
