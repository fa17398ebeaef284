"""What a reward model is asked, wherever it runs, and what becomes of its answer."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..environment.grade import Grade
from ..types import Task
from .scorer import combined

Texts = Sequence[str | Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Asked:
    """K completions of one task.

    Attributes:
        prompt: the task's prompt: a text, or messages.
        completions: text of each.
        completion_ids: the token ids of each, as they were sampled.
        prompt_ids: those of the prompt.
        rendered_prompt: the prompt as the policy reads it.
        ended: whether each has ended, so that its turn has an end.
    """

    prompt: str | list[dict[str, Any]]
    completions: list[str]
    completion_ids: list[list[int]]
    prompt_ids: list[int]
    rendered_prompt: str
    ended: list[bool]

    @property
    def task(self) -> Task:
        """A task with the prompt, for a model that reads texts. A reply that is begun goes on."""
        if isinstance(self.prompt, str):
            return Task("scored", self.prompt)
        said: Any = tuple(self.prompt)
        return Task(
            "scored", said, form="continued" if said[-1]["role"] == "assistant" else "messages"
        )

    @classmethod
    def of(
        cls,
        prompts: Texts,
        completions: Texts,
        completion_ids: Sequence[Sequence[int]],
        prompt_ids: Sequence[Sequence[int]],
        rendered_prompt: Sequence[str],
        finish_reason: Sequence[str],
    ) -> Asked:
        """From the arguments of a reward function in TRL's form.

        Args:
            prompts: the task's prompt, once for each of K completions.
            completions: text of each, or a list with its message.
            completion_ids: the token ids of each, as they were sampled.
            prompt_ids: those of the prompt, once for each.
            rendered_prompt: the prompt as the policy reads it, once for each.
            finish_reason: why each ended.
        """
        said = prompts[0]
        return cls(
            said if isinstance(said, str) else [dict(message) for message in said],
            [c if isinstance(c, str) else str(c[-1]["content"]) for c in completions],
            [list(ids) for ids in completion_ids],
            list(prompt_ids[0]),
            rendered_prompt[0],
            [reason == "stop" for reason in finish_reason],
        )


UNSCORED = Grade(
    None,
    "infrastructure_error",
    "the reward model gives no number: prompt and completion exceed its context, or its weights are"
    " not finite",
)


def graded(found: Sequence[Tensor], std_factor: float, limit: float = 0.0) -> list[float | Grade]:
    """Rewards of completions: those of one model, or of an ensemble with the deviation as a metric.

    Args:
        found: [K] rewards of each model. NaN: the completion does not fit its context.
        std_factor: as for `combined`, as is `limit`.
    """
    values, std = combined(found, std_factor, limit)
    rows = zip(values.tolist(), std.tolist(), strict=True)
    if len(found) == 1:
        return [UNSCORED if math.isnan(value) else value for value, _ in rows]
    return [
        UNSCORED if math.isnan(value) else Grade(value, None, metrics={"std": deviation})
        for value, deviation in rows
    ]


class AskedReward:
    """A reward function in TRL's form that asks reward models elsewhere.

    Args:
        ask: gives the rewards [K] of each model.
        std_factor: as for `graded`, as is `limit`.

    Attributes:
        __name__: name in logs.
    """

    def __init__(
        self,
        ask: Callable[[Asked], Awaitable[list[Tensor]]],
        std_factor: float,
        limit: float = 0.0,
    ) -> None:
        self._ask, self._std_factor, self._limit = ask, std_factor, limit
        self.__name__ = "reward_model"

    async def __call__(
        self,
        prompts: Texts,
        completions: Texts,
        completion_ids: Sequence[Sequence[int]],
        prompt_ids: Sequence[Sequence[int]],
        rendered_prompt: Sequence[str],
        finish_reason: Sequence[str],
    ) -> list[float | Grade]:
        """Rewards of completions of one task. The arguments are those of `Asked.of`."""
        given = prompts, completions, completion_ids, prompt_ids, rendered_prompt, finish_reason
        return graded(await self._ask(Asked.of(*given)), self._std_factor, self._limit)
