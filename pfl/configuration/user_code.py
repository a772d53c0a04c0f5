"""Errors in a user's own code: one line that names the file, the line and the exception."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import CodeType

from pfl.configuration.messages import explain

OURS = str(Path(__file__).parents[1])
LIBRARY = sysconfig.get_path("stdlib")
WRONG_ARGUMENTS = re.compile(r"([\w.]+)\(\) (?:takes|missing|got) ")


def mistake(error: BaseException) -> str | None:
    """Returns one line about an error that a user can mend; None if it is the framework's own."""
    line = explain(error)
    if line is None:
        return _failure(error)
    return line + _cause(error)


def _failure(error: BaseException) -> str | None:
    """Returns what of a user's code failed, and where, if the framework was calling such code."""
    frames = _frames(error)
    ours = [place for place, (code, _) in enumerate(frames) if code.co_filename.startswith(OURS)]
    called = [frame for frame in frames[min(ours, default=len(frames)) :] if _is_users(frame)]
    if not called:
        # Perhaps the constructor of an object that lacks what its base class would have set.
        made = getattr(type(getattr(error, "obj", None)), "__init__", None)
        code = _wrong_arguments(error) or getattr(made, "__code__", None)
        if code is None or not _is_users((code, 0)):
            return None
        called = [(code, code.co_firstlineno)]
    entry, _ = called[0]
    code, line = called[-1]
    function = getattr(entry, "co_qualname", entry.co_name)  # since Python 3.11
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return f"{code.co_filename}:{line}: {function} failed: {text} (--traceback shows everything)"


def _wrong_arguments(error: BaseException) -> CodeType | None:
    """Returns the user's function that was called with other arguments than it takes, if any."""
    match = WRONG_ARGUMENTS.match(str(error))
    if match is None or not isinstance(error, TypeError):
        return None
    for module in list(sys.modules.values()):
        try:
            code = inspect.unwrap(attrgetter(match[1])(module)).__code__
        except Exception:  # whatever a module leads to that answers for any name
            continue
        if isinstance(code, CodeType) and _is_users((code, 0)):
            return code
    return None


def _cause(error: BaseException) -> str:
    """Returns the end of a message about a mistake: the error of a user's code that led to it."""
    for inner in _inner(error):
        frames = _frames(inner)
        own = [f"{code.co_filename}:{line}" for code, line in frames if _is_users((code, line))]
        if own and not _is_users(frames[0]):
            return f" ({type(inner).__name__} at {own[-1]}; --traceback shows everything)"
    return ""


def _inner(error: BaseException) -> Iterator[BaseException]:
    """Yields what led to an error; jsonargparse links only the first error of a union's members."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    causes = []
    if linked := error.__cause__ or error.__context__:
        causes = [linked]
    if frames and isinstance(members := frames[-1].f_locals.get("exceptions"), list):
        causes = members
    for inner in causes:
        yield inner
        yield from _inner(inner)


def _frames(error: BaseException) -> list:
    """Returns the code and the line of each frame, the outermost first."""
    return [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def _is_users(frame: tuple) -> bool:
    path = frame[0].co_filename
    # Packages may belong to another environment, on which this one builds.
    installed = {"site-packages", "dist-packages"} & {*Path(path).parts}
    known = path.startswith((OURS, LIBRARY)) or not Path(path).is_absolute()  # "<string>", Cython
    return not (installed or known)
