"""The package as syntax trees: what the tests of this folder read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import sixfold

ROOT = Path(sixfold.__file__).parent


@cache
def modules() -> tuple[tuple[str, Path, ast.Module], ...]:
    """(dotted name without the package, file, tree) of every module. Nobody changes a tree."""
    return tuple(
        (module_name(path), path, ast.parse(path.read_text()))
        for path in sorted(ROOT.rglob("*.py"))
    )


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but the contexts of names, in any order: several times as fast as `ast.walk`."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        for value in node.__dict__.values():
            if isinstance(value, list):
                stack += [child for child in value if isinstance(child, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                stack.append(value)


def module_name(path: Path) -> str:
    """Dotted name of a file of the package, without the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(name: str, path: Path, tree: ast.Module) -> set[str]:
    """Dotted names that a module imports wherever it does so, ours without the package's name and
    with a leading dot.

    What stands under `if __name__ == "__main__"` is left out: there the file is a program.
    """
    found: set[str] = set()
    for node in _outside_main(tree):
        if isinstance(node, ast.Import):
            found |= {_ours(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = import_base(name, path, node)
            full = node.module or "" if base is None else f".{base}"
            found |= {full} | {
                f"{full.rstrip('.')}.{alias.name}"
                for alias in node.names
                if is_module(full, alias.name)
            }
    return found - {"."}


def import_base(name: str, path: Path, node: ast.ImportFrom) -> str | None:
    """The module of ours that a `from` import in module `name` reads; None if it is another's."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    if not node.level:
        first, _, rest = (node.module or "").partition(".")
        return rest if first == "sixfold" else None
    parts = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
    return ".".join(part for part in parts if part)


def _ours(module: str) -> str:
    return (
        "." + module.removeprefix("sixfold").lstrip(".")
        if module.split(".")[0] == "sixfold"
        else module
    )


def is_module(parent: str, child: str) -> bool:
    """True if `child` is a module of the package `parent`, one of ours with a leading dot."""
    if not parent.startswith("."):
        return False
    folder = ROOT.joinpath(*parent.strip(".").split(".")) if parent != "." else ROOT
    return (folder / f"{child}.py").exists() or (folder / child / "__init__.py").exists()


def _outside_main(tree: ast.Module) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            continue
        yield from ast.walk(node)
