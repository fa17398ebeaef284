"""Parameters with a default, and which of them a call in the package passes."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from definitions import FunctionNode, Package
from source import modules, walk

EVERY = 1000
"""Number of positional arguments of a call with `*arguments`."""
CALLERS = {"partial", "run_in_executor", "submit", "to_thread"}
"""Functions that call their first argument with the others."""


@dataclass
class Passed:
    """Arguments that the calls of one name pass.

    Attributes:
        positions: most positional arguments of any call.
        keywords: all keywords; `**` for a call with `**arguments`.
    """

    positions: int = 0
    keywords: set[str] = field(default_factory=set)

    def add(self, call: ast.Call, skip: int = 0) -> None:
        """Note the arguments of a call, but for the first `skip`."""
        star = any(isinstance(argument, ast.Starred) for argument in call.args)
        self.positions = max(self.positions, EVERY if star else len(call.args) - skip)
        self.keywords |= {keyword.arg or "**" for keyword in call.keywords}

    def covers(self, name: str, position: int | None) -> bool:
        return bool({name, "**"} & self.keywords) or (
            position is not None and position < self.positions
        )


@dataclass(frozen=True)
class Option:
    """A parameter with a default.

    Attributes:
        owner: name of the function or class in calls.
        position: number among the positional parameters; None if it is keyword-only.
        field: True for a field of a record: an assignment can set it too.
    """

    module: str
    function: str
    owner: str
    name: str
    position: int | None
    field: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.function}.{self.name}"


def options(package: Package) -> Iterator[Option]:
    """Parameters with a default: of functions, of methods, and fields of records."""
    for key, definition in package.definitions.items():
        module, name = key
        if isinstance(definition.node, FunctionNode):
            owner, _, method = name.rpartition(".")
            called = owner if method == "__init__" else method
            if method.startswith("__") and method not in ("__init__", "__call__"):
                continue  # Python passes its arguments
            yield from _of_function(module, name, called, definition.node, bool(owner))
        elif isinstance(definition.node, ast.ClassDef) and _is_record(definition.node):
            yield from _of_record(module, definition.node)


def _of_function(
    module: str, name: str, owner: str, node: FunctionNode, method: bool
) -> Iterator[Option]:
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
    bound = int(method and not static)
    for position in range(len(names) - len(arguments.defaults), len(names)):
        yield Option(module, name, owner, names[position], position - bound)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            yield Option(module, name, owner, argument.arg, None)


def _is_record(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base) == "NamedTuple" for base in node.bases) or any(
        "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def _of_record(module: str, node: ast.ClassDef) -> Iterator[Option]:
    """Fields with a default. One that starts as a new container is state, not an option."""
    fields = [
        child
        for child in node.body
        if isinstance(child, ast.AnnAssign) and "ClassVar" not in ast.unparse(child.annotation)
    ]
    for position, child in enumerate(fields):
        if (
            isinstance(child.target, ast.Name)
            and child.value is not None
            and not ("field(" in (text := ast.unparse(child.value)) and "default=" not in text)
        ):
            yield Option(module, node.name, node.name, child.target.id, position, True)


class Calls:
    """The calls of the package.

    Attributes:
        by_name: name of a function, method or class -> what its calls pass.
        assigned: attributes that are assigned, and keywords of `replace`.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Passed] = defaultdict(Passed)
        self.assigned: set[str] = set()
        for _, _, tree in modules():
            self._read(tree)

    def _read(self, tree: ast.Module) -> None:
        nodes = list(walk(tree))
        aliases = _aliases(nodes)
        for node in nodes:
            if isinstance(node, ast.Call):
                self._call(node, aliases)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.assigned.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                self._calls_of_constructors(node, aliases)

    def _call(self, call: ast.Call, aliases: dict[str, str]) -> None:
        name = _called(call.func, aliases)
        self.by_name[name].add(call)
        if name in ("replace", "_replace"):
            self.assigned |= {keyword.arg or "" for keyword in call.keywords}
        elif name == "VerbParser":  # the command line gives every field of the options
            self.by_name[_called(call.args[-1], aliases)].keywords.add("**")
        elif name in CALLERS and call.args:
            self.by_name[_called(call.args[0], aliases)].add(call, 1)

    def _calls_of_constructors(self, node: ast.ClassDef, aliases: dict[str, str]) -> None:
        """`cls(...)` and `super().__init__(...)` in the methods of a class."""
        for call in (child for child in walk(node) if isinstance(child, ast.Call)):
            name = _called(call.func, aliases)
            if name == "cls":
                self.by_name[node.name].add(call)
            elif name == "__init__":
                for base in node.bases:
                    self.by_name[_called(base, aliases)].add(call)

    def pass_(self, option: Option) -> bool:
        """True if a call passes the option, or an assignment sets the field."""
        passed = self.by_name.get(option.owner, Passed())
        assigned = option.field and option.name in self.assigned
        return assigned or passed.covers(option.name, option.position)


def _called(function: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(function, ast.Subscript):
        function = function.value
    if isinstance(function, ast.Attribute):
        return function.attr
    if isinstance(function, ast.Name):
        return aliases.get(function.id, function.id)
    return ast.unparse(function)


def _aliases(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Name in this module -> the name under which it is defined."""
    return {
        alias.asname: alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
