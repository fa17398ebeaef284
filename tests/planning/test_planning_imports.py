"""Planning is arithmetic: but for those that read runs and recipes, its modules import the standard
library and `errors` alone.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sixfold_planning

FOLDER = Path(sixfold_planning.__file__).parent
READ_RUNS = {
    *("measure", "measure_cases", "planned_work", "predict", "prediction", "solver", "verb"),
}
FILES = sorted(
    path
    for path in FOLDER.rglob("*.py")
    if path.stem not in READ_RUNS and path.parent.name != "page"
)


def _imports(path: Path) -> set[str]:
    """Absolute names of everything that a file imports, at any level of nesting."""
    package = [*path.relative_to(FOLDER.parent).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base} if node.module else {f"{base}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(FOLDER)) for p in FILES])
def test_module_imports_the_standard_library_and_errors(path: Path) -> None:
    standard = sys.stdlib_module_names
    foreign = {name for name in _imports(path) if name.split(".")[0] not in standard}
    assert {
        name
        for name in foreign
        if name != "sixfold.errors" and not name.startswith("sixfold_planning.")
    } == set()


def test_no_module_loads_torch_or_numpy() -> None:
    names = [
        ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
        for path in FILES
        if path.stem != "__init__"
    ]
    code = "import importlib, sys\nfor n in sys.argv[1:]: importlib.import_module(n)\n"
    code += "print(sorted({'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
