"""Errors in a user's own code: one line that names the file, the line and the exception."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from pfl.configuration.messages import explain

ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / name) for name in ("pfl", "models", "datamodules"))
LIBRARY = sysconfig.get_path("stdlib")


def mistake(error: Exception) -> str | None:
    """Returns one line about an error that a user can mend; None if it is the framework's own."""
    line = explain(error)
    return _failure(error) if line is None else line + _cause(error)


def _failure(error: Exception) -> str | None:
    """Returns what of a user's code failed, and where, if the framework was calling such code."""
    frames = _frames(error)
    ours = [place for place, (code, _) in enumerate(frames) if code.co_filename.startswith(OURS)]
    called = [frame for frame in frames[min(ours, default=len(frames)) :] if _is_users(frame)]
    if not called:
        return None
    (entry, _), (code, line) = called[0], called[-1]
    function = getattr(entry, "co_qualname", entry.co_name)  # since Python 3.11
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return f"{code.co_filename}:{line}: {function} failed: {text} (--traceback shows everything)"


def _cause(error: BaseException) -> str:
    """Returns the end of a message about a mistake: the error of a user's code that led to it."""
    while (inner := error.__cause__ or error.__context__) is not None:
        frames = _frames(inner)
        own = [frame for frame in frames if _is_users(frame)]
        if own and not _is_users(frames[0]):
            code, line = own[-1]
            place = f"{code.co_filename}:{line}"
            return f" ({type(inner).__name__} at {place}; --traceback shows everything)"
        error = inner
    return ""


def _frames(error: BaseException) -> list:
    """Returns the code and the line of each frame, the outermost first."""
    return [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def _is_users(frame: tuple) -> bool:
    path = frame[0].co_filename
    # Packages may be those of another environment, on which this one builds.
    installed = {"site-packages", "dist-packages"} & {*Path(path).parts}
    return not (installed or path.startswith((*OURS, LIBRARY, "<")))
