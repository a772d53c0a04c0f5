"""Plants one small mistake at a time in the source of a module."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import EnumType
from types import FunctionType, ModuleType
from typing import Any

Names = dict[str, int]  # and the line from which on there is something of that name
EXCHANGED: list[tuple[type, type]] = [
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
]
OPERATORS = dict([*EXCHANGED, *((b, a) for a, b in EXCHANGED)])
OPERATORS |= {ast.FloorDiv: ast.Div, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
NOT_SWAPPED = {"isinstance", "max", "min"}  # a swap of arguments raises, or changes nothing
# Beside a condition they hold text for users.
CHECKS = {"require", "require_value", "ConfigError"}


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: The function, and the statement after the mistake: what identifies the mutant.
        lines: The first and the last line of the statement; None: outside of functions, where the
            import executes it.
        edit: Makes the mistake in the tree of the module, and returns the function that mends it.
    """

    name: str
    lines: tuple[int, int] | None
    edit: Callable[[], Callable[[], None]]


class Statement:
    """A statement: the expressions in its own lines, without its blocks.

    Args:
        node: The statement.
        owner: The class and function that it stands in.
        names: The function's variables, one of which may stand for another; None: no function.
        attributes: The same of the class.
    """

    def __init__(self, node: ast.stmt, owner: str, names: Names | None, attributes: Names) -> None:
        self.node, self.owner, self.names, self.attributes = node, owner, names or {}, attributes
        blocks = [s for s in ast.iter_child_nodes(node) if isinstance(s, ast.stmt)]
        last = max(node.lineno, blocks[0].lineno - 1) if blocks else node.end_lineno or 0
        self.lines = None if names is None else (node.lineno, last)

    def text(self) -> str:
        """Returns the statement, of a compound one the first line."""
        text = ast.unparse(self.node)
        compound = isinstance(self.node, ast.If | ast.For | ast.While | ast.With)
        return text.split("\n")[0] if compound else text

    def edits(self) -> Iterator[Callable[[], Callable[[], None]]]:
        """Yields the mistakes."""
        pending: list[ast.AST] = [self.node]
        while pending:
            node = pending.pop()
            yield from self._edits_of(node)
            for name, value in ast.iter_fields(node):
                for place, child in enumerate(value if isinstance(value, list) else [value]):
                    inside = isinstance(child, ast.expr | ast.keyword | ast.comprehension)
                    # No text that is put together.
                    if inside and name != "annotation" and not isinstance(child, ast.JoinedStr):
                        at = place if isinstance(value, list) else None
                        if shown(node, name, place):
                            continue
                        yield from self._replacements(node, name, at, child)
                        pending.append(child)

    def _edits_of(self, node: ast.AST) -> Iterator[Callable[[], Callable[[], None]]]:
        """Mistakes inside a node: another operator, fewer or exchanged arguments or branches."""
        if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OPERATORS:
            yield change(node, "op", OPERATORS[type(node.op)]())
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield change(node, "left", node.right, "right", node.left)
        if isinstance(node, ast.Compare):
            yield change(node, "ops", [OPERATORS[type(op)]() for op in node.ops])
        if isinstance(node, ast.IfExp):
            yield change(node, "body", node.orelse, "orelse", node.body)
        if isinstance(node, ast.If | ast.While):
            yield change(node, "test", ast.UnaryOp(ast.Not(), node.test))
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            swapped = len(node.args) > 1 and called not in NOT_SWAPPED | CHECKS
            if swapped and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
                yield change(node, "args", [node.args[1], node.args[0], *node.args[2:]])
            for word in node.keywords:
                if word.arg not in (None, "device"):  # the tests have one device
                    yield change(node, "keywords", [k for k in node.keywords if k is not word])

    def _replacements(
        self, parent: ast.AST, field: str, place: int | None, node: ast.AST
    ) -> Iterator[Callable[[], Callable[[], None]]]:
        """Mistakes in place of an expression: another number, sign, name or attribute."""
        new: Any = None
        sibling: Any = None
        if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            value: Any = node.value
            wrong = not value if isinstance(value, bool) else value + 1
            new = ast.Constant(value * 2 or 1.0 if isinstance(value, float) else wrong)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
            new = node.operand
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and field != "func":
            sibling = following(self.names, node.id, node.lineno)
            new = ast.Name(sibling, ast.Load()) if sibling else None
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            sibling = ast.unparse(node.value) == "self" and following(
                self.attributes, node.attr, node.lineno
            )
            new = ast.Attribute(node.value, sibling, ast.Load()) if sibling else None
        if new is None:
            return
        if place is None:
            yield change(parent, field, new)
        else:
            items = list(getattr(parent, field))
            items[place] = new
            yield change(parent, field, items)


def shown(node: ast.AST, field: str, place: int) -> bool:
    """Returns whether an argument is only shown in a message: all of a check but its condition."""
    check = isinstance(node, ast.Call) and ast.unparse(node.func) in CHECKS
    return check and field == "args" and place != 2


def following(names: Names, name: str, line: int) -> str | None:
    """Returns the name after `name` of those that exist before a line; after the last the first."""
    known = [n for n, first in names.items() if first < line]
    if name not in known or len(known) < 2:
        return None
    return known[(known.index(name) + 1) % len(known)]


def change(node: ast.AST, *pairs: Any) -> Callable[[], Callable[[], None]]:
    """Returns the edit that sets fields of a node: name, value, name, value and so on."""
    new = dict(zip(pairs[::2], pairs[1::2], strict=True))

    def edit() -> Callable[[], None]:
        old = {name: getattr(node, name) for name in new}
        for name, value in new.items():
            setattr(node, name, value)

        def back() -> None:
            for name, value in old.items():
                setattr(node, name, value)

        return back

    return edit


def mutants(tree: ast.Module) -> list[Mutant]:
    """Returns the mutants of a module. Text, annotations and defaults of arguments stay."""
    found: dict[str, Mutant] = {}
    for block, position, statement in statements(tree, "", None, {}):
        node, before = statement.node, ast.unparse(statement.node)
        for edit in statement.edits():
            mend = edit()
            text = statement.text()
            changed = ast.unparse(node) != before
            mend()
            name = f"{statement.owner}: {text}"
            if changed:
                found.setdefault(name, Mutant(name, statement.lines, edit))
        if droppable(node, block[:position]):
            name = f"{statement.owner}: without {statement.text()}"
            replaced = [*block[:position], ast.copy_location(ast.Pass(), node)]

            def drop(
                block: list[ast.stmt] = block, new: list[ast.stmt] = replaced, at: int = position
            ) -> Callable[[], None]:
                old, block[at] = block[at], new[at]
                return lambda: block.__setitem__(at, old)

            found.setdefault(name, Mutant(name, statement.lines, drop))
    return list(found.values())


def statements(
    scope: ast.AST, owner: str, names: Names | None, attributes: Names
) -> Iterator[tuple[list[ast.stmt], int, Statement]]:
    """Yields all statements with their block and their position in it, but for those of an Enum.

    Other modules hold its members, which cannot be replaced.
    """
    for field in ("body", "orelse", "finalbody"):
        block = getattr(scope, field, [])
        for position, node in enumerate(block):
            inner = f"{owner}.{node.name}".strip(".") if hasattr(node, "name") else owner
            if isinstance(node, ast.ClassDef):
                if not any(ast.unparse(base).endswith("Enum") for base in node.bases):
                    yield from statements(node, inner, None, attributes_of(node))
            elif isinstance(node, ast.FunctionDef):
                yield from statements(node, inner, names_in(node), attributes)
            elif not isinstance(node, ast.Import | ast.ImportFrom) and not is_text(node):
                yield block, position, Statement(node, owner, names, attributes)
                yield from statements(node, owner, names, attributes)


def is_text(node: ast.stmt) -> bool:
    """Returns whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def droppable(node: ast.stmt, before: list[ast.stmt]) -> bool:
    """Returns whether the module still makes sense without a statement.

    It does without calls and assignments to what already exists.
    """
    if isinstance(node, ast.Expr | ast.AugAssign | ast.Raise):
        return True
    if not isinstance(node, ast.Assign):
        return False
    known = {n.id for s in before for n in ast.walk(s) if isinstance(n, ast.Name)}
    return all(
        isinstance(target, ast.Attribute | ast.Subscript)
        or (isinstance(target, ast.Name) and target.id in known)
        for target in node.targets
    )


def names_in(function: ast.FunctionDef) -> Names:
    """Returns the arguments and variables of a function that stand in arithmetic or calls."""
    names = {a.arg: 0 for a in (*function.args.args, *function.args.kwonlyargs)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, node.lineno)
    used = {
        child.id
        for node in ast.walk(function)
        if isinstance(node, ast.BinOp | ast.Compare | ast.Call | ast.Subscript | ast.keyword)
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load)
    }
    return {n: line for n, line in names.items() if n in used - {"self", "clients", "kwargs"}}


def attributes_of(kind: ast.ClassDef) -> Names:
    """Returns the attributes that the methods of a class set on `self`."""
    return {
        node.attr: 0
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


# ---- in a module that is loaded -----------------------------------------------------------------


def noting(tree: ast.Module, name: str) -> ast.Module:
    """Makes every statement of a function call a global function with its first line."""
    for block, position, statement in reversed(list(statements(tree, "", None, {}))):
        if statement.lines is not None:
            call = ast.Call(ast.Name(name, ast.Load()), [ast.Constant(statement.lines[0])], [])
            block.insert(position, ast.copy_location(ast.Expr(call), statement.node))
    return tree


def plant(module: ModuleType, tree: ast.Module) -> None:
    """Gives the classes and functions of a loaded module the bodies that a tree has.

    They stay the same objects, since tests have imported them.
    """
    own = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type | FunctionType) and value.__module__ == module.__name__
    }
    exec(compile(ast.fix_missing_locations(tree), str(module.__file__), "exec"), vars(module))
    for name, old in own.items():
        new = vars(module)[name]
        if isinstance(old, EnumType):
            pass  # its members are what other modules hold
        elif isinstance(old, FunctionType):
            inner = inspect.unwrap(old)  # a decorator's function calls it
            body = inspect.unwrap(new)
            inner.__code__ = body.__code__
            inner.__defaults__ = body.__defaults__
        else:
            for key in vars(old).keys() - vars(new).keys():
                delattr(old, key)
            for key, value in vars(new).items():
                if key not in ("__dict__", "__weakref__", "__doc__"):
                    setattr(old, key, value)
                function = getattr(value, "fget", getattr(value, "__func__", value))
                for cell in getattr(function, "__closure__", None) or ():
                    if cell.cell_contents is new:  # what `super()` reads
                        cell.cell_contents = old
        setattr(module, name, old)
