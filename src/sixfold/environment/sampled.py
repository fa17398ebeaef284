"""Values that rewards may ask for by parameter name, besides completion and task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

EXTRA_ARGUMENTS = ("finish_reason", "completion_ids", "prompt_ids", "rendered_prompt")
"""Names of the values."""


class Shown(Protocol):
    """Converts token ids to text, with or without special tokens."""

    def __call__(self, ids: Sequence[int], special: bool = True) -> str: ...


class Sampled(NamedTuple):
    """Completions of one check, and their prompt.

    Attributes:
        finish_reason: of each completion: stop (it ended by itself), length, aborted or error. With
            several turns, that of the last reply; error if the environment failed.
        completion_ids: token ids of each completion. With several turns: all tokens after the
            prompt, as in TRL, so observations are included.
        rendered_prompt: the prompt as the model read it, special tokens included.
        version: newest version of the weights that sampled them: the number of updates.
    """

    finish_reason: list[str]
    completion_ids: list[list[int]]
    prompt_ids: list[int]
    rendered_prompt: str
    version: int = 0

    def of(self, index: int) -> dict[str, Any]:
        """Values for one completion, by parameter name."""
        return {
            "finish_reason": self.finish_reason[index],
            "completion_ids": list(self.completion_ids[index]),
            "prompt_ids": list(self.prompt_ids),
            "rendered_prompt": self.rendered_prompt,
        }


def extra_arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Names of `EXTRA_ARGUMENTS` that `function` names after its first two parameters.

    It must have Sixfold's form, not TRL's.
    """
    try:
        parameters = list(inspect.signature(function).parameters)
    except ValueError:  # a C function without a signature
        return frozenset()
    return frozenset(parameters[2:]) & frozenset(EXTRA_ARGUMENTS)
