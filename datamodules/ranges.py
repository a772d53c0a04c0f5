"""The range of an argument, which stands once, in the signature: `penalty: NonNegative = 0.1`.

A class derives from `Checked`. Its constructor then refuses a value outside of the range in one
line, and whoever reads signatures (the command line's help, the search spaces of `pfl tune`, the
site) finds the range there by `limits`. A condition that two arguments meet together, or that
depends on data, stays a call of `require_value` in the constructor.
"""

import inspect
import math
import numbers
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from typing_extensions import Self

from pfl.datamodules.errors import require_value


@dataclass(frozen=True, repr=False)
class Range:
    """The numbers that an argument may have; its text continues the words "it must be".

    Args:
        least: The smallest number.
        above: A number below all of them.
        most: The largest number.
        below: A number above all of them.
        whole: Whether only whole numbers are meant. Others are finite.

    Example:
        >>> Range(least=0)
        at least 0
        >>> Range(above=0, most=1)
        positive and at most 1
        >>> 0.5 in Range(least=0, most=1), float("nan") in Range(least=0), True in Range(least=0)
        (True, False, False)
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    whole: bool = False

    def __repr__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"from {_text(self.least)} to {_text(self.most)}"
        words = []
        if self.least is not None:
            words.append(f"at least {_text(self.least)}")
        if self.above == 0:
            words.append("positive")
        elif self.above is not None:
            words.append(f"above {_text(self.above)}")
        if self.most is not None:
            words.append(f"at most {_text(self.most)}")
        if self.below is not None:
            words.append(f"below {_text(self.below)}")
        return " and ".join(words) or "finite"

    def __contains__(self, value: object) -> bool:
        if not self._is_number(value):
            return False
        number: Any = value
        if self.whole:
            finite = number < 2**63  # for int64
        else:
            finite = math.isfinite(number)
        return (
            finite
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    def expected(self, value: object = None, beside: bool = False) -> str:
        """Returns the words that continue "it must be".

        Args:
            value: The value that is refused.
            beside: Whether the words about something else than a number follow.

        Example:
            >>> Range(least=1, whole=True).expected(0)
            'a whole number of at least 1'
            >>> Range(above=0).expected(float("inf"))
            'positive and finite'
            >>> Range(above=0, most=1).expected("many")
            'a positive number of at most 1'
        """
        number: Any = value
        if self.whole:
            words = self._noun("whole number")
            if self._is_number(value) and number >= 2**63 and self.most is None:
                words += " and below 2**63"
            return words
        open_ended = self.most is None and self.below is None
        infinite = self._is_number(value) and open_ended and not math.isfinite(number)
        if beside and infinite:
            return self._noun("finite number")
        if beside or not self._is_number(value):
            return self._noun("number")
        if infinite:
            return f"{self} and finite"
        return repr(self)

    def _noun(self, noun: str) -> str:
        """Returns the words with what they are said of, as in "a positive number"."""
        words = repr(self)
        if words.startswith(("positive", "finite")):
            words = words.replace(" and at most", " of at most").replace(" and below", " below")
            first, _, rest = words.partition(" ")
            return f"a {first} {noun} {rest}".rstrip()
        if words.startswith("at "):
            words = f"of {words}"
        return f"a {noun} {words}"

    def _is_number(self, value: object) -> bool:
        kind: type = numbers.Real
        if self.whole:
            kind = numbers.Integral
        return isinstance(value, kind) and not isinstance(value, bool)


R = TypeVar("R")

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PLAIN = (int, float, types.NoneType, inspect.Parameter.empty)

NonNegative = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(least=0, most=1)]
PositiveShare = Annotated[float, Range(above=0, most=1)]
BelowOne = Annotated[float, Range(least=0, below=1)]
ProperShare = Annotated[float, Range(above=0, below=1)]
Count = Annotated[int, Range(least=1, whole=True)]
CountOrZero = Annotated[int, Range(least=0, whole=True)]
TwoOrMore = Annotated[int, Range(least=2, whole=True)]


def as_int(value: int | None) -> int | None:
    """Returns a whole number, such as one of NumPy, as an `int`; None stays None."""
    if value is None:
        return None
    return int(value)


@dataclass(frozen=True)
class Limit:
    """What an annotation allows: numbers of a range, names, null, and objects of other types.

    Attributes:
        annotation: The annotation.
        ranges: The ranges of numbers.
        choices: The values of a `Literal`.
        null: Whether None is allowed.
        others: The other types.
    """

    annotation: Any
    ranges: tuple[Range, ...]
    choices: tuple[object, ...]
    null: bool
    others: tuple[type, ...]

    def allows(self, value: object) -> bool:
        """Returns whether an argument may have a value."""
        if value is None:
            return self.null
        if any(type(value) is type(choice) and value == choice for choice in self.choices):
            return True
        return any(value in one for one in self.ranges) or isinstance(value, self.others)

    def expected(self, value: object) -> str:
        """Returns the words that continue "it must be", for a value that is refused."""
        names = [str(choice) for choice in self.choices]
        if len(names) > 3:
            names = [f"one of {', '.join(names)}"]
        text = " or ".join([*(one.expected(value, bool(names)) for one in self.ranges), *names])
        if self.null:
            text += ", or null"
        return text

    def require(self, key: str, value: object) -> None:
        """Raises a ConfigError about the argument `key` unless it may have the value."""
        if not self.allows(value):
            require_value(key, value, False, self.expected(value))


def limit_of(annotation: Any) -> Limit | None:
    """Returns what an annotation allows; None if it has neither a range nor choices.

    Example:
        >>> limit_of(Count | None).expected(0)
        'a whole number of at least 1, or null'
    """
    ranges: list[Range] = []
    choices: list[object] = []
    others: list[type] = []
    null = False
    for member in _members(annotation):
        found = [one for one in getattr(member, "__metadata__", ()) if isinstance(one, Range)]
        if found:
            ranges += found
        elif get_origin(member) is Literal:
            choices += get_args(member)
        elif member in (None, types.NoneType):
            null = True
        else:
            others.append(_class_of(member))
    if not ranges and not choices:
        return None
    return Limit(annotation, tuple(ranges), tuple(choices), null, tuple(others))


def _kept_with_the_class(find: Callable[[type], R]) -> Callable[[type], R]:
    """Has a function keep what it finds out about a class as an attribute of the class.

    A table of classes would keep those alive that a notebook has defined anew, and the command line
    would find two of one name.
    """
    place = f"_ranges{find.__name__}"

    @wraps(find)
    def found(cls: type) -> R:
        if place not in vars(cls):
            setattr(cls, place, find(cls))
        return vars(cls)[place]

    return found


def limits(cls: type) -> dict[str, Limit]:
    """Returns the limits of the arguments that the constructor of a class takes, by their names.

    The constructor of a base class says the limit of what a class passes on as `**kwargs`, and of
    an argument whose default alone the class changes (`lr: float = 0.005`).
    """
    return _limits(cls)


@_kept_with_the_class
def _limits(cls: type) -> dict[str, Limit]:
    found: dict[str, Limit | None] = {}
    for parameters, names in _constructors(cls):
        for name, parameter in parameters.items():
            annotation = _evaluated(parameter.annotation, names)
            if name not in found and not _is_plain_number(annotation):
                found[name] = limit_of(annotation)
    return {name: limit for name, limit in found.items() if limit is not None}


def check_arguments(cls: type, key: Callable[[str], str], args: Any, kwargs: Any) -> None:
    """Refuses arguments of a constructor that are outside of their ranges.

    Args:
        cls: The class.
        key: Returns what messages call an argument.
        args: The arguments that are given by position.
        kwargs: The arguments that are given by name.
    """
    known = limits(cls)
    given = {**dict(zip(_positions(cls), args, strict=False)), **kwargs}
    for name, value in given.items():
        if name in known:
            known[name].require(key(name), value)


class Checked:
    """The base of classes whose constructor refuses arguments outside of their ranges.

    Example:
        >>> from pfl.datamodules import ConfigError
        >>> class Penalty(Checked):
        ...     def __init__(self, weight: NonNegative, steps: Count | None = None) -> None:
        ...         self.weight = weight
        >>> Penalty(0.5).weight
        0.5
        >>> try:
        ...     Penalty(-1)
        ... except ConfigError as error:
        ...     print(error)
        Penalty.weight: -1; it must be at least 0
    """

    argument_group: ClassVar[str] = ""
    """What stands before an argument's name in messages; empty: the name of the class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_arguments(cls, cls.argument_key, args, kwargs)
        return super().__new__(cls)

    @classmethod
    def argument_key(cls, name: str) -> str:
        """Returns what messages call an argument: `Dirichlet.alpha`."""
        return f"{cls.argument_group or cls.__name__}.{name}"


@_kept_with_the_class
def _constructors(cls: type) -> list[tuple[dict[str, inspect.Parameter], dict[str, Any]]]:
    """Returns the arguments of each constructor of a class and its bases, and its module's names.

    Without the arguments that a call of the class cannot give.
    """
    found = []
    passes_on = True  # whether `**kwargs` takes arguments that have not been named so far
    accepted: set[str] = set()
    for base in cls.__mro__:
        constructor = vars(base).get("__init__")
        if not inspect.isfunction(constructor):
            continue
        parameters = dict(inspect.signature(constructor).parameters)
        del parameters[next(iter(parameters))]  # self
        named = {name: one for name, one in parameters.items() if one.kind not in _VARIABLE}
        if passes_on:
            accepted |= named.keys()
        named = {name: one for name, one in named.items() if name in accepted}
        found.append((named, inspect.unwrap(constructor).__globals__))
        passes_on &= any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return found


@_kept_with_the_class
def _positions(cls: type) -> list[str]:
    """Returns the names of the arguments that may be given by position."""
    for parameters, _ in _constructors(cls):
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [name for name, one in parameters.items() if one.kind in kinds]
    return []


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    """Returns an annotation that was written down as a text; Any if it cannot be evaluated."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)
    except (NameError, AttributeError, TypeError):  # a name that only type checkers import
        return Any


def _members(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the one type that an annotation is."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _is_plain_number(annotation: Any) -> bool:
    """Returns whether an annotation says no more than that a number is meant, if anything."""
    return all(member in _PLAIN for member in _members(annotation))


def _class_of(hint: Any) -> type:
    """Returns the class of a type hint; `object` if a value cannot be compared with it."""
    kind = get_origin(hint) or hint
    try:
        isinstance(None, kind)
    except TypeError:
        return object
    if kind is float:
        return numbers.Real
    return kind


def _text(number: float) -> str:
    """Returns a number as a user writes it."""
    return f"{number:g}".replace("e+", "e")
