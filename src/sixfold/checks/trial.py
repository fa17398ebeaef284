"""Trial of the rewards before training: a reward that always fails must not cost a warm-up."""

from __future__ import annotations

from collections.abc import Sequence

from ..environment.preflight import MakeAnswer
from ..errors import UserError
from ..types import Group, Task
from .environment import Environment

TRIAL_TASKS = 2


def try_rewards(environment: Environment, tasks: Sequence[Task], make: MakeAnswer) -> str:
    """Score made-up completions of a few tasks.

    The completions are the reference answer, a worked solution, an empty text, and a text that is
    no answer.

    Args:
        tasks: training tasks; the first ones are used.
        make: makes a trajectory that no model sampled.

    Returns:
        A warning if some checks fail, or if no reward applies; otherwise empty.

    Raises:
        UserError: if every check fails.
    """
    groups = [_answers(task, make) for task in tasks[:TRIAL_TASKS]]
    environment.score(groups, error_budget=1.0)
    rewards = [
        trajectory.reward
        for group in groups
        for trajectory in group.trajectories
        if trajectory.reward
    ]
    failed = [reward.error for reward in rewards if reward.error and not reward.not_applicable]
    if failed and len(failed) == len(rewards):
        raise UserError(
            f"environment.rewards: all {len(failed)} checks of made-up completions failed. The"
            f" first error: {failed[0]}. Fix the rewards before training."
        )
    if failed:
        return (
            f"environment.rewards: {len(failed)} of {len(rewards)} checks of made-up completions"
            f" failed. The first error: {failed[0]}. Completions whose check fails are not"
            " trained on."
        )
    if rewards and all(reward.not_applicable for reward in rewards):
        return (
            f"environment.rewards: every reward returned None for all {len(rewards)} made-up"
            " completions. Tasks to which no reward applies are not trained on."
        )
    return ""


def _answers(task: Task, make: MakeAnswer) -> Group:
    texts = dict.fromkeys(
        [
            *(() if task.trace is None else ("".join(task.trace),)),
            *(() if task.answer is None else (str(task.answer),)),
            "",
            "no answer at all",
        ]
    )
    return Group(task, [make(task, number, text) for number, text in enumerate(texts)])
