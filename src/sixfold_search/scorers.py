"""What scores chains: an outcome reward model, or the recipe's own verifier as an oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sixfold.checkpoint.model_source import is_reward_model, model_folder
from sixfold.checks.environment import Environment
from sixfold.recipe.adapter_folder import folder_hash
from sixfold.recipe.reward_models import VERIFIER, listed_models
from sixfold.recipe.schema import EnvironmentConfig, ProcessScoringConfig, RewardScoringConfig
from sixfold.renderer.renderer import Renderer
from sixfold.reward_model.reward import load_scorers
from sixfold.reward_model.scorer import Scorer
from sixfold.reward_model.step_reward import load_process_scorer
from sixfold.reward_model.step_scorer import ProcessScorer
from sixfold.types import Group, Task, Trajectory


class OutcomeScorer:
    """Scores of whole completions by an outcome reward model: the sigmoid of its reward.

    A beginning is scored as if it were a completion.

    Args:
        scorer: the reward model.

    Attributes:
        tokens: tokens that the model has computed.
        renderer: with the model's tokenizer.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.tokens = 0
        self.renderer = scorer.renderer
        self._scorer = scorer

    def score(
        self, task: Task, completions: Sequence[str], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """One score per completion. `ends` is not read."""
        read = self._scorer.encoded(task, completions, [True] * len(completions))
        rewards: list[float] = torch.sigmoid(self._scorer.rewards(*read)).tolist()
        self.tokens = self._scorer.tokens
        return [[reward] for reward in rewards]


def scorer_folders(scorer: str) -> str:
    """Model folders of --scorer: of a reward model, or of a policy and its reference.

    Raises:
        UserError: if there is no such model.
    """
    paths = listed_models(scorer)
    one = len(paths) == 1
    return ",".join(model_folder(path, "--scorer", reward_model=one) for path in paths)


def scorer_weights(folders: str) -> str:
    """Hashes of the weights in `scorer_folders`, one after another. "" without a reward model."""
    found = map(Path, filter(None, folders.split(",")))
    return " ".join(folder_hash(one) for one in found if one.is_dir())


def scores_wholes(scorer: str) -> bool:
    """True for an outcome reward model."""
    return "," not in scorer and is_reward_model(scorer)


def load_scorer(
    folders: str, prm: ProcessScoringConfig, machine: RewardScoringConfig
) -> OutcomeScorer | ProcessScorer:
    """The reward model of --scorer.

    Args:
        folders: of `scorer_folders`.
        prm: how a process reward model is read, and where steps end.
        machine: device, precision and size.

    Raises:
        UserError: if it cannot be loaded.
    """
    if scores_wholes(folders):
        return OutcomeScorer(*load_scorers([folders], machine, "--scorer"))
    return load_process_scorer(folders.split(","), prm, machine, "--scorer")


def named_scorer(
    path: str, config: EnvironmentConfig, steps: str
) -> tuple[OutcomeScorer | ProcessScorer | None, str]:
    """The reward model, and where the steps end that it scores, or "".

    Without a reward model, or if the verifier scores, it is None. steps: where the user ends steps.

    Raises:
        UserError: if it cannot be loaded.
    """
    if path in ("", VERIFIER):
        return None, ""
    prm = config.prm.model_copy(update={"ends": config.prm.ends or steps})
    scorer = load_scorer(path, prm, config.reward_model)
    return scorer, scorer.ends if isinstance(scorer, ProcessScorer) else ""


class Oracle:
    """Scores of whole completions by the verifier of their task: 1 if it is solved, else 0.

    A search with it shows what a perfect reward model could reach.

    Args:
        environment: the verifier.
        renderer: encodes completions.

    Attributes:
        tokens: 0, as no model computes.
    """

    tokens = 0

    def __init__(self, environment: Environment, renderer: Renderer) -> None:
        self._environment = environment
        self._renderer = renderer

    def score(
        self, task: Task, completions: Sequence[str], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """One score per completion. `ends` is not read."""
        ids = self._renderer.encode(task)
        opened = self._renderer.opened(ids) or task.prefill
        trajectories = []
        for number, text in enumerate(completions):
            tokens = self._renderer.plain(text)
            known = tokens, [0.0] * len(tokens), [-1] * len(tokens)
            trajectories.append(
                Trajectory.one_turn(task.id, number, ids, *known, "stop", text=text, opened=opened)
            )
        # A failed check has the score 0; `compare` counts the failures over all tasks.
        self._environment.score([Group(task, trajectories)], error_budget=1.0)
        return [[float(bool(t.reward and t.reward.solved))] for t in trajectories]
