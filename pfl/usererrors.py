"""One clear line for a user's mistake, where the parser's own answer is a page."""

from __future__ import annotations

import difflib
import inspect
import re

import datamodules
import models
from pfl import algorithms

_NOISE = (
    "Does not validate against",
    "Subtypes:",
    "Errors:",
    "- Expected a <class 'NoneType'>",
    "Given value",
)


def one_line(error: Exception) -> str:
    """The key, the value and what would be right, out of a jsonargparse error.

    Its message nests one block for each level of the configuration; the path of the keys and the
    innermost complaint are what a user needs.
    """
    keys: list[str] = []
    classes: list[str] = []
    complaints: list[str] = []
    for line in str(error).splitlines():
        line = line.strip()
        if match := re.match(r'(?:- )?(?:Parser )?[kK]ey "([^"]+)":\s*(.*)', line):
            keys.append(match[1])
            line = match[2]
        elif match := re.match(r"(?:- )?Problem with given class_path '([^']+)':\s*(.*)", line):
            classes.append(match[1].rpartition(".")[2])
            line = match[2]
        if line and not line.startswith(_NOISE):
            complaints.append(line.removeprefix("- "))
    if not complaints:
        return " ".join(str(error).split())
    where = ".".join(dict.fromkeys(keys))
    text = _explain(complaints[0], classes[-1] if classes else "")
    return f"{where}: {text}" if where and not text.startswith(where) else text


def _explain(complaint: str, owner: str) -> str:
    if match := re.match(r"Option '([^']+)' is not accepted", complaint):
        return f"{owner} has no option {match[1]!r}{_closest(match[1], _options(owner))}"
    if match := re.match(r"Expected a dot import path string: (\S+)", complaint):
        return f"there is no class {match[1]!r}{_closest(match[1], _classes())}"
    return complaint


def _closest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def _classes() -> list[str]:
    return [n for package in (algorithms, datamodules, models) for n in package.__all__]


def _options(owner: str) -> list[str]:
    packages = (algorithms, datamodules, models)
    cls = next((getattr(p, owner) for p in packages if hasattr(p, owner)), None)
    names = [
        name
        for base in (inspect.getmro(cls) if cls else ())
        if "__init__" in vars(base) and base.__module__.split(".")[0] in ("pfl", "datamodules", "models")
        for name, parameter in inspect.signature(base).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    return list(dict.fromkeys(names))
