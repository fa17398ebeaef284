"""No line of a page, a recipe or a build file is over 100 characters."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDEST = 100
GENERATED = {"docs/settings.md", "docs/metrics.md"}
FILES = [
    *(ROOT / name for name in ("Makefile", "pyproject.toml")),
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("benchmarks/**/*.md"),
    *ROOT.glob("recipes/*.toml"),
    *ROOT.glob("src/**/*.template"),
]


@pytest.mark.parametrize(
    "name", sorted({str(path.relative_to(ROOT)) for path in FILES} - GENERATED)
)
def test_no_line_is_wider(name: str) -> None:
    """Except rows of tables, links that cannot be wrapped, and a recipe's alphabet."""
    wide = [
        f"{name}:{number} has {len(line)} characters"
        for number, line in enumerate((ROOT / name).read_text("utf-8").splitlines(), 1)
        if len(line) > WIDEST
        and not line.lstrip().startswith(("|", "- [", "alphabet = "))
        and "://" not in line
    ]
    assert not wide
