"""Imports `models` and `datamodules` from this installation, whatever stands in the current folder.

`python -m pfl`, scripts and pytest put a folder of the user first on `sys.path`, and `models/` is a
common name there. For these two names this installation comes first; all other modules of the
user's folder are imported as usual.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

PACKAGES = ("datamodules", "models")
ROOT = Path(__file__).resolve().parents[1]


class _Finder:
    """Finds `PACKAGES` beside `pfl`."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        """Returns where a package of this installation lies; None for all other modules."""
        return PathFinder.find_spec(name, [str(ROOT)]) if name in PACKAGES else None


def hidden_by(name: str) -> Path | None:
    """Returns the module or folder of the current folder that our package `name` hides, if any."""
    for path in (Path(f"{name}.py"), Path(name)):
        if path.exists() and path.resolve() != ROOT / name:
            return path.resolve()
    return None


def _check_imported(name: str) -> None:
    """Raises an ImportError if another package called `name` was imported before `pfl`."""
    origin = getattr(sys.modules.get(name), "__file__", None)
    if name in sys.modules and Path(origin or "").resolve().parent != ROOT / name:
        raise ImportError(
            f"{name}: {origin} was imported, but pfl needs its own package of that name; "
            f"rename the file or folder"
        )


for _name in PACKAGES:
    _check_imported(_name)
sys.meta_path.insert(0, _Finder)
