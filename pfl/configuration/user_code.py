"""Errors in a user's own code: one line that names the file, the line and the exception."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / name) for name in ("pfl", "models", "datamodules"))
INSTALLED = tuple({sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")})


def where(error: BaseException) -> str | None:
    """Returns in one line where a user's code failed that this framework called.

    Args:
        error: What was raised.

    Returns:
        The place, the function and the exception; None if no code of a user was being called, so
        that the error is the framework's own.
    """
    frames = _frames(error.__traceback__)
    calls = [(name, line) for number, (name, line) in enumerate(frames) if _is_call(frames, number)]
    if not calls:
        return None
    entry, own = calls[0][0], [f for f in frames if _is_users(f[0].co_filename)]
    code, line = own[-1]
    function = getattr(entry, "co_qualname", entry.co_name)
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return f"{code.co_filename}:{line}: {function} failed: {text} (--traceback shows everything)"


def cause(error: BaseException) -> str:
    """Returns the end of a message about a mistake that an error in a user's code led to.

    Args:
        error: The mistake; Python keeps what led to it.

    Returns:
        The exception, the file and the line, or nothing if no code of a user was involved.
    """
    inner = error.__cause__ or error.__context__
    while inner is not None:
        frames = _frames(inner.__traceback__)
        own = [(code, line) for code, line in frames if _is_users(code.co_filename)]
        if own and not _is_users(frames[0][0].co_filename):
            code, line = own[-1]
            where = f"{code.co_filename}:{line}"
            return f" ({type(inner).__name__} at {where}; --traceback shows everything)"
        inner = inner.__cause__ or inner.__context__
    return ""


def _frames(trace: TracebackType | None) -> list:
    """Returns the code and the line of each frame, the outermost first."""
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    return frames


def _is_call(frames: list, number: int) -> bool:
    """Returns whether a frame is a user's, below one of the framework."""
    above = any(frame[0].co_filename.startswith(OURS) for frame in frames[:number])
    return above and _is_users(frames[number][0].co_filename)


def _is_users(filename: str) -> bool:
    return not filename.startswith((*OURS, *INSTALLED, "<"))
