"""Errors whose message the command line prints on one line, and helpers for such messages.

Every package may import this module. It imports no other package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Bad input: a setting, file, dataset or checkpoint.

    The command line prints the message on one line and exits with code 2. The message says what is
    wrong, where, and how to fix it.
    """


class RunFailed(Exception):
    """Training cannot continue: it diverged, memory is used up, or a part of the run is silent.

    The command line prints the message on one line and exits with code 3. The message names the
    last usable checkpoint and settings that would help.
    """


class NoAnswer(RunFailed):
    """A part of the run gave no sign of life until its deadline. The message names the part."""


class BudgetSpent(RunFailed):
    """A budget of the recipe is used up. The run can be resumed with a larger one."""


@contextmanager
def size_noted(what: str) -> Iterator[None]:
    """Context that adds a note to errors: the size of its work, for the out-of-memory message.

    Args:
        what: the size, such as "micro-batch of 4 rows".
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        error.add_note(what)
        raise


class RankFailed(Exception):
    """One of several ranks has failed. One rank raises this for all. Exit code 3."""


def one_line(error: BaseException) -> str:
    """`ValueError: message`, on one line of at most 300 characters.

    For a group, the exceptions in it follow: task groups say nothing about the failure themselves.
    """
    # Half of a surrogate pair can neither be printed nor tokenized.
    return " ".join(_class_and_message(error).encode("utf-8", "replace").decode().split())[:300]


def is_fault(error: BaseException) -> bool:
    """True if user code failed with `error`. False for Ctrl-C, and for the end of a coroutine.

    `except Exception` does not suffice for user code: `sys.exit` would end the run without a word,
    and a class of the user that only extends BaseException would end it with a traceback.
    """
    from asyncio import CancelledError

    return not isinstance(error, KeyboardInterrupt | GeneratorExit | CancelledError)


def _class_and_message(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, BaseExceptionGroup):
        return f"{name}: {error.message}: {'; '.join(map(_class_and_message, error.exceptions))}"
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - boundary: the class of a user, whose __str__ fails
        return f"{name} (without a message: its __str__ failed)"
    return f"{name}: {text}" if text else name


def check_platform(name: str) -> None:
    """Refuse Windows: locks, worker processes and signals need POSIX.

    Args:
        name: `os.name`.

    Raises:
        UserError: if `name` is not "posix".
    """
    if name != "posix":
        raise UserError(
            "Sixfold runs on Linux and macOS. On Windows, run it in WSL 2:"
            " https://learn.microsoft.com/windows/wsl/install"
        )


def nearest(word: str, candidates: list[str]) -> str:
    """Hint " Did you mean 'x'?" for the closest of `candidates`, or "" if none is close.

    Case, leading dashes, and the difference of - and _ do not count.
    """
    from difflib import get_close_matches

    def bare(text: str) -> str:
        return text.lstrip("-").replace("-", "_").casefold()

    named = {bare(candidate): candidate for candidate in reversed(candidates)}
    close = get_close_matches(bare(word), named, n=3, cutoff=0.6)
    # Prefer swapped letters, as in "gpro": the most likely typo.
    close.sort(key=lambda name: sorted(name) != sorted(bare(word)))
    return f" Did you mean '{named[close[0]]}'?" if close else ""
