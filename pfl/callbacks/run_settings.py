"""The settings of a run as plain values, and which of them a resumed run has changed."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import yaml

from pfl.datamodules.ranges import Checked
from pfl.method.algorithm import FederatedAlgorithm
from pfl.rounds.client_lists import Affected

SEPARATE = ("model.network", "loop.seed")  # a checkpoint is recognised by them
MOST_CHARACTERS = 200  # of a list in the line that tells what has changed
NO_RESULT = ("model.engine", "loop.clients_at_once", "loop.state_memory")  # speed and memory only


def configuration(
    trainer: pl.Trainer, algorithm: FederatedAlgorithm, text: str | None
) -> dict[str, Any]:
    """Returns the configuration of a run, nested: `model`, `loop`, `data`, `trainer` and others.

    Without `text`, its YAML, it is read off the objects, as far as arguments are numbers, words,
    lists of them, or objects of this package that have such arguments.
    """
    if text is not None:
        content: dict[str, Any] = yaml.safe_load(text)
        return content
    loop: Any = trainer.datamodule  # type: ignore[attr-defined]
    network = type(algorithm.network).__name__
    data = loop.datamodule
    return {
        "algorithm": type(algorithm).__name__,
        "network": network,
        "max_epochs": trainer.max_epochs,
        "protocol": loop.describe(),
        "trainer": {"precision": trainer.precision},
        "model": _arguments(algorithm),
        "data": {"transforms": repr(data.transforms.transforms)},
        "loop": {**_arguments(loop.participation), **_arguments(loop)},
    }


def run_name(text: str) -> list[Any]:
    """Returns the name of a run and the folder of all runs, from the YAML of a configuration."""
    trainer = yaml.safe_load(text).get("trainer") or {}
    return [trainer.get("name"), trainer.get("default_root_dir")]


def settings(configured: dict[str, Any]) -> dict[str, Any]:
    """Returns by its key each setting of a configuration that a resumed run should have again."""
    groups = {key: configured.get(key) for key in ("model", "data", "loop")}
    precision = (configured.get("trainer") or {}).get("precision")
    chosen = {**dict(_flat(groups)), "trainer.precision": precision}
    left_out = (*SEPARATE, *NO_RESULT, "data.batch_size", "data.num_workers", "data.seed")
    compared = {k: v for k, v in chosen.items() if not k.startswith(left_out)}
    return {key: _brief(_with_sum(key, value)) for key, value in compared.items()}


def _brief(value: Any) -> Any:
    """Returns the beginning of a long list, such as a trace, with a checksum of all of it."""
    if not isinstance(value, list):
        return value
    text = repr(value)
    if len(text) <= MOST_CHARACTERS:
        return value
    return f"{text[:MOST_CHARACTERS]}... ({zlib.crc32(text.encode()):08x})"


def _with_sum(key: str, value: Any) -> Any:
    """Adds a checksum to the name of a file that the loop reads, such as a trace."""
    if key.startswith("loop.") and isinstance(value, str) and Path(value).expanduser().is_file():
        return f"{value} ({zlib.crc32(Path(value).expanduser().read_bytes()):08x})"
    return value


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns the settings that differ, each with its value before and now."""
    keys = sorted(before.keys() | now.keys())
    pairs = {key: [before.get(key), now.get(key)] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _arguments(made: object) -> dict[str, Any]:
    """Returns the arguments of an object's class and its bases that are attributes, as values."""
    kinds = [k for k in type(made).__mro__ if "__init__" in vars(k) and k is not object]
    names = dict.fromkeys(n for kind in kinds for n in inspect.signature(kind).parameters)
    values = {name: _plain(getattr(made, name, None)) for name in names if name != "datamodule"}
    return {name: value for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    """Returns a number, a word, or a list of them; None for what has no such value."""
    if isinstance(value, Affected):
        return _plain(value.rule)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, Checked):
        return {"class": type(value).__name__, **_arguments(value)}
    if isinstance(value, int | float | str):
        return value
    return None


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "init_args":
                below = key
            else:
                below = f"{key}.{name}".lstrip(".")
            yield from _flat(inner, below)
    else:
        yield key, value
