"""Three hospitals with a file each, in tests of what their parties have in common.

The outcomes are home, moved and readmitted, numbers 0, 1 and 2 in the order of their names. The
third hospital has nobody who was moved, nor one who went home.
"""

import yaml

from pfl.deploy.channel import Channel
from tests.commands import call

ROWS = {
    "a": ["40,120,home", "60,100,readmitted", "50,110,moved"],
    "b": ["55,130,moved", "45,90,home"],
    "c": ["70,140,readmitted", "80,100,readmitted"],
}
# ages and pressures are (x - 50) / 10 and (x - 100) / 20
TRANSFORMS = [{"class_path": "Normalize", "init_args": {"mean": [50, 100], "std": [10, 20]}}]
RUN = {
    "trainer": {"name": "run", "max_epochs": 2},
    "model": {
        "class_path": "FedAvg",
        "init_args": {
            "network": {
                "class_path": "LogisticRegression",
                "init_args": {"in_features": 2, "num_classes": 3},
            },
            "lr": 0.5,
            "batch_size": None,
        },
    },
    "data": {
        "class_path": "TableDataModule",
        "init_args": {
            "file": "all.csv",
            "target_column": "outcome",
            "client_column": "hospital",
            "partition": {"class_path": "Natural"},
            "protocol": {
                "class_path": "SplitOwn",
                "init_args": {"test": 0.0, "validation": 0.0},
            },
            "transforms": TRANSFORMS,
        },
    },
    "loop": {"evaluate": [], "clients_at_once": 1},
}


def write_hospitals(tmp_path, head="age,pressure,outcome", all_rows=ROWS):
    """Writes the file of all hospitals, a folder for each, and `run.yaml`."""
    lines = [f"{head},hospital"]
    for hospital, rows in all_rows.items():
        lines += [f"{row},{hospital}" for row in rows]
        folder = tmp_path / hospital
        folder.mkdir()
        (folder / "own.csv").write_text("\n".join([head, *rows, ""]))
    (tmp_path / "all.csv").write_text("\n".join([*lines, ""]))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))


def deployed(tmp_path, *words, **hospitals):
    """An app for the three hospitals in the current folder, which also has a folder for each."""
    write_hospitals(tmp_path, **hospitals)
    status, _, error = call("deploy", "--config", "run.yaml", *words, "--out", "app")
    assert status == 0, error
    return tmp_path / "app"


def party(app, client, more=None, **arguments):
    """The party's file of a hospital, with further keys, and other arguments of its data module."""
    folder = app.parent / "abc"[client]
    own = {"file": "own.csv", "target_column": "outcome", "num_clients": 1}
    own["protocol"] = RUN["data"]["init_args"]["protocol"]
    own["transforms"] = TRANSFORMS
    data = {"class_path": "TableDataModule", "init_args": own | arguments}
    content = {"app": "../app", "client": client, "data": data, "socket": "own.sock"}
    content |= more or {}
    (folder / "party.yaml").write_text(yaml.safe_dump(content))
    return folder / "party.yaml"


class Direct(Channel):
    """Workers in this process."""

    def __init__(self, workers):
        self.workers = workers

    def peers(self):
        return set(range(len(self.workers)))

    def ask(self, messages, timeout):
        return {peer: self.workers[peer].answer(text) for peer, text in messages.items()}
