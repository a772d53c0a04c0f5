"""What `pfl cite` prints: BibTeX of the framework and of what runs were made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import pfl
from pfl import files
from pfl.scores.runs import find_runs

REFERENCES = Path(__file__).parent / "references.bib"
FRAMEWORK = "pfl"  # the framework's name among the classes of `references.bib`
NO_PAPER = ("GlobalTrain", "LocalTrain")  # the two ends of federated learning


def references() -> list[tuple[list[str], str]]:
    """Returns the entries of `references.bib`, each with the classes that the line above names."""
    text = REFERENCES.read_text(encoding="utf-8").replace("VERSION", pfl.__version__)
    found = []
    for piece in text.split("% ")[1:]:
        classes, _, entry = piece.partition("\n")
        found.append((classes.split(), entry.strip()))
    return found


def cited(folders: Sequence[Path]) -> str:
    """Returns the BibTeX of all runs in folders: framework, methods, data sets, networks.

    A comment names each class without an entry.

    Raises:
        ConfigError: A folder does not exist, or holds no run.
    """
    classes = [FRAMEWORK]
    for folder in find_runs(folders, "cite"):
        classes += [name for name in _classes(folder) if name not in classes]
    known = references()
    pieces = []
    for names, entry in known:
        used = [name for name in names if name in classes]
        if used:
            pieces.append(f"% {' '.join(used)}\n{entry}")
    with_entry = {name for names, _ in known for name in names} | {*NO_PAPER}
    for name in classes:
        if name not in with_entry:
            pieces.append(f"% {name}: no paper is known; see what its file names")
    return "\n\n".join(pieces)


def _classes(folder: Path) -> list[str]:
    """Returns the method, the data module and the networks of a run, each once.

    A class of the framework has its short name, one of the user its whole path.
    """
    path = folder / "config.yaml"
    with files.reading(path):
        if not path.is_file():  # a run of a Python script
            return [files.read_json(folder / "summary.json").get("algorithm", "method")]
        configured = yaml.safe_load(path.read_text(encoding="utf-8"))
        model = configured["model"]
        parts = [model, configured["data"], *_networks(model["init_args"])]
        return list(dict.fromkeys(_short(part) for part in parts))


def _networks(arguments: dict[str, Any]) -> list[Any]:
    """Returns the configured networks of a method: one, those of a `Family`, and the messenger."""
    network = arguments["network"]
    found = [network]
    if _short(network) == "Family":
        found = list(network["init_args"]["networks"].values())
    messenger = arguments.get("messenger")
    if messenger is not None:
        found.append(messenger)
    return found


def _short(part: Any) -> str:
    """Returns the name of a configured class."""
    return re.sub(r"^(pfl|models|datamodules)\.([\w.]+\.)?", "", part["class_path"])
