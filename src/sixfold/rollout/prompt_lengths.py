"""Find the prompts that fit into the context, before the first training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import UserError
from ..renderer.renderer import Renderer
from ..types import Task

_SUSPECT = 8
"""Characters per allowed token. Longer prompts are checked by characters before tokenization."""


_TOGETHER = 1024
"""Number of prompts that are tokenized in one call."""


@dataclass(frozen=True)
class Fitting:
    """Tasks whose prompts fit.

    Attributes:
        tasks: the tasks, in their original order.
        dropped: number of tasks that were left out.
        longest: length of the longest prompt that fits, in tokens; 0 if there is none.
    """

    tasks: list[Task]
    dropped: int
    longest: int


def fitting_tasks(renderer: Renderer, tasks: Sequence[Task], limit: int, overlong: str) -> Fitting:
    """The tasks whose prompts have at most `limit` tokens.

    Args:
        renderer: tokenizes the prompts.
        tasks: training or held-out tasks. May be empty.
        limit: longest allowed prompt, in tokens.
        overlong: "error" raises an error for a longer prompt, "drop" leaves its task out.

    Raises:
        UserError: `overlong` is "error" and a prompt is longer, or no task is left.
    """
    kept: list[Task] = []
    longest = 0
    for task, length in zip(tasks, _lengths(renderer, tasks, limit), strict=True):
        if length.tokens <= limit:
            kept.append(task)
            longest = max(longest, length.tokens)
        elif overlong == "error":
            raise UserError(
                f"task {task.id}: the prompt has {length} tokens, but only {limit} fit"
                " (data.max_prompt_tokens, or the context minus rollout.max_new_tokens). Set"
                " data.overlong = 'drop' to leave out such tasks"
            )
    if tasks and not kept:
        raise UserError(
            f"dataset has 0 usable tasks: {len(tasks)} read, {len(tasks)} dropped because their"
            f" prompts have more than {limit} tokens. Raise data.max_prompt_tokens, or lower"
            " rollout.max_new_tokens"
        )
    return Fitting(kept, len(tasks) - len(kept), longest)


@dataclass(frozen=True)
class _Length:
    """Length of a prompt in tokens: exact, or a lower bound if it was not tokenized."""

    tokens: int
    exact: bool

    def __str__(self) -> str:
        return f"{'' if self.exact else 'at least '}{self.tokens}"


def _lengths(renderer: Renderer, tasks: Sequence[Task], limit: int) -> Iterator[_Length]:
    """Length of every prompt, in order.

    Prompts with too many characters to fit are not tokenized.
    """
    for start in range(0, len(tasks), _TOGETHER):
        some = tasks[start : start + _TOGETHER]
        least = [0] * len(some)
        for number, task in enumerate(some):
            if _characters(task) > _SUSPECT * limit:
                least[number] = renderer.least_tokens(task)
        encoded = iter(
            renderer.encode_all(
                [task for task, tokens in zip(some, least, strict=True) if tokens <= limit]
            )
        )
        yield from (
            _Length(tokens, False) if tokens > limit else _Length(len(next(encoded)), True)
            for tokens in least
        )


def _characters(task: Task) -> int:
    return (
        len(task.prompt)
        if isinstance(task.prompt, str)
        else sum(len(m["content"]) for m in task.prompt)
    )
