"""The user's own modules that a run needs, for the folder of its app."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")  # mine.Net
OURS = ("pfl", "models", "datamodules")


def own_modules(values: Any, folder: Path, imported: Collection[str]) -> dict[str, str]:
    """Returns the modules of a folder that a configuration needs, as texts by path.

    They are those whose classes and functions it names, and those of the folder that these import.

    Args:
        values: The configuration, as plain values.
        folder: The folder, which is one of Python's path.
        imported: The names of modules of which it names classes: other texts are no classes.
    """
    found: dict[str, str] = {}
    waiting = []
    for text in _texts(values):
        if PATH.fullmatch(text) and text.partition(".")[0] in imported:
            waiting.append(text)
    while waiting:
        parts = waiting.pop().split(".")
        if parts[0] in OURS or not _lies_in(_spec(parts[0]), folder):
            continue
        for end in range(1, len(parts) + 1):
            spec = _spec(".".join(parts[:end]))
            if spec is None or spec.origin is None:  # a class; a folder without __init__.py
                continue
            file = Path(spec.origin)
            if file.suffix != ".py" or folder not in file.parents:
                continue
            path = file.relative_to(folder).as_posix()
            if path not in found:
                found[path] = file.read_text()
                waiting += _imports(found[path], spec)
    return found


def _spec(name: str) -> ModuleSpec | None:
    """Returns where a module is; None if there is none of this name."""
    try:
        return find_spec(name)
    except (ImportError, ValueError):  # "mine.Net" is in a module that is no package
        return None


def _lies_in(spec: ModuleSpec | None, folder: Path) -> bool:
    """Returns whether a module or package lies in a folder itself, not in one below."""
    if spec is None:
        return False
    places = spec.submodule_search_locations or [spec.origin or ""]
    return any(Path(place).absolute().parent == folder for place in places)


def _imports(text: str, spec: ModuleSpec) -> Iterator[str]:
    """Returns the names that a module imports, and those that it takes out of others."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), spec.parent)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            yield from _texts(value)
    elif isinstance(values, str):
        yield values
