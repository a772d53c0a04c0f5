"""The engines that there are, in the order in which they are tried.

A new engine is a class and an entry here. Folders beside this file make entries of their own when
they are imported, and so may a user:

    register(Mine)                              for --model.engine mine, its name
    register(Mine, "auto", before="vmap")       "auto" tries it before vmap
"""

from __future__ import annotations

import pkgutil
from typing import NamedTuple

from pfl.engines.base import Engine, EngineName
from pfl.engines.debug import DebugEngine
from pfl.engines.matrix_convolution import MatrixVmapEngine
from pfl.engines.probe import first_line
from pfl.engines.sequential import SequentialEngine
from pfl.engines.shared_body import SharedBodyEngine
from pfl.engines.unrolled import ChannelsLastEngine, UnrolledEngine
from pfl.engines.vmap import VmapEngine
from pfl.errors import ConfigError


class Entry(NamedTuple):
    """An engine, and what a user asks for to get it: values of `model.engine`.

    Engines for which nobody can ask are those whose steps alone are recorded.
    """

    engine: type[Engine]
    asked: tuple[EngineName, ...]


_entries = [
    Entry(SharedBodyEngine, ("auto",)),
    Entry(VmapEngine, ("auto", "vmap")),
    Entry(MatrixVmapEngine, ()),
    Entry(UnrolledEngine, ()),
    Entry(ChannelsLastEngine, ()),
    Entry(SequentialEngine, ("auto", "sequential")),
    Entry(DebugEngine, ("debug",)),
]


def register(engine: type[Engine], *asked: EngineName, before: str = SequentialEngine.name) -> None:
    """Adds an engine.

    Args:
        engine: Its class.
        asked: The values of `model.engine` for which it is tried; none given: its name.
        before: The name of the engine before which it is tried. Nothing comes after "sequential",
            which runs every network.
    """
    names = [entry.engine.name for entry in _entries]
    _entries.insert(names.index(before), Entry(engine, asked or (engine.name,)))


def all_engines() -> list[type[Engine]]:
    """Returns the classes of all engines, in order."""
    return [entry.engine for entry in _entries]


def engines_for(asked: EngineName) -> list[type[Engine]]:
    """Returns the classes of the engines that are tried for a value of `model.engine`, in order.

    Raises:
        ConfigError: It is neither known nor the path of a class.
    """
    found = [entry.engine for entry in _entries if asked in entry.asked]
    if found:
        return found
    fault = "is unknown"
    engine = None
    if "." in asked:
        try:
            engine = pkgutil.resolve_name(asked)
            fault = "is no class of engines"
        except (ImportError, AttributeError, ValueError) as error:
            fault = f"cannot be imported ({first_line(error)})"
    if isinstance(engine, type) and issubclass(engine, Engine):
        return [engine]
    names = ", ".join(dict.fromkeys(name for entry in _entries for name in entry.asked))
    raise ConfigError(
        f"model.engine: {asked!r} {fault}; choose one of {names}, or give the path of a class that "
        f"derives from pfl.engines.Engine, as in mine.Fast"
    )
