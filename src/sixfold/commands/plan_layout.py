"""Layout of the page of `sixfold plan`: sections of labelled rows, and tables."""

from __future__ import annotations

import textwrap

LABEL, COLUMN, WIDTH = 26, 14, 100

Rows = list[tuple[str, str]]
"""(label, statement) pairs of a section."""

Table = list[tuple[str, list[str]]]
"""(label, cells) pairs of a table."""


def print_section(title: str, rows: Rows) -> None:
    """Print a title and its rows, wrapped. Without rows, print nothing."""
    if not rows:
        return
    print(f"\n{title}")
    for label, text in rows:
        print(
            textwrap.fill(
                text,
                WIDTH,
                initial_indent=f"  {label:<{LABEL}}",
                subsequent_indent=" " * (LABEL + 2),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )


def print_table(title: str, rows: Table) -> None:
    """Print a title and rows of right-aligned cells."""
    print(f"\n{title}")
    for label, cells in rows:
        print(f"  {label:<{LABEL}}" + "".join(f"{cell:>{COLUMN}}" for cell in cells))
