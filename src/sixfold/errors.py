"""The one error that is the user's to mend. A leaf: every room may import it, it imports nothing."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: a setting, a file, a dataset, a checkpoint. The command line prints it in one line and exits 2.

    The message says what is wrong, where, and what would be right.
    """


def nearest(word: str, candidates: list[str]) -> str:
    """The hint " Did you mean 'x'?" for the closest of `candidates`, or an empty string when none is close."""
    from difflib import get_close_matches

    close = get_close_matches(word, candidates, n=3, cutoff=0.6)
    close.sort(key=lambda candidate: sorted(candidate) != sorted(word))  # two letters swapped, as in "gpro", is the likeliest slip
    return f" Did you mean '{close[0]}'?" if close else ""
