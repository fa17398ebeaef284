"""Values that rewards may ask for by parameter name, besides completion and task."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class Sampled(NamedTuple):
    """Completions of one check, and their prompt.

    Attributes:
        finish_reason: of each completion: stop (it ended by itself), length, aborted or error. With
            several turns, that of the last reply; error if the environment failed.
        completion_ids: token ids of each completion. With several turns: all tokens after the
            prompt, as in TRL, so observations are included.
        prompt_ids: token ids of the prompt.
        rendered_prompt: the prompt as the model read it, special tokens included.
    """

    finish_reason: list[str]
    completion_ids: list[list[int]]
    prompt_ids: list[int]
    rendered_prompt: str

    def of(self, index: int) -> dict[str, Any]:
        """Values for one completion, by parameter name."""
        return {
            "finish_reason": self.finish_reason[index],
            "completion_ids": list(self.completion_ids[index]),
            "prompt_ids": list(self.prompt_ids),
            "rendered_prompt": self.rendered_prompt,
        }


def asked_of(function: Callable[..., Any]) -> frozenset[str]:
    """Fields of `Sampled` that `function` names after its first two parameters.

    It must have Sixfold's form, not TRL's.
    """
    try:
        parameters = list(inspect.signature(function).parameters)
    except ValueError:  # a C function without a signature
        return frozenset()
    return frozenset(parameters[2:]) & frozenset(Sampled._fields)
