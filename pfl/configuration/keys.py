"""The lines about keys, options and classes that do not exist, and what they should have been."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher, get_close_matches

from pfl.errors import in_list

_FEW = 30  # names that a line has room for
_ALIKE = 3  # names that have a word in common


def closest(name: str, known: Sequence[str]) -> str:
    """Returns the end of a message: the known names most like `name`, or all if they are few.

    Those that have `name` as a word, such as target_column and target_kind of `target`, or the one
    that is spelled most like it.
    """
    word = name.lower().removesuffix("s")
    alike = []
    for one in known:
        if word in [part.removesuffix("s") for part in re.split(r"\W|_", one.lower())]:
            alike.append(one)
    if 0 < len(alike) <= _ALIKE:
        return f"; did you mean {' or '.join(map(repr, alike))}?"

    def likeness(key: str) -> tuple[float, int, int]:
        # Of equals, the one that stands first.
        match = SequenceMatcher(a=key, b=name)
        return match.ratio(), match.find_longest_match().size, -known.index(key)

    if close := get_close_matches(name, known, n=5):
        best = max(close, key=likeness)
        return f"; did you mean {best!r}?"
    if 0 < len(known) <= _FEW:
        return f"; known are {', '.join(map(in_list, known))}"
    return ""


def unknown_key(key: str, known: Sequence[str], everywhere: Collection[str]) -> str:
    """Returns the line about a key that is not one of the `known` keys of a command.

    `everywhere` has the keys of all methods and data modules, too: `num_clients` is under `data`.
    """
    group, _, rest = key.partition(".")
    groups = sorted({name.partition(".")[0] for name in known})
    if group not in groups:  # what stands under it is not looked at
        homes = [name for name in everywhere if name.rpartition(".")[2] == key.replace("-", "_")]
        hint = closest(group, groups)
        if homes:
            hint = f"; did you mean {homes[0]!r}?"
        return f"{group}: there is no such key{hint}"
    inside = [name.removeprefix(f"{group}.") for name in known if name.startswith(f"{group}.")]
    return f"{key}: there is no such key{closest(rest, inside)}"


def no_option(owner: str, option: str, known: Sequence[str]) -> str:
    """Returns the words about an option that the class `owner` does not have."""
    named = ""
    if owner == "Classifier":
        named = "; class_path can name another network, such as MLP"
    return f"{owner} has no option {option!r}{closest(option, known)}{named}"


def no_class(name: str, known: Sequence[str]) -> str:
    """Returns the words about a class that does not exist; `known` are those that are expected."""
    hint = closest(name, known) or "; give its full import path"
    return f"there is no class {name!r} here{hint}"
