"""What scores chains: an outcome reward model, or the recipe's own verifier as an oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sixfold.checks.environment import Environment
from sixfold.renderer.renderer import Renderer
from sixfold.reward_model.scorer import Scorer
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
