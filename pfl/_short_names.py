"""The short names `models` and `datamodules` of a checkout; a wheel lacks them and this file.

The folders `models/` and `datamodules/` of a checkout are the packages `pfl.models` and
`pfl.datamodules`, to which `pfl/` has links. Here their short names get the same module objects:
`models.lenet` is `pfl.models.lenet`, so that there is one class `LeNet5`.

A module or package `models` of the user that Python finds first has the name for itself. A folder
`models/` of the user without `__init__.py`, of which Python thinks last, shares the name with ours.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from pfl.current_folder import is_checkout


def share(name: str) -> None:
    """Makes the short name of a package, which is just being imported, the package in `pfl`."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    sys.modules[name] = import_module(f"pfl.{name}")  # Python returns the entry to the importer


class _Finder:
    """Finds the modules in `models` and `datamodules` where these names are our packages."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, _: Any = None) -> ModuleSpec | None:
        """Returns where the module of a short name is; None for all other modules."""
        package = name.partition(".")[0]
        if package == name or package not in ("models", "datamodules"):
            return None
        if sys.modules[package] is not sys.modules.get(f"pfl.{package}"):
            return None  # a package of the user
        folders = [str(Path(entry, package)) for entry in sys.path if not is_checkout(entry)]
        users = PathFinder.find_spec(name, folders)
        if users is not None and name.count(".") == 1:
            return users
        if find_spec(f"pfl.{name}") is None:
            return None
        return spec_from_loader(name, _Alias())  # type: ignore[arg-type]


class _Alias:
    """Loads `models.lenet` as the module object `pfl.models.lenet`."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python to create a module."""

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the created module in `sys.modules`, from where Python returns it."""
        sys.modules[module.__name__] = import_module(f"pfl.{module.__name__}")
