"""What `pfl new` writes: a class that runs at once, and a test that fails until it is right."""

from __future__ import annotations

import keyword
from importlib.util import find_spec
from pathlib import Path

from pfl.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"
RUN = {  # the words after `pfl fit --config quickstart` with which the new class takes part
    "method": "--model MODULE.NAME --model.lr 0.1",
    "data": "--data MODULE.NAME --data.num_clients 20 --data.partition Natural",
    "network": "--model.network MODULE.NAME",
    "stage": "--loop.stages+=MODULE.NAME",
}


def write_new(kind: str, name: str, folder: Path) -> tuple[Path, Path]:
    """Writes a file with a class, and its test, into a folder; returns both paths.

    Args:
        kind: A key of `RUN`.
        name: The name of the class; the file has it in small letters.
        folder: Where both files go.

    Raises:
        ConfigError: The name is none for a class, a file is there, or Python has such a module.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(
            f"new: {name}; it must be the name of a Python class, letters and digits, such as "
            f"MyMethod"
        )
    module = name.lower()
    path = folder / f"{module}.py"
    test = folder / f"test_{module}.py"
    for file in (path, test):
        if file.exists():
            raise ConfigError(f"new: {file}: the file is there already; choose another name")
    if find_spec(module) is not None:
        raise ConfigError(
            f"new: {name}: Python has a module {module!r} already, which would be found in place "
            f"of {path.name}; choose another name"
        )
    for file, template in ((path, f"{kind}.txt"), (test, f"{kind}_test.txt")):
        text = filled((TEMPLATES / template).read_text(encoding="utf-8"), name)
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    return path, test


def filled(text: str, name: str) -> str:
    """Returns a text with the name of the class and that of its module."""
    return text.replace("NAME", name).replace("MODULE", name.lower())
