"""Which prompts fit, found before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UserError
from ..types import Task
from .prompts import PromptCodec
from .shortest_encoding import ShortestEncoding

_SUSPECT = 8
"""Characters per token that fits, above which a prompt's characters are counted before it is tokenized."""


@dataclass(frozen=True)
class Fitting:
    """Tasks whose prompts fit.

    Args:
        tasks: in their order.
        dropped: number of tasks that were left out.
        longest: tokens of the longest prompt that fits; 0 if there is none.
    """

    tasks: list[Task]
    dropped: int
    longest: int


def fitting_tasks(codec: PromptCodec, tasks: Sequence[Task], limit: int, overlong: str) -> Fitting:
    """The tasks whose prompts have at most `limit` tokens.

    Args:
        codec: tokenizes the prompts.
        tasks: training or held-out tasks. May be empty.
        limit: tokens of the longest prompt that fits.
        overlong: "error" or "drop": what a longer prompt leads to.

    Raises:
        UserError: at the first longer prompt if `overlong` is "error", and if nothing is left.
    """
    kept: list[Task] = []
    longest = 0
    bound: ShortestEncoding | None = None
    for task in tasks:
        least = 0
        if _characters(task) > _SUSPECT * limit:
            bound = bound or ShortestEncoding(codec.tokenizer)
            least = bound.tokens(codec.render(task))
        length = least if least > limit else len(codec.encode(task))
        if length <= limit:
            kept.append(task)
            longest = max(longest, length)
        elif overlong == "error":
            found = f"at least {least}" if least > limit else str(length)
            raise UserError(
                f"task {task.id}: the prompt has {found} tokens and {limit} fit (context less rollout.max_new_tokens, or data.max_prompt_tokens); "
                "data.overlong = 'drop' leaves such tasks out"
            )
    if tasks and not kept:
        raise UserError(f"dataset has 0 usable tasks: {len(tasks)} read, {len(tasks)} dropped with prompts over {limit} tokens")
    return Fitting(kept, len(tasks) - len(kept), longest)


def _characters(task: Task) -> int:
    return len(task.prompt) if isinstance(task.prompt, str) else sum(len(m["content"]) for m in task.prompt)
