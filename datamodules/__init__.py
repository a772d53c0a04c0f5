"""Federated data modules, whose samples are owned by clients, for any Lightning project.

Names are imported when they are first used: a partition rule needs NumPy only, while everything
else needs PyTorch and Lightning. The stub `__init__.pyi` lists them, for type checkers, too.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from pfl._path import open_door

open_door(__name__)

_NUMPY_ONLY = tuple(
    f"pfl.datamodules.{part}" for part in ("errors", "partitions", "protocols", "rules")
)
_MODULES = {
    alias.name: str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name; with the first one that needs PyTorch, all others.

    Command lines find a class by its short name if it has been imported.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    light = _MODULES[name].startswith(_NUMPY_ONLY)
    for public in [name] if light else __all__:
        globals()[public] = getattr(import_module(_MODULES[public]), public)
    return globals()[name]


def __dir__() -> list[str]:
    """Returns the public names, of which some may not have been imported yet."""
    return sorted({*globals(), *__all__})
