"""Where a command finds classes of the user: in the current folder, and in that of an app."""

import os
import sys
from pathlib import Path


def is_checkout(entry: str) -> bool:
    """Returns whether a folder of Python's path is a checkout of pfl; a wheel has no links."""
    return Path(entry, "pfl", "models").is_symlink()


def add_current_folder() -> None:
    """Puts the current folder at the end of Python's path, after everything that is installed.

    Only checkouts of pfl come later: the current folder may have modules of its own that are called
    `models`, `datamodules` or `tests`, as folders of a checkout are.
    """
    sys.path.append(os.getcwd())
    sys.path.sort(key=is_checkout)  # keeps the order of all others


def add_app_folder(app: Path) -> None:
    """Puts an app's folder on Python's path: before the current folder, after all packages."""
    folder = str(app.absolute())
    if folder in sys.path:
        return
    here = os.getcwd()
    place = len(sys.path)
    if here in sys.path:
        place = sys.path.index(here)
    sys.path.insert(place, folder)
