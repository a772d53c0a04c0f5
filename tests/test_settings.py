"""The settings of all classes of the project: what their signatures say holds."""

import inspect

import pytest

import datamodules
import pfl.algorithms
import pfl.stages.compression
from pfl.configuration.app import FederatedCLI
from pfl.datamodules.ranges import Checked, limits
from tests.refusal import refused

assert len(datamodules.__all__) > 0  # a first name imports all data modules
LOADED = [datamodules.FederatedDataModule, pfl.algorithms.FedAvg, FederatedCLI]


def classes(base=Checked):
    """All classes of the project below a base class."""
    for cls in base.__subclasses__():
        if cls.__module__.startswith("pfl."):
            yield cls
        yield from classes(cls)


def outside(one):
    """A number beside the range, of the side on which it ends."""
    if one.least is not None:
        return one.least - 1
    if one.above is not None:
        return one.above
    raise AssertionError(f"{one} has no lower end")


CLASSES = sorted(set(classes()), key=lambda cls: f"{cls.__module__}.{cls.__qualname__}")
NUMBERS = [
    (cls, name, limit) for cls in CLASSES for name, limit in limits(cls).items() if limit.ranges
]


def test_the_walk_has_found_the_projects_settings():
    names = {cls.__name__ for cls in CLASSES}
    assert names > {"Ditto", "Dirichlet", "SplitOwn", "RandomCrop", "Krum", "SignFlip", "TopK"}
    assert names > {"Privacy", "Clock", "FederatedLoop", "LeastSquares", "TableDataModule"}
    assert len({(cls, name) for cls, name, _ in NUMBERS}) > 500


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_number_outside_of_its_range_is_refused_by_a_line_that_names_it(cls):
    for name, limit in limits(cls).items():
        values = [outside(one) for one in limit.ranges] or ["no such name"]
        for value in values:
            with refused(f"{cls.argument_key(name)}: {value!r}; it must be "):
                cls(**{name: value})


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_defaults_lie_in_their_ranges(cls):
    if cls.__init__ is object.__init__:
        return
    known = limits(cls)
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in known and parameter.default is not parameter.empty:
            assert known[name].allows(parameter.default), name


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_no_annotation_with_a_range_is_left_out_since_it_cannot_be_read(cls):
    """An annotation that is a text counts only if the names in it are known when it is read."""
    constructor = vars(cls).get("__init__")
    if constructor is None:
        return
    space = inspect.unwrap(constructor).__globals__
    for name, annotation in constructor.__annotations__.items():
        if isinstance(annotation, str):
            try:
                eval(annotation, space)
            except NameError as error:
                raise AssertionError(f"{name}: {annotation}") from error


def test_the_help_of_a_method_shows_range_default_symbol_and_meaning(capsys):
    from pfl.cli import main

    with pytest.raises(SystemExit):
        main(["fit", "--model.help", "Ditto"])
    text = " ".join(capsys.readouterr().out.split())
    meaning = "λ. 0: every client alone; large: all clients share w."
    assert f"{meaning} (type: float, at least 0, default: 0.1)" in text
    assert "s, epochs of v_i in a round. (type: int, at least 1, default: 1)" in text
    # Of a base class, whose module postpones annotations.
    assert "Local learning rate η. (type: float, positive and below 1e38, default: 0.1)" in text
    assert "(type: int, at least 1, or null, default: 32)" in text
