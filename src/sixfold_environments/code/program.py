"""Programs for the sandbox: the sources of modules of this package, joined to one file."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def join_modules(*modules: str) -> bytes:
    """Source of one program that contains `modules`.

    The sandbox has no `sixfold` package. So the imports among the modules are left out: later
    modules see the names of earlier ones.

    Args:
        modules: names of modules of this package, each after the modules that it imports.
    """
    lines = ["from __future__ import annotations"]
    for module in modules:
        source = Path(__file__).with_name(f"{module}.py").read_text()
        lines += [
            line
            for line in source.splitlines()
            if not line.startswith(("from .", "from __future__"))
        ]
    return ("\n".join(lines) + "\n").encode()
