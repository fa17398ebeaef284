"""Reward models among `environment.rewards`. They run in the process of the run.

All completions of a task are scored in one call, which computes their prompt once. So scores do not
depend on which other tasks happen to be finished, and a resumed run gets the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..environment.grade import Grade
from ..errors import UserError
from ..recipe.reward_models import STAGE
from ..recipe.schema import RewardScoringConfig
from ..types import Task
from .model import load_reward_model
from .scorer import Scorer, combined

_SETTING = "environment.rewards"


class RewardFunction:
    """A reward function in TRL's form that asks reward models.

    The token ids that were sampled are scored if a model has the tokenizer of the policy. Otherwise
    the texts are encoded by the model's own tokenizer and chat template.

    Args:
        scorers: the reward models.
        std_factor: as for `combined`.

    Attributes:
        __name__: name in logs.
    """

    def __init__(self, scorers: Sequence[Scorer], std_factor: float) -> None:
        self._scorers = scorers
        self._std_factor = std_factor
        self.__name__ = "reward_model"

    def __call__(
        self,
        prompts: Sequence[str | Sequence[Mapping[str, Any]]],
        completions: Sequence[str | Sequence[Mapping[str, Any]]],
        completion_ids: Sequence[Sequence[int]],
        prompt_ids: Sequence[Sequence[int]],
        rendered_prompt: Sequence[str],
        finish_reason: Sequence[str],
    ) -> list[float | Grade]:
        """Rewards of completions of one task.

        Args:
            prompts: the task's prompt, once for each of K completions.
            completions: text of each, or a list with its message.
            completion_ids: the token ids of each, as they were sampled.
            prompt_ids: those of the prompt, once for each.
            rendered_prompt: the prompt as the policy reads it, once for each.
            finish_reason: why each ended.

        Returns:
            K rewards. Those of an ensemble have its deviation as a metric.
        """
        texts = [c if isinstance(c, str) else str(c[-1]["content"]) for c in completions]
        found = []
        for scorer in self._scorers:
            if _same_tokens(scorer, prompt_ids[0], rendered_prompt[0], completion_ids, texts):
                found.append(scorer.rewards(prompt_ids[0], completion_ids))
                continue
            said: Any = prompts[0] if isinstance(prompts[0], str) else tuple(prompts[0])
            ended = [reason == "stop" for reason in finish_reason]
            found.append(scorer.rewards(*scorer.encoded(Task("scored", said), texts, ended)))
        values, std = combined(found, self._std_factor)
        if len(self._scorers) == 1:
            return list(values.tolist())
        return [
            Grade(value, None, metrics={"std": deviation})
            for value, deviation in zip(values.tolist(), std.tolist(), strict=True)
        ]


def reward_model(paths: Sequence[str], config: RewardScoringConfig) -> RewardFunction:
    """The reward of one reward model, or of an ensemble.

    Args:
        paths: model folders or hub ids.
        config: the recipe's [environment.reward_model] section.

    Raises:
        UserError: if one of them cannot be loaded.
    """
    if named := [path for path in paths if path.startswith(STAGE) or not path.strip()]:
        raise UserError(
            f"{_SETTING}: {named[0]!r} names a stage, and this recipe has no stage before it. Write"
            " reward_model:FOLDER"
        )
    scorers = load_scorers(paths, config, _SETTING)
    return RewardFunction(scorers, config.std_factor)


def load_scorers(paths: Sequence[str], config: RewardScoringConfig, setting: str) -> list[Scorer]:
    """A scorer for each reward model.

    Args:
        paths: model folders or hub ids.
        config: the recipe's [environment.reward_model] section.
        setting: where the paths are given, for error messages.

    Raises:
        UserError: if one of them cannot be loaded, or there is no such device.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not torch.cuda.is_available():
        raise UserError(
            f"environment.reward_model.device = '{device}': no CUDA device found. Use cpu, or auto"
        )
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    models = [
        load_reward_model(str(Path(path).expanduser()), device, dtype, setting) for path in paths
    ]
    return [Scorer(model, config.max_tokens) for model in models]


def _same_tokens(
    scorer: Scorer,
    prompt: Sequence[int],
    rendered: str,
    completions: Sequence[Sequence[int]],
    texts: Sequence[str],
) -> bool:
    """True if the ids mean the same texts to the reward model as to the policy."""
    if max(map(max, (prompt, *filter(None, completions)))) >= scorer.vocabulary:
        return False
    shown = scorer.renderer.shown
    return shown(prompt) == rendered and all(
        shown(ids, special=False) == text for ids, text in zip(completions, texts, strict=True)
    )
