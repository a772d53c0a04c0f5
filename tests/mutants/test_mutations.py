"""What the tool plants, and that its list of equivalent mutants is still true of the methods."""

import ast
import types

from tests.mutants.__main__ import equivalent, found
from tests.mutants.mutations import mutants, plant

SOURCE = """
class Method:
    def __init__(self, rate, size):
        self.rate, self.size = rate, size

    def step(self, w, g):
        'A docstring has no mutant.'
        if w < g:
            w -= self.rate * g
        return w
"""


def test_the_mistakes_of_a_statement():
    texts = {m.name.removeprefix("Method.step: ") for m in mutants(ast.parse(SOURCE))}
    assert {
        "if not w < g:",
        "if w <= g:",
        "if g < g:",
        "w += self.rate * g",
        "w -= self.rate / g",
        "w -= self.size * g",
        "w -= self.rate * w",
        "without w -= self.rate * g",
        "return g",
    } <= texts
    assert not any("docstring" in text for text in texts)


def test_a_mistake_reaches_objects_that_exist_already():
    """1 - 0.5 * 2 = 0; with + it is 2. An object that was made before gets the new body."""
    module, tree = types.ModuleType("loaded"), ast.parse(SOURCE)
    module.__file__ = "loaded.py"
    exec(SOURCE, vars(module))
    method = module.Method(0.5, 7)
    mutant = next(m for m in mutants(tree) if m.name == "Method.step: w += self.rate * g")
    assert ast.dump(tree) == ast.dump(ast.parse(SOURCE))  # nothing is planted yet
    assert method.step(1.0, 2.0) == 0.0
    mutant.edit()
    plant(module, tree)
    assert method.step(1.0, 2.0) == 2.0


def test_a_mistake_reaches_a_function_inside_of_a_decorator():
    source = "import numpy as np\n@np.errstate(all='ignore')\ndef double(x):\n    return x * 2\n"
    module, tree = types.ModuleType("loaded"), ast.parse(source)
    module.__file__ = "loaded.py"
    exec(source, vars(module))
    double = module.double
    next(m for m in mutants(tree) if m.name == "double: return x / 2").edit()
    plant(module, tree)
    assert (double(5), module.double(5)) == (2.5, 2.5)


def test_equivalent_mutants_exist():
    for name, reasons in equivalent().items():
        planted = {m.name for m in mutants(ast.parse(found(name).read_text()))}
        assert reasons.keys() <= planted, name
        assert all(reasons.values())
