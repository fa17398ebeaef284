"""Files, lines and lines of code of each package. Prints a Markdown table.

    python benchmarks/sizes.py [REVISION]      (default: the working tree)

Lines of code are without docstrings, comments and blank lines.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]


def sources(revision: str) -> dict[str, str]:
    """Path -> text of every Python file below src."""
    if not revision:
        return {str(p.relative_to(ROOT)): p.read_text() for p in (ROOT / "src").rglob("*.py")}
    listed = git("ls-tree", "-r", "--name-only", revision, "src").split()
    return {name: git("show", f"{revision}:{name}") for name in listed if name.endswith(".py")}


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def code_lines(text: str) -> int:
    """Lines of a file that hold code."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_text:
            body = getattr(node, "body", None)
            end = body[0].lineno if body else (node.end_lineno or node.lineno) + 1
            lines |= set(range(node.lineno, end))
    return len(lines)


def main(revision: str) -> None:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, text in sources(revision).items():
        for package in (name.split("/")[1], "all"):
            found = (1, text.count("\n"), code_lines(text))
            counts[package] = [a + b for a, b in zip(counts[package], found, strict=True)]
    print("| package | files | lines | code |\n|---|---|---|---|")
    for package, (files, lines, code) in sorted(counts.items(), key=lambda x: (x[0] == "all", x)):
        print(f"| `{package}` | {files} | {lines:,} | {code:,} |")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
