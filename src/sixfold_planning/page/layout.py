"""Layout of the page of `sixfold plan`: sections of labelled rows, and tables."""

from __future__ import annotations

import shutil
import textwrap

LABEL, COLUMN, WIDTH, NARROW = 26, 14, 100, 72
"""Columns of a label and of a cell, of a page, and of a terminal on which labels get a line."""

Rows = list[tuple[str, str]]
"""(label, statement) pairs of a section."""

Table = list[tuple[str, list[str]]]
"""(label, cells) pairs of a table."""


def width() -> int:
    """Columns of the page: those of the terminal, at most 100. 100 if the output is no terminal."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def print_text(text: str, first: str = "", rest: str = "") -> None:
    """Print a paragraph, wrapped.

    Args:
        first: indentation of its first line.
        rest: indentation of the others.
    """
    print(
        textwrap.fill(
            text,
            width(),
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def print_section(title: str, rows: Rows) -> None:
    """Print a title and its rows, wrapped. Without rows, print nothing."""
    if not rows:
        return
    print()
    print_text(title)
    for label, text in rows:
        if width() < NARROW:
            print_text(f"{label}: {text}", "  ", "    ")
        else:
            print_text(text, f"  {label:<{LABEL}}", " " * (LABEL + 2))


def print_table(title: str, rows: Table) -> None:
    """Print a title and rows of right-aligned cells. If they are too wide: a block per column."""
    print()
    print_text(title)
    if LABEL + 2 + COLUMN * len(rows[0][1]) <= width():
        for label, cells in rows:
            print(f"  {label:<{LABEL}}" + "".join(f"{cell:>{COLUMN}}" for cell in cells))
        return
    for place, name in enumerate(rows[0][1]):
        print(f"  {name}")
        for label, cells in rows[1:]:
            print(f"    {label:<{LABEL}}{cells[place]:>{COLUMN - 6}}")
