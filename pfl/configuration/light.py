"""A check of a configuration, and the help, without the seconds in which PyTorch is imported.

What the parser knows about options and classes is written down by `pfl.configuration.signatures`
while a command runs, for the classes that the command names, and holds until a file of pfl or an
installed package changes. `Check` reads a later command line by these notes. It answers only where
a command has mistakes and everything else of it is understood to be right. The parser would name
one of these mistakes, in the same words. In all other cases `Check` is silent, and the parser
decides.

It knows the keys, the options of pfl's classes, the values of simple types, and the ranges of the
numbers of the method and of the group `loop`. It does not know classes of the user, values with a
type of their own (functions, paths, dictionaries), conditions that a constructor checks, nor the
files of `pfl compare` and other commands that describe many runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml

from pfl.configuration.files import CONFIG, find_configs, read
from pfl.configuration.keys import no_class, no_option, unknown_key
from pfl.datamodules.files import new_content
from pfl.datamodules.ranges import Range

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pfl", "pfl/models", "pfl/datamodules")  # the search follows no links
LIBRARIES = ("torch", "lightning", "jsonargparse")
OURS = ("pfl.", "torch.", "torchmetrics.", "lightning.")  # whose classes are noted
COLORS = ("COLUMNS", "TERM", "NO_COLOR", "FORCE_COLOR", "PYTHON_COLORS")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")  # also 1e-3, a text in PyYAML
PLAIN = re.compile(r"[A-Za-z][\w.-]*( [\w.-]+)*$")  # a text that has no meaning in YAML
LEAVES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "float": (float, int),
    "int": (int,),
    "str": (str,),
}
# A folder that is read-only, no home, packages without a version, a file that is cut off.
NO_NOTES = (OSError, RuntimeError, ImportError, ValueError)
UNSURE = None  # whether a value is right: True, False, or UNSURE


# ---- notes ---------------------------------------------------------------------------------------


def notes_file() -> Path:
    """Returns the file of the notes that hold for pfl's files and the packages as they are.

    Its name ends with a digest of these; before it stands a digest of the folder of pfl's files.
    """
    place = hashlib.sha256(f"{sys.version} {ROOT}".encode())
    digest = place.copy()
    for name in PACKAGES:
        for path in sorted((ROOT / name).rglob("*.py")):
            stat = path.stat()
            digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode())
    for name in LIBRARIES:
        digest.update(version(name).encode())
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".dist-info"))
        digest.update(" ".join(names).encode())
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = f"options-{place.hexdigest()[:16]}-{digest.hexdigest()[:16]}.json"
    return Path(cache).expanduser() / "lightning-pfl" / name


def read_notes() -> dict[str, Any]:
    """Returns the notes; empty ones if there are none that can be read."""
    try:
        notes = json.loads(notes_file().read_text(encoding="utf-8"))
    except NO_NOTES:
        notes = {}
    return {"runs": {}, "classes": {}, "types": {}, "names": {}, "help": {}, **notes}


def write_notes(notes: dict[str, Any]) -> None:
    """Writes the notes, in place of older ones of the same folder of pfl's files.

    Does nothing in a folder that is read-only.
    """
    with contextlib.suppress(*NO_NOTES):
        path = notes_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_content(path) as file:
            file.write(json.dumps(notes).encode())
        place = path.name.rpartition("-")[0]
        for old in path.parent.glob(f"{place}-*.json"):
            if old != path:
                old.unlink(missing_ok=True)


# ---- help ----------------------------------------------------------------------------------------


def help_key(words: list[str]) -> str | None:
    """Returns the name of a help text; None for other commands and for classes of the user."""
    command, *rest = words
    option = " ".join(rest).replace("=", " ")
    if not re.match(r"(-h|--help|--[\w.]+\.help( \w+)?)$", option):
        return None
    look = [sys.stdout.isatty(), *map(os.environ.get, COLORS)]
    return json.dumps([command, option, shutil.get_terminal_size().columns, *look])


def read_help(words: list[str]) -> str | None:
    """Returns the help that a command shows, if it was shown before."""
    key = help_key(words)
    if key is None:
        return None
    return read_notes()["help"].get(key)


def keep_help(words: list[str], text: str) -> None:
    """Notes the help that a command has shown."""
    key = help_key(words)
    if key is not None:
        notes = read_notes()
        notes["help"][key] = text
        write_notes(notes)


# ---- check ---------------------------------------------------------------------------------------


class Check:
    """What the notes say about a command line `fit ...`.

    Attributes:
        missing: The paths of pfl's classes that the command names and the notes lack.
    """

    def __init__(self, notes: dict[str, Any], words: list[str]) -> None:
        self.notes = notes
        self.missing: set[str] = set()
        self._mistakes: list[str] = []
        self._unsure = False
        self._classes: dict[str, str] = {}  # by the key of an option: the class that is its value
        self._given: set[str] = set()  # keys that have a value
        self._misspelled: set[str] = set()  # keys of classes with an option that they do not have
        self._stranger = ""  # the last name that stands for no class
        run = notes["runs"].get(words[0])
        if run is None:
            self._unsure = True
            return
        self._options = run["options"]
        self._known = run["known"]
        for key, value in self._pairs(words[1:]):
            if key in CONFIG:
                self._file(Path(value))
            else:
                self._word(key, value)
        for key, path in self._classes.items():
            required = self._of_class(path).get("required", ())
            lacking = not {f"{key}.{name}" for name in required} <= self._given
            if lacking and key not in self._misspelled:  # else the parser says that first
                self._unsure = True
        if not {"model", "data"} <= self._given:
            self._unsure = True

    @property
    def lines(self) -> list[str]:
        """A line about each mistake, if everything else is right."""
        if self._unsure or self.missing:
            return []
        return self._mistakes

    def _pairs(self, words: list[str]) -> Iterator[tuple[str, str]]:
        """Yields options and their values."""
        rest = iter(words)
        for word in rest:
            key, equal, value = word.partition("=")
            if not equal:
                value = next(rest, "-")
            has_value = NUMBER.match(value) or (value and not value.startswith("-"))
            if not has_value or not re.match(r"--[\w.-]+\+?$|-c$", key) or key.endswith(".help"):
                self._unsure = True
                return
            yield key, value

    def _file(self, path: Path) -> None:
        if not path.is_file():  # text or an address
            self._unsure = True
            return
        for key, value in read(path).items():
            if not isinstance(key, str) or "." in key or key == "config":
                self._unsure = True
            elif key in ("trainer", "loop"):
                for name, inner in value.items():
                    self._top(f"{key}.{name}", inner)
            else:
                self._top(key, value)

    def _word(self, key: str, value: str) -> None:
        """Checks an option of the command line, such as `--model.network.hidden`."""
        key = key.removeprefix("--")
        append = key.endswith("+")
        path = key.removesuffix("+").replace(".init_args.", ".").removesuffix(".class_path")
        group, _, rest = path.partition(".")
        if group not in ("model", "data") or not rest:
            # The parser takes abbreviations, and options of what an option stands for.
            alike = [name for name in self._options if name != path and _begins(name, path)]
            if append and path in self._options and PLAIN.match(value):
                self._value(self._options[path], path, [value])
            elif append or alike:
                self._unsure = True
            else:
                self._top(path, value)
            return
        where = group
        *inner, last = rest.split(".")
        for name in inner:
            if name not in self._of_class(self._classes.get(where, "")).get("options", {}):
                self._unsure = True
                return
            where = f"{where}.{name}"
        if append or where not in self._classes:
            self._unsure = True
        else:
            self._option(self._classes[where], last, where, value)

    def _top(self, key: str, value: Any) -> None:
        """Checks a key that belongs to no class."""
        option = self._options.get(key)
        if option is not None:
            self._value(option, key, value)
        elif isinstance(_loaded(value), dict):
            self._unsure = True
        else:
            self._mistakes.append(unknown_key(key, self._known, self.notes["keys"]))

    def _option(self, path: str, name: str, where: str, value: Any) -> None:
        """Checks the value of an option of the class at `path`, which is the value of `where`."""
        known = self._of_class(path)
        if not known:
            self._unsure = True
        elif name in known["options"]:
            self._value(known["options"][name], f"{where}.{name}", value)
        elif isinstance(_loaded(value), dict) or not name.isidentifier():
            self._unsure = True
        else:
            words = no_option(path.rpartition(".")[2], name, known["order"])
            self._mistakes.append(f"{where}: {words}")
            self._misspelled.add(where)

    def _of_class(self, path: str) -> dict[str, Any]:
        """Returns the notes about a class; empty if there are none yet."""
        if path and path not in self.notes["classes"]:
            self.missing.add(path)
        return self.notes["classes"].get(path, {})

    def _value(self, option: dict[str, Any], key: str, value: Any) -> None:
        """Checks a value of an option; null has a check of its own, later."""
        self._given.add(key)
        default = option.get("default")
        if value is None or (value == default and type(value) is type(default)):
            return
        found = len(self._mistakes)
        self._stranger = ""
        loaded = _loaded(value)
        kind = self.notes["types"][option["type"]]
        right = self._right(kind["of"], key, loaded)
        if right is not True and loaded is not value:
            right = self._right(kind["of"], key, value) or right
        if right and "range" in kind:
            self._number(kind, key, loaded)
        if right or len(self._mistakes) > found:
            return
        if isinstance(value, str) and (
            str(loaded) != value
            or (isinstance(loaded, str) and not PLAIN.match(loaded))
            or Path(value).exists()
        ):
            right = UNSURE
        text = kind["must"].get(type(loaded).__name__)
        name = loaded
        if isinstance(loaded, dict | list):
            name = self._stranger
        if right is UNSURE:
            self._unsure = True
        elif text is not None:
            self._mistakes.append(f"{_where(key)}: {shorten(str(loaded), 100)}; {text}")
        elif "classes" in kind and isinstance(name, str) and PLAIN.match(name) and " " not in name:
            self._mistakes.append(f"{_where(key)}: {no_class(name, kind['classes'])}")
        else:
            self._unsure = True

    def _number(self, kind: dict[str, Any], key: str, value: Any) -> None:
        """Checks a number of the right type against the range of its argument."""
        if not isinstance(value, int | float):
            return
        if kind["float"]:
            value = float(value)
        one = Range(**kind["range"])
        if value in one:
            return
        group, _, name = key.partition(".")
        if group in ("model", "loop") and "." not in name:
            words = one.expected(value)
            if kind["null"]:
                words += ", or null"
            self._mistakes.append(f"{key}: {value!r}; it must be {words}")
        else:  # the line names the class, which is the value of another key
            self._unsure = True

    def _right(self, kind: dict[str, Any], key: str, value: Any) -> bool | None:
        """Returns whether a value is of a kind; what is wrong inside of a class is noted."""
        if "union" in kind:
            unsure = False
            for member in kind["union"]:
                right = self._right(member, key, value)
                if right:
                    return True
                unsure = unsure or right is UNSURE
            if unsure:
                return UNSURE
            return False
        if "leaf" in kind:
            types = LEAVES[kind["leaf"]]
            if isinstance(value, list | dict):
                return UNSURE
            return isinstance(value, types) and (bool in types or not isinstance(value, bool))
        if "literal" in kind:
            if isinstance(value, list | dict):
                return UNSURE
            return any(value == one and type(value) is type(one) for one in kind["literal"])
        if "list" in kind:
            if isinstance(value, list):
                answers = [self._right(kind["list"], key, _loaded(one)) for one in value]
                if "class" in kind["list"] and answers.count(False) == 1 and UNSURE not in answers:
                    return False
                return all(answers) or UNSURE
            if isinstance(value, dict):
                return UNSURE
            return False
        if "class" in kind:
            return self._class(kind["class"], key, value)
        if "null" in kind:
            return value is None
        return UNSURE

    def _class(self, base: str, key: str, value: Any) -> bool | None:
        """Returns whether a value describes an object of a class."""
        if isinstance(value, list):
            return False
        options = {}
        if isinstance(value, dict) and self._of_class(base).get("fields"):
            return self._object(base, key, value)
        if isinstance(value, dict):
            if not value.keys() <= {"class_path", "init_args"}:
                return UNSURE
            options = value.get("init_args", {})
            value = value.get("class_path")
        if not isinstance(value, str) or not isinstance(options, dict):
            return UNSURE
        names = self.notes["names"].get(base, {})
        path = names.get(value)
        if value.startswith(OURS) and base in self._of_class(value).get("bases", ()):
            path = value
        if path is None:
            if "." in value or value in names:
                return UNSURE
            self._stranger = value
            return False
        return self._object(path, key, options)

    def _object(self, path: str, key: str, options: dict[str, Any]) -> bool | None:
        """Checks the options of an object of the class at `path`, the value of `key`."""
        self._classes[key] = path
        if not self._of_class(path):
            return UNSURE
        for name, inner in options.items():
            self._option(path, str(name), key, inner)
        return True


def _begins(name: str, path: str) -> bool:
    """Returns whether a path on the command line may mean an option `name`, or a part of it."""
    return name.startswith(path) or path.startswith(f"{name}.")


def _loaded(value: Any) -> Any:
    """Returns what a text stands for, as the parser reads it."""
    if not isinstance(value, str):
        return value
    if NUMBER.match(value) and re.search("[eE.]", value):
        return float(value)
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _where(key: str) -> str:
    """Returns a key as messages have it."""
    return ".".join(dict.fromkeys(key.split(".")))


def check(words: list[str]) -> list[str]:
    """Returns a line about each mistake in a command such as `fit --config quickstart`.

    A mistake in a file that names no option, such as a missing file, is a ConfigError.
    """
    return Check(read_notes(), find_configs(words)).lines
