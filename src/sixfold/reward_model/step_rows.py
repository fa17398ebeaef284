"""Rows of a process reward model: which tokens its scores are read at.

A trainer reads the value of token t at the hidden state of t - 1. So a row is prompt and solution
and one closing token, which repeats the last. The mask has the token after each token that is read,
and the row's process rewards are the labels. A step without a label is read too, for reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..types import OBSERVATION, PROMPT, SAMPLED, Reward, Trajectory, Turn


def step_row(
    task_id: str,
    sample: int,
    prompt: Sequence[int],
    completion: Sequence[int],
    labels: Mapping[int, float],
) -> Trajectory:
    """One solution with its closing token.

    Args:
        task_id: id of its task.
        sample: its number.
        prompt: token ids, at least one.
        completion: token ids of the solution.
        labels: label of each step, or `UNLABELLED`, by the index in `completion` where it is read.
    """
    before, length = len(prompt), len(prompt) + len(completion) + 1
    read = {before + at + 1: label for at, label in sorted(labels.items())}
    letters = [SAMPLED if at in read else OBSERVATION for at in range(before, length)]
    return Trajectory(
        task_id=task_id,
        sample=sample,
        tokens=[*prompt, *completion, completion[-1]],
        provenance=PROMPT * before + "".join(letters),
        logp=[0.0] * length,
        version=[-1] * length,
        turns=tuple(Turn(at, at + 1) for at in read),
        reward=Reward(0.0, steps=tuple(read.items())),
    )
