"""R-206: three remedies against a reward model that drifts, on a fake one.

Half of the prompts are checked by a verifier (0 or 1, half of them right), half by a reward model
whose mean drifts away. With one mean and one scale for all rewards, the drift decides the sign of
the verifier's advantages. Each remedy brings right answers of the verifier back above 0 and wrong
ones below, by nearly as much as without a reward model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sixfold.algorithm.shaping import RunningWhiten
from sixfold.controller.stream import task_stream
from sixfold.reward_model.scorer import combined
from sixfold.types import Task

STEPS, PROMPTS, K = 40, 8, 8
SOURCES = ("verified", "judged")
TASKS = [Task(f"{name}-{i}", "?", source=name) for name in SOURCES for i in range(40)]
WEIGHTS = dict.fromkeys(SOURCES, 1.0)


def drifting(step: int, count: int, g: torch.Generator) -> Tensor:
    """The fake reward model: its mean rises by 0.5 per step."""
    return 0.5 * step + torch.randn(count, generator=g).double()


def scored(
    step: int, tasks: Sequence[Task], g: torch.Generator, limit: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Rewards [B] of K samples per task, and the number of each row's source."""
    source = torch.tensor([SOURCES.index(task.source) for task in tasks]).repeat_interleave(K)
    right = (torch.rand(len(source), generator=g) < 0.5).double()
    judged, _ = combined([drifting(step, len(source), g)], 0.0, limit)
    return torch.where(source == 0, right, judged), source


def standardised(rewards: Tensor) -> Tensor:
    """Advantages of REINFORCE++ without a critic: over the whole batch."""
    return (rewards - rewards.mean()) / rewards.std(correction=0)


def verified_advantages(
    whole_steps: bool = False, whiten: bool = False, limit: float = 0.0
) -> tuple[float, float]:
    """Mean advantage of right and of wrong answers of the verifier, in the last half of the run."""
    stream = task_stream(TASKS, PROMPTS, 0, WEIGHTS, whole_steps)
    g, running = torch.Generator().manual_seed(0), RunningWhiten(clip=5.0)
    right, wrong = [], []
    for step in range(1, STEPS + 1):
        rewards, source = scored(step, stream(step), g, limit)
        shaped = rewards
        if whiten:
            running.update(rewards, source)
            shaped = running(rewards, source)
        advantages = standardised(shaped)
        if step > STEPS // 2:
            right += advantages[(source == 0) & (rewards == 1)].tolist()
            wrong += advantages[(source == 0) & (rewards == 0)].tolist()
    return sum(right) / len(right), sum(wrong) / len(wrong)


def test_without_a_remedy_right_answers_get_negative_advantages() -> None:
    right, wrong = verified_advantages()
    assert wrong < right < -0.8


def test_whitening_per_source() -> None:
    right, wrong = verified_advantages(whiten=True)
    assert right > 0 and wrong < -0.7  # what is left: the judged half is above its running mean


def test_clipping_the_range_of_the_reward_model() -> None:
    right, wrong = verified_advantages(limit=1.0)
    assert right > 0.2 and wrong < -0.8


def test_batches_of_one_source() -> None:
    right, wrong = verified_advantages(whole_steps=True)
    assert right > 0.9 and wrong < -0.9  # as if there were no reward model


def test_a_limit_bounds_both_sides_and_changes_nothing_between() -> None:
    rewards, _ = combined([torch.tensor([-7.0, -0.5, 0.0, 2.0, 9.0])], 0.0, limit=2.0)
    assert rewards.tolist() == [-2.0, -0.5, 0.0, 2.0, 2.0]
