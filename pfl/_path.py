"""The names `models` and `datamodules`, for which a user's project may have modules of its own.

Our packages of these names are `pfl.models` and `pfl.datamodules`. A project without such modules
reaches ours by the short names, too: `models.lenet` is the same object as `pfl.models.lenet`. Where
a project has its own module `models`, in any folder of `sys.path`, the short name is the project's.
A folder `models/` without `__init__.py` shares the name with ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("datamodules", "models")
ROOT = Path(__file__).resolve().parents[1]
OURS = os.path.join("pfl", "_path.py")  # a folder with this file has pfl's own modules


def open_door(name: str) -> None:
    """Makes one of our packages, imported by its short name, a door to the package in `pfl`.

    Where `sys.path` has a module of the user with that name, that module is imported instead.

    Args:
        name: The `__name__` of the package that calls this; in `pfl` nothing is done.
    """
    if name not in PACKAGES:
        return
    if spec := users_module(name):
        sys.modules[name] = module_from_spec(spec)  # Python returns the entry to the importer
        spec.loader.exec_module(sys.modules[name])  # type: ignore[union-attr]
    else:
        sys.modules[name].__path__ = import_module(f"pfl.{name}").__path__


def users_module(name: str, folder: str = "") -> ModuleSpec | None:
    """Returns the spec of a module that is not ours in a folder of `sys.path`, or None."""
    entries = (os.path.abspath(entry) for entry in sys.path)
    others = (os.path.join(e, folder) for e in entries if not os.path.exists(os.path.join(e, OURS)))
    paths = [path for path in others if not _has_door(path, name)]
    for finder in sys.meta_path:
        if finder is _Finder:
            continue
        spec = finder.find_spec(name, paths)
        if spec and spec.origin:  # a mere folder has no origin
            return spec
    return None


def _has_door(path: str, name: str) -> bool:
    """Returns whether a folder has a copy of our first file of a package: an editable install's."""
    try:
        text = Path(path, f"{name}.py").read_text(errors="replace")
    except OSError:
        return False
    return "open_door(__name__)" in text


class _Finder:
    """Finds `models` and `datamodules`, and what is in them by their short names."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, _: Any = None) -> ModuleSpec | None:
        """Returns where the module of a short name is; None for all other modules."""
        package, *below = name.split(".")
        if package not in PACKAGES:
            return None
        if not below:
            return users_module(name) or PathFinder.find_spec(name, [str(ROOT)])
        ours = sys.modules.get(f"pfl.{name.rpartition('.')[0]}")
        if ours is None or path != ours.__path__:
            return None  # in a package of the user
        users = None
        if len(below) == 1:
            users = users_module(name, package)
        if users or find_spec(f"pfl.{name}") is None:
            return users
        return spec_from_loader(name, _Alias())  # type: ignore[arg-type]


class _Alias:
    """Loads `models.lenet` as the module object `pfl.models.lenet`."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python to create a module."""

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the created module in `sys.modules`, from where Python returns it."""
        sys.modules[module.__name__] = import_module(f"pfl.{module.__name__}")


sys.meta_path.insert(0, _Finder)
