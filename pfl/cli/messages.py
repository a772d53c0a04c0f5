"""One clear line for a user's mistake, where the parser's own answer is a page."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Sequence
from textwrap import shorten
from types import ModuleType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import datamodules
import models
from pfl import algorithms, callbacks
from pfl.errors import ConfigError

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
    "Errors:",
    "Expected a <class 'NoneType'>",
    "Given value type:",
)
# Said of what is no file, no list or of another class, though something else may be wanted, too.
_WEAK = ("Expected a path but", "Expected a <class 'list'>", "Import path")
# Said by Python where class_path or init_args is null.
_NULL = r"'NoneType' object has no attribute 'keys'|argument of type 'NoneType' is not "
# What it says first of a wrong optimizer.
_FACTORY = r"^Type \S*Callable\[.*?\] expects a function or a callable class: "
_FEW = 20  # names that a line has room for


def one_line(error: Exception, known: Sequence[str] = ()) -> str:
    """The key, the value and what would be right, out of a jsonargparse error.

    Its message nests one block for each level of the configuration; the path of the keys and the
    innermost complaint are what a user needs.

    Args:
        known: All keys there are, for a guess at what an unknown one should have been.
    """
    keys: list[str] = []
    owner = complaint = weak = types = given = ""
    for line in str(error).splitlines():
        line = re.sub(_FACTORY, "", line.strip().removeprefix("- "))
        if match := re.search(r"\.? Got value: Namespace\(class_path='([^']+)'.*$", line):
            owner, line = match[1], line[: match.start()]
        if complaint and not line.startswith("Given value:"):
            continue  # other members of the same union
        if match := re.match(r'(?:Parser )?[kK]ey "([^"]+)":\s*(.*)', line):
            keys.append(match[1])
            line, types = match[2], ""
        elif match := re.match(r"Problem with given class_path '([^']+)':\s*(.*)", line):
            owner, line = match[1], match[2]
        if line.startswith("Subtypes:"):
            types = line.removeprefix("Subtypes:").strip()
        elif line.startswith("Given value:"):
            given = given or line.removeprefix("Given value:").strip()
        elif line.startswith(_WEAK):
            weak = line
        elif line and not line.startswith(_NOISE):
            complaint = line
    complaint = complaint or weak
    if match := re.search(
        r"does not accept option '([^']+)'|unrecognized arguments: --([^\s=]+)", complaint
    ):
        return _unknown_key(match[1] or match[2], known)
    if not complaint or complaint.startswith("Problems parsing"):
        return " ".join(str(error).split())
    where = ".".join(dict.fromkeys(keys))
    classes = _classes(_PACKAGES.get(where.rpartition(".")[2]), types)
    text = _explain(complaint, owner, types, classes, given)
    if not where and (match := re.match(r"Namespace\(class_path='[^']*?(\w+)'", given)):
        where = "" if re.match(r"[\w.]+: ", text) else match[1]  # a constructor's own words
    return f"{where}: {text}" if where and not text.startswith(where) else text


def explain(error: Exception) -> str | None:
    """A user's mistake in one line; None where the error is something else."""
    if isinstance(error, ConfigError | MisconfigurationException):
        return " ".join(str(error).split())
    wandb = sys.modules.get("wandb")  # slow to import, and most runs do without
    if wandb is not None and isinstance(error, wandb.errors.UsageError):  # nobody is logged in
        return (
            f"trainer.logger: {' '.join(str(error).split())} Without: --trainer.logger.offline true"
        )
    # What a constructor raises comes wrapped by the parser.
    if isinstance(error, ValueError) and str(error).startswith("Does not validate against"):
        return one_line(error)
    if isinstance(error, RuntimeError) and str(error).startswith("Early stopping conditioned on"):
        return f"trainer.callbacks: {' '.join(str(error).split())}"
    return None


def check_nulls(parser: ArgumentParser, config: Namespace, within: str = "") -> None:
    """Null, which the parser takes anywhere, must be among the values of what it is given for.

    Args:
        within: Where `config` stands.

    Raises:
        ConfigError: It is not.
    """
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if hint is None or action.dest.endswith(".help") or action.dest not in config:
            continue
        key, value = f"{within}{action.dest}", config[action.dest]
        if value is None and action.default is not None and not _takes_null(hint):
            raise ConfigError(f"{key}: null; it must be {_type(str(hint))}")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Namespace) and isinstance(item.get("init_args"), Namespace):
                check_nulls(_parser(item.class_path), item.init_args, f"{key}.")


def _takes_null(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(map(_takes_null, get_args(hint)))
    if get_origin(hint) is Literal:
        return None in get_args(hint)
    # The parser has a type of its own, of this name, for arguments without one.
    return hint in (None, type(None), Any) or str(hint) == "Untyped"


def _explain(complaint: str, owner: str, types: str, classes: list[str], given: str) -> str:
    value = shorten(given, 100)
    if complaint == "Option 'class_path' is not accepted":
        return f"{value}; options of a class belong under init_args, beside class_path"
    if match := re.match(r"Option '([^']+)' is not accepted", complaint):
        name = owner.rpartition(".")[2]
        return f"{name} has no option {match[1]!r}{_closest(match[1], _options(owner))}"
    if match := re.match(r"Expected '(\S+)' to be .*subclass of <class '(\S+)'>", complaint):
        return f"{match[1]}; it must be a subclass of {match[2].rpartition('.')[2]}"
    if match := re.match(r"Not a valid subclass of (\w+)", complaint):
        return f"{value}; it must name a class of kind {match[1]}{_closest('', classes)}"
    if re.search(_NULL, complaint):
        return f"{value}; class_path must name a class, and init_args hold options or be left out"
    if match := re.match(r"Expected a dot import path string: (\S+)", complaint):
        hint = _closest(match[1], classes) or "; give its full import path"
        return f"there is no class {match[1]!r} here{hint}"
    if match := re.match(r"Expected an instantiatable class, but (\S+) is abstract", complaint):
        name = match[1].rpartition(".")[2]
        return f"name a class first, {name} is abstract{_closest(name, classes)}"
    if match := re.match(r"Import path ?(\S*) does not correspond to a subclass of", complaint):
        return f"{match[1] or value}; it must be a subclass of {complaint.split()[-1]}"
    if match := re.match(r"Expected a (.+?)(?:\. Got value: (.*))?$", complaint):
        return f"{match[2] or value}; it must be {_type(types or match[1])}"
    return complaint


def _type(text: str) -> str:
    """Python's own words for a type, or a list of types, in a user's."""
    text = re.sub(r"<class '([^']+)'>", r"\1", text).replace("typing.", "")
    text = re.sub(r"(?:collections\.abc\.)?Sequence", "list", text).replace("NoneType", "null")
    if match := re.fullmatch(r"list\[Literal\[(.+)\]\]", text):
        return f"a list of {match[1]}"
    if "Literal[" in text:
        return f"one of {re.sub(r'Literal|[][]', '', text)}"
    text = text[1:-1] if text.startswith("[") else text
    return f"of type {re.sub(', (?=null$)', ' or ', text)}"


def _unknown_key(key: str, known: Sequence[str]) -> str:
    group, _, rest = key.partition(".")
    names = [name for name in known if not name.endswith("help")]
    groups = sorted({name.partition(".")[0] for name in names})
    if group not in groups:  # what stands under it is not looked at
        return f"{group}: there is no such key{_closest(group, groups)}"
    inside = [name.removeprefix(f"{group}.") for name in names if name.startswith(f"{group}.")]
    return f"{key}: there is no such key{_closest(rest, inside)}"


def _closest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known)}" if 0 < len(known) <= _FEW else ""


def _classes(package: ModuleType | None, types: str) -> list[str]:
    """The package's classes that are of one of these types, which are its base classes."""
    named = inspect.getmembers(package, inspect.isclass) if package else []
    return [
        name
        for name, cls in named
        if any(f"{base.__module__}.{base.__qualname__}" in types for base in cls.__mro__[1:])
    ]


def _options(owner: str) -> list[str]:
    """The arguments that the parser takes for a class, its bases' among them."""
    options = (action.dest for action in _parser(owner)._actions)
    return [name for name in options if not name.endswith("help")]


def _parser(owner: str) -> ArgumentParser:
    """A parser of the arguments of a class, given by its import path."""
    module, _, name = owner.rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    parser = ArgumentParser()
    if isinstance(cls, type):
        parser.add_class_arguments(cls, fail_untyped=False)
    return parser
