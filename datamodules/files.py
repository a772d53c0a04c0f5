"""Files that change as a whole, and the files of a folder."""

import glob
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Gives the path of a file that takes the place of `path` when the block ends without an error.

    Until then its name has the machine and the process, and ends with ".part".
    """
    part = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextmanager
def new_content(path: Path) -> Iterator[BufferedWriter]:
    """Opens a new file that takes the place of `path` when the block ends without an error."""
    with new_file(path) as part, part.open("wb") as file:
        yield file


def remove_parts(folder: Path) -> None:
    """Removes what killed processes of this machine have left half written in a folder."""
    for path in folder.glob(f"*.{glob.escape(platform.node())}.*.part"):
        process = path.name.split(".")[-2]
        if process.isdigit() and not _is_running(int(process)):
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    """Returns whether a process runs on this machine; always true where this cannot be asked."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def files_below(folder: Path) -> Iterator[Path]:
    """Yields all files in a folder, also those behind links to other folders."""
    for place, below, names in os.walk(folder, followlinks=True):
        here = Path(place).resolve()
        # A link to a folder that it lies in has no end.
        below[:] = [name for name in below if not here.is_relative_to((here / name).resolve())]
        for name in names:
            yield Path(place, name)
