"""The configurations that come with pfl, found by name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pfl
from pfl.cli.messages import closest
from pfl.errors import ConfigError

OTHERS = ("papers/", "compare/", "tune/", "sweep/")  # files of other commands than `fit`


def shipped() -> Path:
    """Returns the folder of the configurations that come with pfl."""
    folder = Path(str(files("pfl"))) / "configs"  # of the wheel
    return folder if folder.is_dir() else Path(pfl.__file__).parents[1] / "configs"  # a checkout


def names(folder: Path) -> dict[str, Path]:
    """Returns the configurations in a folder, by names such as `quickstart`, `logger/wandb`."""
    paths = sorted(folder.rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def find(name: str) -> Path | None:
    """Returns the file `name`, else the one that comes with pfl under this name, else None.

    The name may have a folder `configs/` before it and `.yaml` behind it.
    """
    if Path(name).is_file():
        return Path(name)
    return names(shipped()).get(name.removeprefix("configs/").removesuffix(".yaml"))


def find_run(name: str) -> str:
    """Returns the file of a configuration of `fit`; text and addresses are returned as they are.

    Raises:
        ConfigError: There is no such file, and no configuration of this name comes with pfl.
    """
    if "://" in name or "{" in name:  # jsonargparse reads these, too
        return name
    path = find(name)
    if path is None:
        known = [key for key in names(shipped()) if not key.startswith(OTHERS)]
        raise ConfigError(f"config: {name}: there is no such file{closest(name, known)}")
    return str(path)
