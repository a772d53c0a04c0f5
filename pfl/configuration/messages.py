"""Error messages in one line: the key, its value, and what would be right."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Sequence
from textwrap import shorten
from traceback import walk_tb
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import pfl
from pfl import algorithms, callbacks, datamodules, method, models
from pfl._private import set_types
from pfl.aggregation import attacks, robust
from pfl.configuration.keys import closest, no_class, no_option, unknown_key
from pfl.datamodules.ranges import limits
from pfl.errors import ConfigError, printable
from pfl.rounds.loop import FederatedLoop
from pfl.trainer import Trainer

# Lines of jsonargparse without a complaint, and complaints that count only if there is no other:
# the complaint about another member of the same union is more exact.
_NOISE = ("Does not validate against", "Errors:", "Expected a <class 'NoneType'>", "Given value")
_WEAK = ("Expected a path but", "Expected a <class 'list'>", "Import path")
_ADVICE = {  # where jsonargparse or Python name the cause, but not what to do
    r"Option 'class_path'|Not a valid subclass of \w+ \{.*'class_path'": (
        "options of a class belong under init_args, beside class_path"
    ),
    r"'\w+' object has no attribute 'keys'|argument of type '\w+' is not |unhashable type": (
        "class_path must name a class, and init_args hold options or be left out"
    ),
    r"Initializing zero-element|Trying to create tensor with negative dim": (
        "every size must be at least 1"
    ),
    r".*(can't allocate memory|Overflow when unpacking|too large)": (
        "a layer of these sizes needs more memory than there is"
    ),
}
# Before the complaint about a class that a function is expected to make, such as an optimizer.
_FACTORY = r"^Type \S*Callable\[.*?\] expects a function or a callable class: "
_UNKNOWN_KEY = (
    r"(?:Group '([^']+)' )?does not accept option '([^']+)'|unrecognized arguments: --([^\s=]+)"
)
# How jsonargparse shows values that it has parsed.
_INTERNAL = ("Namespace(", "[Namespace(", "NestedArg(", "[<")
_VARIABLE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def explain(error: BaseException) -> str | None:
    """Returns a mistake of the user as one line; None if the error is something else."""
    line = " ".join(str(error).split())
    if isinstance(error, ConfigError | MisconfigurationException):
        return line
    wandb = sys.modules.get("wandb")  # slow to import, and most runs do without
    if wandb is not None and isinstance(error, wandb.errors.UsageError):  # no user is logged in
        return f"trainer.logger: {line} Without: --trainer.logger.offline true"
    # jsonargparse wraps what a constructor raises.
    if isinstance(error, ValueError) and line.startswith("Does not validate against"):
        return complaint(error)
    if isinstance(error, RuntimeError) and line.startswith("Early stopping conditioned on"):
        return f"trainer.callbacks: {line}"
    if isinstance(error, ModuleNotFoundError) and _is_lightnings(error):
        return line
    return None


def _is_lightnings(error: BaseException) -> bool:
    """Returns whether Lightning has raised an error, such as one about a package that it lacks."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("lightning.")


def complaint(error: Exception, known: Sequence[str] = ()) -> str:
    """Returns a jsonargparse error as one line: the path of the keys and the innermost complaint.

    The original message nests one block for each level of the configuration. All keys that exist
    are `known`, for a guess at what an unknown one should have been.
    """
    keys: list[str] = []
    owner = words = weak = types = value = ""
    for line in str(error).splitlines():
        line = re.sub(_FACTORY, "", line.strip().removeprefix("- "))
        if match := re.search(r"\.? Got value: Namespace\(class_path='([^']+)'.*$", line):
            owner = match[1]
            line = line[: match.start()]
        if line.startswith("Given value:"):
            value = value or line.removeprefix("Given value:").strip()
        if words:
            continue  # other members of the same union
        if match := re.match(r'(?:Parser )?[kK]ey "([^"]+)":\s*(.*)', line):
            keys.append(match[1])
            line = match[2]
            types = ""
        elif match := re.match(r"Problem with given class_path '([^']+)':\s*(.*)", line):
            owner, line = match.groups()
        if line.startswith("Subtypes:"):
            types = line.removeprefix("Subtypes:").strip()
        elif line.startswith(_WEAK):
            weak = line
        elif line and not line.startswith(_NOISE):
            words = line
    words = words or weak
    if match := re.search(_UNKNOWN_KEY, words):
        return unknown_key(".".join(filter(None, match.groups())), known, option_keys())
    if not words:
        return " ".join(str(error).split())
    if match := re.match(r"(.*?)\. Got value: (.*)", words):
        words, value = match.groups()
    text = _describe(words, owner, types, value)
    where = ".".join(dict.fromkeys(keys))
    first = re.match(r"\[?Namespace\(class_path='[^']*?(\w+)'", value)
    own_words = re.match(r"[\w.]+: ", text)  # a constructor's
    if not where and first and not own_words and "), Namespace(class_path=" not in value:
        where = first[1]
    if where and not text.startswith(where):
        return f"{where}: {text}"
    return text


def check_nulls(parser: ArgumentParser, config: Namespace, within: str = "") -> None:
    """Checks every null, which jsonargparse accepts anywhere, against the type of its argument.

    The parsed arguments `config` belong to a command, or to a class at the path `within`.
    """
    try:
        parser.validate(config, skip_unset=False, skip_required=True)
    except TypeError as error:
        raise ConfigError(within + complaint(error).replace(": None;", ": null;")) from error
    for key in config.keys(branches=True):
        if ".init_args" in key:
            continue  # the recursion checks it
        values = config[key]
        if not isinstance(values, list):
            values = [values]
        for value in values:
            if isinstance(value, Namespace) and isinstance(value.get("init_args"), Namespace):
                _check_untyped(value, f"{within}{key}")
                check_nulls(class_parser(value.class_path), value.init_args, f"{within}{key}.")


def _check_untyped(config: Namespace, key: str) -> None:
    """Refuses an argument without type and default that was left out, which would become None."""
    cls = _named(config.class_path)
    if not isinstance(cls, type):
        return
    for p in inspect.signature(cls).parameters.values():
        bare = p.default is p.annotation is p.empty and p.kind not in _VARIABLE
        if bare and config.init_args.get(p.name, p) is None:
            name = config.class_path.rpartition(".")[2]
            raise ConfigError(f"{key}.{p.name}: null; {name} needs a value of it under init_args")


def _describe(words: str, owner: str, types: str, value: str) -> str:
    shown = ""
    if value and not value.startswith(_INTERNAL):
        shown = f"{shorten(value, 100)}; "
    if match := re.match(r"Option '((?!class_path')[^']+)' is not accepted", words):
        options = class_parser(owner).get_defaults(skip_validation=True).keys()
        return no_option(owner.rpartition(".")[2], match[1], list(options))
    dotted = r"(?:--(\S+)\.help: )?Expected a dot import path string: (\S+)"
    if match := re.match(dotted, words):
        known = classes_of(types) or option_keys().get(match[1]) or []
        name = match[2]
        if name in known:  # the argument of a user's class
            return f"{name!r}; annotate the argument with its class, or give the full import path"
        return no_class(name, known)
    if match := re.match(r"Expected a (.+)", words):
        text = _type(types[1:-1] or match[1])
        if ", " in text:
            text = f"one of {text}"
        if value in ("True", "False") and re.search(r"\bstr\b", text):
            text += "; YAML reads yes, no, on and off as true and false: write them in quotes"
        return f"{shown}it must be {text}"
    for cause, advice in _ADVICE.items():
        if re.match(cause, f"{words} {value}"):
            made = re.match(
                r"Namespace\(class_path='[^']*?(\w+)', init_args=Namespace\((.*)\)\)$", value
            )
            if made:
                return f"{made[1]}({made[2]}); {advice}"
            return shown + advice
    name = (owner or value).partition(".")[0]
    if name in ("models", "datamodules") and sys.modules.get(name) is not getattr(pfl, name):
        users = ""
        if file := getattr(sys.modules.get(name), "__file__", None):
            users = f"{name} is {file}, "
        return f"{shown}{words}; {users}pfl's own is pfl.{name}"
    if "is abstract" in words:
        return _abstract(value) or "the class is abstract" + closest("", classes_of(types))
    if "subclass of" in words:
        return shown + _type(words) + closest("", classes_of(types))
    match = re.match(r"the following arguments are required: (.+)", words)
    if match and owner:
        text = f"{owner.rpartition('.')[2]} needs {match[1]}"
        if owner.startswith("pfl.models."):
            text += "; pfl data, with the same configuration, shows the inputs and the classes"
        return text
    return shown + words


def _abstract(value: str) -> str | None:
    """Returns what a user's abstract class, given as a value, lacks; None for one of ours."""
    match = re.match(r"(?:\{'class_path': ')?([\w.]+)", value)
    if match is None:
        return None
    module, _, name = match[1].rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    lacks = getattr(cls, "__abstractmethods__", ())
    if not lacks or cls.__module__.startswith("pfl."):
        return None
    return f"{module}.{name}; it is abstract: write {', '.join(sorted(lacks))}"


def _type(text: str) -> str:
    """Returns Python's notation of a type, or of a list of types, in plain words."""
    text = re.sub(r"<class '([^']+)'>", r"\1", text)
    text = re.sub(r"\btyping\.Annotated\[(\w+), [^]]*\]", r"\1", text)
    text = re.sub(r"\b(?:collections\.abc|pfl\.[\w.]*)\.(?=[A-Z])", "", text)
    text = re.sub(r"\btyping\.|(?:typing\.)?Literal\[([^]]*)\]", r"\1", text)
    return text.replace("NoneType", "null").replace("Sequence", "list")


def option_keys() -> dict[str, list[str] | None]:
    """Returns the keys of `fit`, of all methods and of all data modules, with their choices."""
    kinds = (algorithms, method.FederatedAlgorithm), (datamodules, datamodules.FederatedDataModule)
    methods, data = (
        [cls for _, cls in inspect.getmembers(package, inspect.isclass) if issubclass(cls, base)]
        for package, base in kinds
    )
    of_all = method.FederatedAlgorithm.__mro__[:2]
    groups: dict[str, list[type]] = {"model": [*of_all, *methods], "data": data}
    groups |= {"trainer": [Trainer], "loop": [FederatedLoop]}
    keys = {f"{g}.{n}" for g, classes in groups.items() for c in classes for n in _parameters(c)}
    choices = {"model": [cls.__name__ for cls in methods], "data": [cls.__name__ for cls in data]}
    return dict.fromkeys([*sorted(keys), "config", "ckpt_path", "seed_everything"]) | choices


def _parameters(cls: type) -> list[str]:
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.kind not in _VARIABLE]


def classes_of(types: str) -> list[str]:
    """Returns the names of pfl's classes that are subclasses of one of these types."""
    # A method is a network, too.
    for package in (datamodules, models, callbacks, robust, attacks, algorithms):
        names = [
            name
            for name, cls in inspect.getmembers(package, inspect.isclass)
            if not inspect.isabstract(cls)
            and any(
                re.search(rf"\b{base.__module__}\.{base.__qualname__}\b", types)
                for base in cls.__mro__[1:]
            )
        ]
        if names:
            return names
    return []


def class_parser(owner: str) -> ArgumentParser:
    """Returns a parser of the arguments of a class or a function, given by its import path."""
    return _parser_of(_named(owner))


@functools.lru_cache
def _parser_of(cls: Any) -> ArgumentParser:
    """Returns the parser of a class or a function; the runs of a comparison share it."""
    parser = ArgumentParser()
    if isinstance(cls, type):
        parser.add_class_arguments(cls, fail_untyped=False)
        set_types(parser, {name: limit.annotation for name, limit in limits(cls).items()})
    elif callable(cls):  # such as models.replace_batch_norm
        parser.add_function_arguments(cls, fail_untyped=False)
    return parser


def _named(path: str) -> Any:
    """Returns a class or a function by its import path; None if its module is not imported."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def quiet() -> None:
    """Silences Lightning's remarks about the machine, and makes each warning one line."""
    warnings.formatwarning = lambda message, *_, **__: (
        f"warning: {printable(' '.join(str(message).split()))}\n"
    )
    warnings.filterwarnings("ignore", "Initializing zero-element")  # empty layers are refused
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
