"""The packages as syntax trees: what the tests of this folder read.

A module of the core has its dotted name without `sixfold.`, one of another package its whole name.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import sixfold

ROOT = Path(sixfold.__file__).parent
SRC = ROOT.parent
PACKAGES = sorted(path.parent.name for path in SRC.glob("*/__init__.py"))


@cache
def modules() -> tuple[tuple[str, Path, ast.Module], ...]:
    """(name, file, tree) of every module. Nobody changes a tree."""
    gc.disable()  # it would visit all trees again and again
    try:
        return tuple(
            (module_name(path), path, ast.parse(path.read_text()))
            for package in PACKAGES
            for path in sorted((SRC / package).rglob("*.py"))
        )
    finally:
        gc.freeze()
        gc.enable()


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
    """Name of a file."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return short_name(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


def short_name(dotted: str) -> str:
    """Name of a module with this whole dotted name."""
    return "" if dotted == "sixfold" else dotted.removeprefix("sixfold.")


def whole_name(name: str) -> str:
    """Whole dotted name of a module of ours."""
    if name.split(".")[0] in PACKAGES:
        return name
    return f"sixfold.{name}" if name else "sixfold"


def imports(name: str, path: Path, tree: ast.Module) -> set[str]:
    """Modules that a module imports wherever it does so, ours with a leading dot.

    Late imports and what stands under `if __name__ == "__main__"` count.
    """
    found: set[str] = set()
    for node in walk(tree):
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
    if not node.level:
        module = node.module or ""
        return short_name(module) if module.split(".")[0] in PACKAGES else None
    parts = whole_name(name).split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]
    base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
    return short_name(".".join(part for part in base if part))


def _ours(module: str) -> str:
    return f".{short_name(module)}" if module.split(".")[0] in PACKAGES else module


def is_module(parent: str, child: str) -> bool:
    """True if `child` is a module of the package `parent`, one of ours with a leading dot."""
    if not parent.startswith("."):
        return False
    folder = SRC.joinpath(*whole_name(parent.strip(".")).split("."))
    return (folder / f"{child}.py").exists() or (folder / child / "__init__.py").exists()
