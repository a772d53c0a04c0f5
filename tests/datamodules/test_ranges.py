"""Ranges in a signature: what a constructor refuses, and in which words."""

import copy
import gc
import math
import pickle
import weakref
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from datamodules import ConfigError
from pfl.datamodules.ranges import (
    BelowOne,
    Checked,
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    PositiveShare,
    ProperShare,
    Range,
    Share,
    TwoOrMore,
    limit_of,
    limits,
)
from tests.refusal import refused

FLOATS = {  # the type, values in the range, values outside of it, and its words
    "NonNegative": (NonNegative, [0, 0.5, 3], [-1e-9, -1], "at least 0"),
    "Positive": (Positive, [1e-9, 3, np.float32(0.5)], [0, 0.0, -1], "positive"),
    "Share": (Share, [0, 0.5, 1], [-1e-9, 1.001], "from 0 to 1"),
    "PositiveShare": (PositiveShare, [1e-9, 1], [0, 1.001], "positive and at most 1"),
    "BelowOne": (BelowOne, [0, 0.999], [-1e-9, 1], "at least 0 and below 1"),
    "ProperShare": (ProperShare, [1e-9, 0.999], [0, 1], "positive and below 1"),
    "above one": (Annotated[float, Range(above=1)], [1.001, 9], [1, 0], "above 1"),
    "any": (Annotated[float, Range()], [-9, 0, 1e300], [], "finite"),
}
WHOLE = {
    "Count": (Count, [1, 7, np.int64(7)], [0, -1, 2**63], "a whole number of at least 1"),
    "CountOrZero": (CountOrZero, [0, 7], [-1], "a whole number of at least 0"),
    "TwoOrMore": (TwoOrMore, [2, 7], [1], "a whole number of at least 2"),
    "levels": (
        Annotated[int, Range(least=1, most=9, whole=True)],
        [1, 9],
        [0, 10],
        "a whole number from 1 to 9",
    ),
}


@pytest.mark.parametrize("name", [*FLOATS, *WHOLE])
def test_a_type_allows_its_range_and_names_it(name):
    annotation, inside, outside, words = {**FLOATS, **WHOLE}[name]
    limit = limit_of(annotation)
    assert all(limit.allows(value) for value in inside)
    for value in outside:
        assert not limit.allows(value)
        assert limit.expected(value).startswith(words)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, True, np.True_, "1", [1]])
@pytest.mark.parametrize("name", [*FLOATS, *WHOLE])
def test_what_is_no_finite_number_is_outside_of_every_range(name, value):
    annotation = {**FLOATS, **WHOLE}[name][0]
    assert not limit_of(annotation).allows(value)


@pytest.mark.parametrize("value", [1.0, 1.5, np.float64(2.0)])
@pytest.mark.parametrize("name", WHOLE)
def test_a_fraction_is_no_whole_number(name, value):
    assert not limit_of(WHOLE[name][0]).allows(value)


WORDS = [  # the annotation, the value, what follows "it must be"
    (NonNegative, -1, "at least 0"),
    (NonNegative, math.nan, "at least 0 and finite"),
    (NonNegative, "x", "a number of at least 0"),
    (Positive, True, "a positive number"),
    (PositiveShare, "x", "a positive number of at most 1"),
    (Share, math.inf, "from 0 to 1"),
    (Count | None, 0, "a whole number of at least 1, or null"),
    (Count, 2**63, "a whole number of at least 1 and below 2**63"),
    (Positive | Literal["rule", "other"], 0, "a positive number or rule or other"),
    (Positive | Literal["rule"], math.inf, "a positive finite number or rule"),
    (Literal["I", "II"], "III", "I or II"),
    (Literal["I", "II"] | None, "III", "I or II, or null"),
]


@pytest.mark.parametrize(("annotation", "value", "words"), WORDS)
def test_a_value_is_refused_in_plain_words(annotation, value, words):
    limit = limit_of(annotation)
    with refused(f"some.key: {value!r}; it must be {words}"):
        limit.require("some.key", value)
    assert limit.expected(value) == words


def test_a_type_without_range_has_no_limit():
    for annotation in (float, int | None, str, Annotated[float, "words"], list[Count]):
        assert limit_of(annotation) is None


class Base(Checked):
    argument_group = "base"

    def __init__(self, rate: Positive = 0.1, *, steps: Count | None = None, **rest: Share):
        self.rate = rate
        self.steps = steps


class Middle(Base):
    def __init__(self, first: NonNegative, **kwargs: Any):
        super().__init__(**kwargs)
        self.first = first


class Faster(Middle):
    def __init__(self, first: NonNegative = 1.0, *, rate: float = 0.5, **kwargs: Any):
        super().__init__(first, rate=rate, **kwargs)


class Wider(Middle):
    def __init__(self, first: Annotated[float, Range(least=-1)] = 0.0, **kwargs: Any):
        super().__init__(abs(first), **kwargs)


class Closed(Base):
    """Takes no arguments of its base class."""

    def __init__(self, size: Count = 1):
        super().__init__()
        self.size = size


@dataclass(frozen=True)
class Settings(Checked):
    rate: Positive
    share: Share = 0.5
    kind: Literal["a", "b"] = "a"


OTHER: Any = "c"
REFUSED = [
    (lambda: Middle(-1), "base.first: -1; it must be at least 0"),
    (lambda: Middle(first=-1), "base.first: -1"),
    (lambda: Middle(0, rate=0), "base.rate: 0; it must be positive"),  # through **kwargs
    (lambda: Middle(0, steps=0), "base.steps: 0; it must be a whole number of at least 1, or null"),
    (lambda: Faster(rate=-1), "base.rate: -1; it must be positive"),  # another default alone
    (lambda: Wider(-2), "base.first: -2; it must be at least -1"),
    (lambda: Settings(0), "Settings.rate: 0; it must be positive"),
    (lambda: Settings(1, kind=OTHER), "Settings.kind: 'c'; it must be a or b"),
    (lambda: replace(Settings(1), share=2), "Settings.share: 2; it must be from 0 to 1"),
]


@pytest.mark.parametrize(("make", "line"), REFUSED)
def test_a_constructor_refuses_arguments_of_its_bases_too(make, line):
    with refused(line):
        make()


def test_a_subclass_may_widen_a_range():
    assert Wider(-1).first == 1


def test_limits_are_those_of_the_arguments_that_a_class_takes():
    assert limits(Closed).keys() == {"size"}
    assert limits(Faster).keys() == {"first", "rate", "steps"}
    assert str(limits(Settings)["share"].ranges[0]) == "from 0 to 1"


def test_a_wrong_call_stays_a_type_error():
    for call in (lambda: Middle(), lambda: Middle(1, 2), lambda: Closed(rate=-1)):
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize("made", [Faster(2.0, steps=3), Settings(0.1, kind="b")])
def test_copies_are_made_without_arguments(made):
    for copied in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), copy.copy(made)):
        assert vars(copied) == vars(made)


def test_an_annotation_that_only_type_checkers_can_read_is_left_alone():
    class Odd(Checked):
        def __init__(self, rate: Positive, other: "Unknown"):  # type: ignore[name-defined]  # noqa: F821
            self.rate = rate

    Odd(1.0, object())
    with pytest.raises(ConfigError, match="rate: 0"):
        Odd(0, object())


def test_a_class_that_nobody_has_any_more_is_gone():
    """A notebook that defines a method anew has one of that name, not two."""

    class Penalty(Checked):
        def __init__(self, weight: NonNegative = 0.0) -> None:
            self.weight = weight

    Penalty(0.5)
    gone = weakref.ref(Penalty)
    del Penalty
    gc.collect()
    assert gone() is None
