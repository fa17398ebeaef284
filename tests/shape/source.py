"""The package as syntax trees: what the tests of this folder read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import sixfold

ROOT = Path(sixfold.__file__).parent


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    """(dotted name without the package, file, tree) of every module."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, path, ast.parse(path.read_text())


def imports(name: str, path: Path, tree: ast.Module) -> set[str]:
    """Dotted names that a module imports wherever it does so, ours without the package's name and
    with a leading dot.

    What stands under `if __name__ == "__main__"` is left out: there the file is a program.
    """
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in _outside_main(tree):
        if isinstance(node, ast.Import):
            found |= {_ours(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            full = "." + module if node.level else _ours(module)
            found |= {full} | {
                f"{full.rstrip('.')}.{alias.name}"
                for alias in node.names
                if _is_module(full, alias.name)
            }
    return found - {"."}


def _ours(module: str) -> str:
    return (
        "." + module.removeprefix("sixfold").lstrip(".")
        if module.split(".")[0] == "sixfold"
        else module
    )


def _is_module(parent: str, child: str) -> bool:
    if not parent.startswith("."):
        return False
    folder = ROOT.joinpath(*parent.strip(".").split(".")) if parent != "." else ROOT
    return (folder / f"{child}.py").exists() or (folder / child / "__init__.py").exists()


def _outside_main(tree: ast.Module) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            continue
        yield from ast.walk(node)
