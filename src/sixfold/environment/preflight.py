"""Checks before training: difficulty of the tasks, and rewards of random and constant answers."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..types import Group, Task, Trajectory

CONSTANTS = (
    "",
    "0",
    "1",
    "#0",
    "#1",
    "42#",
    "\\boxed{0}",
    "\\boxed{1}",
    "The answer is 1.",
    "true",
    "A",
)

BASELINE_TASKS = 8
"""Tasks on which uninformed answers are tried: 12 checks each."""

FREE_ABOVE = 0.2
"""Mean reward from which an uninformed answer triggers a warning. With 8 tasks, a constant that is
right once by chance (0.125) stays below it. A constant that is right twice (0.25) does not.
"""


@dataclass(frozen=True)
class Difficulty:
    """Result of `preflight`.

    Attributes:
        pass_rate: share of the rollouts that solve their task.
        label: difficulty of the tasks for this model.
        advice: one line for the user.
    """

    pass_rate: float
    label: Literal["too hard", "borderline", "productive", "too easy"]
    advice: str


class Baseline(NamedTuple):
    """Mean reward of uninformed answers.

    Attributes:
        constant: mean reward of `answer`.
        answer: the answer of CONSTANTS with the highest mean reward.
    """

    random: float
    constant: float
    answer: str

    @property
    def warning(self) -> str:
        """One line if an uninformed answer earns `FREE_ABOVE` or more, otherwise empty."""
        earned = {
            f"random text earns {self.random:.2g}": self.random,
            f"the constant answer {self.answer!r} earns {self.constant:.2g}": self.constant,
        }
        free = [words for words, value in earned.items() if value >= FREE_ABOVE]
        return (
            f"the reward can be earned without solving the task: {' and '.join(free)} per task."
            " Training may learn to give such answers"
            if free
            else ""
        )


def preflight(solved: Sequence[bool]) -> Difficulty:
    """Difficulty of the tasks, from about 50 rollouts, each solved or not.

    Below 5%, a group has hardly any solved sample to learn from. Above 95%, it has hardly any
    failure to learn from. Training is productive from 10% to 80%.

    Raises:
        ValueError: if there are no rollouts.
    """
    if not solved:
        raise ValueError("preflight needs at least one rollout")
    rate = sum(solved) / len(solved)
    if rate < 0.05:
        return Difficulty(
            rate, "too hard", "warm up longer on worked solutions (sft.steps), or use easier tasks"
        )
    if rate > 0.95:
        return Difficulty(
            rate,
            "too easy",
            "use harder tasks: nearly all groups will have equal rewards and give no gradient",
        )
    if 0.10 <= rate <= 0.80:
        return Difficulty(rate, "productive", "the difficulty of the tasks suits the model")
    return Difficulty(
        rate,
        "borderline",
        "training may work, but many groups will have equal rewards and give no gradient",
    )


def expected_refill(degenerate: float, max_rounds: int) -> tuple[float, float]:
    """Expected cost of dynamic sampling where a group is degenerate with probability q.

    A slot is still open after r rounds with probability q^r, and draws one group in each round in
    which it is open. It takes 1 + q + ... + q^(R-1) groups, and stays degenerate with probability
    q^R. Tasks differ: q is the mean over tasks of `degenerate_probability`. The value at the mean
    pass rate would be lower.

    Returns:
        (extra groups sampled per group kept, share of slots never filled).
    """
    return sum(degenerate**r for r in range(1, max_rounds)), degenerate**max_rounds


MakeAnswer = Callable[[Task, int, str], Trajectory]
"""Task, sample number and text -> a trajectory with this text as its answer."""


def baseline_scores(
    score: Callable[[Sequence[Group]], None], tasks: Sequence[Task], make: MakeAnswer
) -> Baseline:
    """Mean reward of uninformed answers: random text and the best constant answer.

    Both should be about 0.

    Args:
        score: fills in rewards, as `Environment.score` does. A failed check counts as 0.
        make: makes a trajectory that no model sampled.

    Raises:
        ValueError: if there are no tasks. Errors of `score` also propagate.
    """
    if not tasks:
        raise ValueError("baseline_scores needs at least one task")
    rng = random.Random(0)
    groups = []
    for task in tasks:
        babble = "".join(rng.choices(string.printable, k=rng.randrange(1, 80)))
        groups.append(
            Group(
                task, [make(task, number, text) for number, text in enumerate((babble, *CONSTANTS))]
            )
        )
    score(groups)
    babbled, *constants = (
        sum(earned or 0.0 for earned in column) / len(tasks)
        for column in zip(*(g.rewards for g in groups), strict=True)
    )
    best = max(range(len(CONSTANTS)), key=constants.__getitem__)
    return Baseline(babbled, constants[best], CONSTANTS[best])


def made_up_answers(
    encode_prompt: Callable[[Task], list[int]],
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    end: Sequence[int] = (),
    longest: int = 1 << 30,
) -> MakeAnswer:
    """Function that makes trajectories no model sampled, after the policy's prompts.

    A text that is longer than the policy's completions is cut: a reward model could not read it.

    Args:
        encode_prompt: token ids of a task's prompt, for rewards that read them.
        encode: text to token ids.
        end: token ids that end a turn.
        longest: most tokens of a completion.
    """

    def make(task: Task, number: int, text: str) -> Trajectory:
        prompt, ids = encode_prompt(task), encode(text)
        if len(ids) > longest - len(end):
            ids = ids[: longest - len(end)]
            text = decode(ids)
        ids = [*ids, *end]
        logp, version = [0.0] * len(ids), [-1] * len(ids)
        return Trajectory.one_turn(task.id, number, prompt, ids, logp, version, "stop", text=text)

    return make
