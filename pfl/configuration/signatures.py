"""Writes down what the parser knows about options and classes, for `pfl.configuration.light`.

The words about a wrong value are those of the parser itself: a parser of each type is given one
wrong value of each simple kind.
"""

from __future__ import annotations

import collections.abc
import contextlib
import inspect
import sys
import types
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser

from pfl._private import argument_types
from pfl.configuration import light
from pfl.configuration.keys import no_class
from pfl.configuration.messages import class_parser, classes_of, complaint, option_keys
from pfl.datamodules.ranges import limit_of

WRONG = ("wrong value", 123456789, 0.123456789, True)
LEAVES = (bool, float, int, str)
LISTS = (list, collections.abc.Sequence)


def learn(words: list[str], parser: ArgumentParser, known: list[str]) -> None:
    """Notes the options of a command and of the classes that the command line names.

    A command must not fail because of its notes: after an error they stay as they are.
    """
    with contextlib.suppress(Exception):
        notes = light.read_notes()
        if add(notes, words, parser, known):
            light.write_notes(notes)


def add(notes: dict[str, Any], words: list[str], parser: ArgumentParser, known: list[str]) -> bool:
    """Adds what a command line needs to the notes; returns whether they lacked anything."""
    if words[0] in notes["runs"] and not light.Check(notes, words).missing:
        return False
    notes["keys"] = list(option_keys())
    notes["runs"][words[0]] = {"options": _options(parser, notes), "known": known}
    while missing := light.Check(notes, words).missing:
        for path in missing:
            notes["classes"][path] = _class(path, notes)
    return True


def _class(path: str, notes: dict[str, Any]) -> dict[str, Any]:
    """Returns the notes about a class; empty for a path that leads to none."""
    module, _, name = path.rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    if not isinstance(cls, type) or inspect.isabstract(cls):
        return {}
    parser = class_parser(path)
    arguments = argument_types(parser)
    # Some of them need no value: then the parser decides once more than it has to.
    needed = [
        name
        for name, (hint, default) in arguments.items()
        if default is None and types.NoneType not in get_args(hint)
    ]
    bare = [p.name for p in inspect.signature(cls).parameters.values() if p.default is p.empty]
    return {
        "options": _options(parser, notes),
        "order": list(parser.get_defaults(skip_validation=True).keys()),
        "required": sorted({*needed, *bare} & arguments.keys()),
        "bases": [_path(base) for base in cls.__mro__],
        "fields": is_dataclass(cls),  # its options are given without class_path
    }


def _options(parser: ArgumentParser, notes: dict[str, Any]) -> dict[str, Any]:
    options = {}
    for name, (hint, default) in argument_types(parser).items():
        option: dict[str, Any] = {"type": str(hint)}
        if isinstance(default, LEAVES):
            option["default"] = default
        if option["type"] not in notes["types"]:
            kind = _kind(hint, notes["names"])
            refusals = _refusals(hint, "class" in str(kind))
            notes["types"][option["type"]] = {"of": kind, **refusals, **_range(hint)}
        options[name] = option
    return options


def _kind(hint: Any, names: dict[str, Any]) -> dict[str, Any]:
    """Returns a type as `Check` reads it; classes get the names of their subclasses."""
    if hasattr(hint, "__metadata__"):  # of `Annotated`
        return _kind(hint.__origin__, names)
    origin = get_origin(hint)
    members = get_args(hint)
    if origin in (Union, types.UnionType):
        return {"union": [_kind(member, names) for member in members]}
    if origin is Literal:
        return {"literal": list(members)}
    if origin in LISTS and len(members) == 1:
        return {"list": _kind(members[0], names)}
    if hint is types.NoneType:
        return {"null": True}
    if hint in LEAVES:
        return {"leaf": hint.__name__}
    if isinstance(hint, type) and hint.__module__.startswith(light.OURS):
        base = _path(hint)
        if base not in names:
            names[base] = _names(hint)
        return {"class": base}
    return {"other": str(hint)}


def _range(hint: Any) -> dict[str, Any]:
    """Returns the range of an argument that is one number, or null, as `Check` reads it."""
    limit = limit_of(hint)
    if limit is None or len(limit.ranges) != 1 or limit.choices or limit.others:
        return {}
    one = limit.ranges[0]
    return {"range": asdict(one), "float": not one.whole, "null": limit.null}


def _names(base: type) -> dict[str, str | None]:
    """Returns the classes by short names; None for a name of two, or of one that is abstract."""
    names: dict[str, str | None] = {}
    for cls in _subclasses(base):
        path = _path(cls)
        if "<locals>" in path:  # made while a run goes on
            continue
        if cls.__name__ in names or inspect.isabstract(cls) or "._" in path:
            names[cls.__name__] = None
        else:
            names[cls.__name__] = path
    return names


def _subclasses(base: type) -> Iterable[type]:
    found: dict[type, None] = {base: None}
    waiting: list[type] = [base]
    while waiting:
        below: list[type] = waiting.pop().__subclasses__()
        for cls in below:
            if cls not in found:
                found[cls] = None
                waiting.append(cls)
    return found


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _refusals(hint: Any, has_class: bool) -> dict[str, Any]:
    """Returns the parser's words about wrong values of a type, and the classes it proposes."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--x", type=hint)
    refusals: dict[str, Any] = {"must": {}}
    for value in WRONG:
        begin = f"x: {value}; "
        line = _refusal(parser, value)
        if line.startswith(begin):
            refusals["must"][type(value).__name__] = line.removeprefix(begin)
    proposals: list[list[str]] = []
    if has_class:
        proposals = [classes_of(str(hint)), []]
    for known in proposals:
        name = f"{[*known, 'A'][0]}q"
        line = f"x: {no_class(name, known)}"
        if line in (_refusal(parser, name), _refusal(parser, [name])):
            refusals["classes"] = known
            break
    return refusals


def _refusal(parser: ArgumentParser, value: Any) -> str:
    try:
        parser.parse_object({"x": value})
    except ArgumentError as error:
        return complaint(error)
    return ""
