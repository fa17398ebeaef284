"""Controls that several labs have: the seed, and the choice between a formula and the library."""

from __future__ import annotations

from sixfold.pages.lab import Control

FORMULA, LIBRARY = "formula", "library"


def seed_control(of: str, *, sweep: tuple[int, ...] | None = None) -> Control:
    """Seed of the random numbers.

    Args:
        sweep: values that the HTML page shows. None: a grid over the range.
    """
    return Control("seed", 0, f"seed of {of}", low=0, high=9999, sweep=sweep)


def source_control(formula: str, library: str) -> Control:
    """Choice between the lab's arithmetic and the library's. The HTML page does not show it.

    Args:
        formula: what computes with "formula", for the help.
    """
    about = f"{FORMULA}: {formula}; {LIBRARY}: {library}"
    return Control("source", FORMULA, about, choices=(FORMULA, LIBRARY), sweep=())


SOURCE = source_control("this lab's arithmetic", "the functions of sixfold.algorithm that train")
