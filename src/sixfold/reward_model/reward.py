"""Reward models among `environment.rewards`: in the process of the run, in a worker, or served.

All completions of a task are scored in one call, which computes their prompt once. So scores do not
depend on which other tasks happen to be finished, and a resumed run gets the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..environment.grade import Grade
from ..environment.registry import RewardRow
from ..environment.rewards import RewardCallable
from ..environment.rewards import RewardFunction as Named
from ..errors import UserError
from ..recipe.reward_models import STAGE, is_address
from ..recipe.schema import RewardScoringConfig
from .asked import Asked, AskedReward, Texts, graded
from .model import load_reward_model
from .scorer import Scorer
from .served import ServedModels
from .step_scorer import ProcessScorer
from .worker_models import WorkerModels

_SETTING = "environment.rewards"
_ASKED = RewardRow("", verifier=None, times_itself=True, needs="reward_model")
"""A reward whose model runs elsewhere: it keeps its time limits and repeats its requests itself."""


class RewardFunction:
    """A reward function in TRL's form that asks reward models of this process.

    Args:
        scorers: the reward models.
        std_factor: as for `combined`, as is `limit`.

    Attributes:
        __name__: name in logs.
    """

    def __init__(self, scorers: Sequence[Scorer], std_factor: float, limit: float = 0.0) -> None:
        self._scorers = scorers
        self._std_factor, self._limit = std_factor, limit
        self.__name__ = "reward_model"

    def __call__(
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
        asked = Asked.of(*given)
        found = [rewards_of(one, asked) for one in self._scorers]
        return graded(found, self._std_factor, self._limit)


def rewards_of(scorer: Scorer, asked: Asked) -> Tensor:
    """[K] rewards by one model, float64. NaN of a completion that does not fit its context.

    The token ids that were sampled are scored if the model has the tokenizer of the policy.
    Otherwise the texts are encoded by the model's own tokenizer and chat template.

    Args:
        scorer: the model.
        asked: prompt and completions.

    Raises:
        UserError: if none fits.
    """
    if same_tokens(scorer, asked):
        prompt, completions = asked.prompt_ids, asked.completion_ids
    else:
        prompt, completions = scorer.encoded(asked.task, asked.completions, asked.ended)
    fits = torch.tensor([len(prompt) + len(ids) <= scorer.context for ids in completions])
    fits |= not fits.any()
    found = torch.full((len(completions),), torch.nan, dtype=torch.float64)
    scored = [ids for ids, fit in zip(completions, fits, strict=True) if fit]
    found[fits] = scorer.rewards(prompt, scored)
    return found


def reward_model(paths: Sequence[str], config: RewardScoringConfig) -> RewardCallable:
    """The reward of one reward model, or of an ensemble.

    Args:
        paths: model folders or hub ids, or addresses of servers.
        config: the recipe's [environment.reward_model] section.

    Raises:
        UserError: if one of them cannot be loaded.
    """
    if named := [path for path in paths if path.startswith(STAGE) or not path.strip()]:
        raise UserError(
            f"{_SETTING}: {named[0]!r} names a stage, and this recipe has no stage before it. Write"
            " reward_model:FOLDER"
        )
    if served := [path for path in paths if is_address(path)]:
        if len(served) < len(paths):
            raise UserError(
                f"{_SETTING}: an ensemble of {served[0]} and a folder. Serve all of its models, or"
                " none"
            )
        served_models = ServedModels(served, config)
        elsewhere = AskedReward(served_models.rewards, config.std_factor, config.limit)
        return Named("reward_model", elsewhere, _ASKED)
    if config.placement == "worker":
        device, _ = scoring_device(config)
        if device == "cuda":  # of this rank: the worker would take the first
            device = f"cuda:{torch.cuda.current_device()}"
        worker = WorkerModels(paths, config.model_copy(update={"device": device}))
        asked = AskedReward(worker.rewards, config.std_factor, config.limit)
        return Named("reward_model", asked, _ASKED, worker)
    scorers = load_scorers(paths, config, _SETTING)
    return RewardFunction(scorers, config.std_factor, config.limit)


def load_scorers(paths: Sequence[str], config: RewardScoringConfig, setting: str) -> list[Scorer]:
    """A scorer for each reward model.

    Args:
        paths: model folders or hub ids.
        config: the recipe's [environment.reward_model] section.
        setting: where the paths are given, for error messages.

    Raises:
        UserError: if one of them cannot be loaded, or there is no such device.
    """
    device, dtype = scoring_device(config)
    models = [
        load_reward_model(str(Path(path).expanduser()), device, dtype, setting) for path in paths
    ]
    return [Scorer(model, config.max_tokens) for model in models]


def scoring_device(config: RewardScoringConfig) -> tuple[str, torch.dtype]:
    """Device and dtype of reward models.

    Args:
        config: the recipe's [environment.reward_model] section.

    Raises:
        UserError: if there is no such device.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not torch.cuda.is_available():
        raise UserError(
            f"environment.reward_model.device = '{device}': no CUDA device found. Use cpu, or auto"
        )
    return device, torch.bfloat16 if config.precision == "bfloat16" else torch.float32


def same_tokens(scorer: Scorer | ProcessScorer, asked: Asked) -> bool:
    """True if the ids mean the same texts to the reward model as to the policy."""
    prompt, completions = asked.prompt_ids, asked.completion_ids
    if max(map(max, (prompt, *filter(None, completions)))) >= scorer.vocabulary:
        return False
    shown = scorer.renderer.shown
    return shown(prompt) == asked.rendered_prompt and all(
        shown(ids, special=False) == text
        for ids, text in zip(completions, asked.completions, strict=True)
    )
