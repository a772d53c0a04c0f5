"""One clear line for a user's mistake, where the parser's own answer is a page."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence
from types import ModuleType

import datamodules
import models
from pfl import algorithms, callbacks

# Where to look for what belongs under a key of the configuration.
_PACKAGES: dict[str, ModuleType] = {
    "model": algorithms,
    "network": models,
    "loss": models,
    "data": datamodules,
    "partition": datamodules,
    "protocol": datamodules,
    "callbacks": callbacks,
}
_NOISE = (
    "Does not validate against",
    "Subtypes:",
    "Errors:",
    "Expected a <class 'NoneType'>",
    "Given value type:",
)


def one_line(error: Exception, known: Sequence[str] = ()) -> str:
    """The key, the value and what would be right, out of a jsonargparse error.

    Its message nests one block for each level of the configuration; the path of the keys and the
    innermost complaint are what a user needs.

    Args:
        known: All keys there are, for a guess at what an unknown one should have been.
    """
    keys: list[str] = []
    owner, complaint, given = "", "", ""
    for line in str(error).splitlines():
        line = line.strip().removeprefix("- ")
        if match := re.match(r'(?:Parser )?[kK]ey "([^"]+)":\s*(.*)', line):
            keys.append(match[1])
            line = match[2]
        elif match := re.match(r"Problem with given class_path '([^']+)':\s*(.*)", line):
            owner = match[1].rpartition(".")[2]
            line = match[2]
        if line.startswith("Given value:"):
            given = given or line.removeprefix("Given value:").strip()
        elif line and not line.startswith(_NOISE):
            complaint = complaint or line
    if match := re.search(
        r"does not accept option '([^']+)'|unrecognized arguments: --(\S+)", complaint
    ):
        key = match[1] or match[2]
        return f"{key}: there is no such key{_closest(key, list(known))}"
    if not complaint or complaint.startswith("Problems parsing"):
        return " ".join(str(error).split())
    where = ".".join(dict.fromkeys(keys))
    text = _explain(complaint, owner, _PACKAGES.get(where.rpartition(".")[2]), given)
    return f"{where}: {text}" if where and not text.startswith(where) else text


def _explain(complaint: str, owner: str, package: ModuleType | None, given: str) -> str:
    if match := re.match(r"Option '([^']+)' is not accepted", complaint):
        return f"{owner} has no option {match[1]!r}{_closest(match[1], _options(owner))}"
    if match := re.match(r"Expected a dot import path string: (\S+)", complaint):
        return f"there is no class {match[1]!r}{_closest(match[1], _classes(package))}"
    if match := re.match(r"Expected a (.+?)(?:\. Got value: (.*))?$", complaint):
        wanted = re.sub(r"<class '([^']+)'>|typing\.Literal", r"\1", match[1]).strip()
        return f"{match[2] or given}; it must be of type {wanted}".replace("type [", "[")
    return complaint


def _closest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known)}" if known else "; give its full import path"


def _classes(package: ModuleType | None) -> list[str]:
    return list(package.__all__) if package else []


def _options(owner: str) -> list[str]:
    """The constructor's arguments of one of our classes, its bases' among them."""
    cls = next((getattr(p, owner) for p in _PACKAGES.values() if hasattr(p, owner)), object)
    names = [n for base in inspect.getmro(cls) for n in inspect.signature(base).parameters]
    return [n for n in dict.fromkeys(names) if n not in ("args", "kwargs", "self")]
