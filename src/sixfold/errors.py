"""Errors that the user can mend. A leaf: every room may import it, it imports nothing."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: a setting, a file, a dataset, a checkpoint. The command line prints it in one line and exits 2.

    The message says what is wrong, where, and what would be right.
    """


class RunFailed(Exception):
    """Training cannot go on: it diverged, or memory is used up. The command line prints it in one line and exits 3.

    The message names the checkpoint that is left, and the settings that would help.
    """


def check_platform(name: str) -> None:
    """Refuse Windows: locks, workers and signals are those of POSIX.

    Args:
        name: `os.name`.
    """
    if name != "posix":
        raise UserError("Sixfold runs on Linux and macOS. On Windows, run it in WSL 2: https://learn.microsoft.com/windows/wsl/install")


def nearest(word: str, candidates: list[str]) -> str:
    """The hint " Did you mean 'x'?" for the closest of `candidates`, or an empty string when none is close."""
    from difflib import get_close_matches

    close = get_close_matches(word, candidates, n=3, cutoff=0.6)
    close.sort(key=lambda candidate: sorted(candidate) != sorted(word))  # two letters swapped, as in "gpro", is the likeliest slip
    return f" Did you mean '{close[0]}'?" if close else ""
