"""What a run has computed, read from its folder and from the folders of its parties."""

import torch

from pfl.clients.store import unpacked
from pfl.deploy.worker import StateFiles
from tests.commands import table


def flat(tree, path=""):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{path} {key}")
    else:
        yield path, torch.as_tensor(tree)


def rows(stored, count):
    """The rows of a client state in a checkpoint, [count, width]."""
    every = stored["initial"].repeat(count, 1)
    for part in stored["parts"]:
        for ids, values in unpacked(part, every.shape[1]):
            every[ids] = values
    return every


def computed(folder, parties=None):
    """What a run has computed, as tensors by name; client states are in the folder of parties."""
    saved = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    part = saved["federated"]
    found = {f"module {name}": value for name, value in saved["state_dict"].items()}
    found |= flat({key: part[key] for key in ("ledger", "samples_seen", "bytes", "rounds")})
    found |= {
        f"client {name}": rows(stored, len(part["ledger"]["uplink"]))
        for name, stored in part["clients"].items()
    }
    if parties is not None:
        told = saved["callbacks"]["Server"]["parties"]
        for client, counted in told["counted"].items():
            states = StateFiles(parties / told["run"] / f"client-{client}")
            for name, values in states.load(counted, None, not states.folder.exists()).items():
                found[f"client {name}"][client] = values
    for file in ("metrics", "clients"):
        for number, row in enumerate(table(folder / f"{file}.csv")):
            values = {f"{file} {number} {n}": float(x or "nan") for n, x in row.items()}
            found |= {n: torch.tensor(x) for n, x in values.items() if "label" not in n}
    return found
