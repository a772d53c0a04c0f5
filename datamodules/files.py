"""Files that change as a whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path


@contextmanager
def new_content(path: Path) -> Iterator[BufferedWriter]:
    """Opens a new file that takes the place of `path` when the block ends without an error."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
