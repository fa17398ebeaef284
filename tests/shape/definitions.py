"""The package's definitions and what each mentions, read from the syntax trees.

Functions, classes and constants of a module are followed through the imports. Methods are matched
by name: a tree mentions a method wherever it has an attribute of that name.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from source import PACKAGES, import_base, is_module, modules, short_name, walk

PLAIN_BASES = {
    *("ArithmeticError", "BaseException", "BaseModel", "Exception", "Generic", "KeyboardInterrupt"),
    *("NamedTuple", "Protocol", "RuntimeError", "TypedDict", "ValueError"),
}
"""Bases from outside of the package that call none of the methods that a subclass adds."""

HOOKS = {"field_serializer", "field_validator", "model_serializer", "model_validator", "tool"}
"""Decorators by which pydantic, or an episode with tools, finds methods to call."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[str, str]
"""(module, name); a method is (module, "Class.name")."""


@dataclass
class Definition:
    """A function, class, constant or method.

    Attributes:
        trees: the definition; of a class its bases, decorators and fields.
        methods: of a class, by name.
    """

    key: Key
    trees: list[ast.AST] = field(default_factory=list)
    methods: dict[str, FunctionNode] = field(default_factory=dict)
    node: ast.AST | None = None


class Package:
    """Every definition of `src/`.

    Attributes:
        definitions: all of them.
        top: by module, the statements that define nothing and run on import.
        programs: by module, the statements under `if __name__ == "__main__"`.
    """

    def __init__(self) -> None:
        self.definitions: dict[Key, Definition] = {}
        self.top: dict[str, list[ast.AST]] = defaultdict(list)
        self.programs: dict[str, list[ast.AST]] = defaultdict(list)
        self._imported: dict[str, dict[str, set[Key]]] = {}
        for name, path, tree in modules():
            self._imported[name] = _imports(name, path, tree)
            self._read(name, tree.body)

    def _read(self, module: str, body: Iterable[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, FunctionNode):
                self._define(module, node.name, node, [node])
            elif isinstance(node, ast.ClassDef):
                self._read_class(module, node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and (names := _targets(node)):
                for name in names:
                    self._define(module, name, node, [node])
            elif isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                self.programs[module].append(node)
            elif isinstance(node, ast.If | ast.Try | ast.With):
                blocks = ("body", "orelse", "finalbody", "handlers")
                inner = [child for block in blocks for child in getattr(node, block, ())]
                handled = [c for h in inner if isinstance(h, ast.ExceptHandler) for c in h.body]
                self._read(module, [c for c in inner if isinstance(c, ast.stmt)] + handled)
            elif not isinstance(node, ast.Import | ast.ImportFrom):
                self.top[module].append(node)

    def _define(self, module: str, name: str, node: ast.AST, trees: list[ast.AST]) -> Definition:
        found = self.definitions.setdefault((module, name), Definition((module, name), node=node))
        found.trees += trees
        return found

    def _read_class(self, module: str, node: ast.ClassDef) -> None:
        methods = [child for child in node.body if isinstance(child, FunctionNode)]
        rest = [child for child in node.body if not isinstance(child, FunctionNode)]
        definition = self._define(
            module, node.name, node, [*node.bases, *node.keywords, *node.decorator_list, *rest]
        )
        for method in methods:
            definition.methods[method.name] = method
            self._define(module, f"{node.name}.{method.name}", method, [method])

    def resolve(self, module: str, name: str) -> set[Key]:
        """Definitions that a name means in a module; an imported module is (its name, "")."""
        if (module, name) in self.definitions:
            return {(module, name)}
        found: set[Key] = set()
        for origin, original in self._imported.get(module, {}).get(name, ()):
            if original and origin != module:
                found |= self.resolve(origin, original)
            elif not original:
                found.add((origin, ""))
        return found

    def meant(self, module: str, node: ast.expr) -> set[Key]:
        """Definitions that a name or `module.name` means."""
        if isinstance(node, ast.Name):
            return self.resolve(module, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            bases = self.resolve(module, node.value.id)
            return {k for m, rest in bases if not rest for k in self.resolve(m, node.attr)}
        return set()

    def mentions(self, module: str, trees: Iterable[ast.AST]) -> tuple[set[Key], set[str]]:
        """Definitions that trees of a module mention, and the names of their attributes."""
        keys: set[Key] = set()
        attributes: set[str] = set()
        for tree in trees:
            for node in walk(tree):
                if isinstance(node, ast.Name):
                    keys |= self.meant(module, node)
                elif isinstance(node, ast.Attribute):
                    keys |= self.meant(module, node)
                    attributes.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    keys |= self._by_path(node.value)
        return {key for key in keys if key[1]}, attributes

    def _by_path(self, text: str) -> set[Key]:
        """The definition that a text names as "sixfold.module:function", of any package."""
        module, _, name = text.partition(":")
        if not name or module.split(".")[0] not in PACKAGES:
            return set()
        return self.resolve(short_name(module), name)

    def outside_calls(self, key: Key) -> bool:
        """True if a class has a base from outside that may call any of its methods."""
        node = self.definitions[key].node
        assert isinstance(node, ast.ClassDef)
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            ours = {k for k in self.meant(key[0], name) if k[1]}
            if any(self.outside_calls(k) for k in ours):
                return True
            if not ours and ast.unparse(name).split(".")[-1] not in PLAIN_BASES:
                return True
        return False

    def hooks(self, key: Key) -> set[str]:
        """Methods of a class that Python or a library calls."""
        methods = self.definitions[key].methods
        if methods and self.outside_calls(key):
            return set(methods)
        return {name for name, node in methods.items() if name.startswith("__") or _is_hook(node)}

    def classes(self) -> Iterator[tuple[Key, Definition, ast.ClassDef]]:
        for key, definition in self.definitions.items():
            if isinstance(definition.node, ast.ClassDef):
                yield key, definition, definition.node


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part.id for target in targets for part in walk(target) if isinstance(part, ast.Name)]


def _is_hook(node: FunctionNode) -> bool:
    return any(word in ast.unparse(d) for d in node.decorator_list for word in HOOKS)


def _imports(name: str, path: Path, tree: ast.Module) -> dict[str, set[Key]]:
    """Name in this module -> what it stands for, late imports included; ours only."""
    found: dict[str, set[Key]] = defaultdict(set)
    for node in (n for n in walk(tree) if isinstance(n, ast.ImportFrom)):
        base = import_base(name, path, node)
        if base is not None:
            for alias in node.names:
                child = f"{base}.{alias.name}".lstrip(".")
                origin = (child, "") if is_module("." + base, alias.name) else (base, alias.name)
                found[alias.asname or alias.name].add(origin)
    return found
