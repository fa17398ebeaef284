"""Before training: are the tasks worth training on, and can the reward be had for nothing?"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sixfold.types import Task

CONSTANTS = ("", "0", "1", "#0", "#1", "42#", "\\boxed{0}", "\\boxed{1}", "The answer is 1.", "true", "A")


@dataclass(frozen=True)
class Verdict:
    """pass_rate: share of the rollouts that solve their task. advice: one line for the user."""

    pass_rate: float
    label: Literal["too hard", "borderline", "productive", "too easy"]
    advice: str


def preflight(rewards: Sequence[float], solved_at: float = 0.5) -> Verdict:
    """Verdict on the rewards of some 50 rollouts; one of `solved_at` or more counts as solved. Raises ValueError if there are none.

    Under 5 % a group has hardly a sample to learn from, over 95 % hardly one to learn against; 10 to 80 % is where training is productive.
    """
    if not rewards:
        raise ValueError("preflight needs at least one reward")
    rate = sum(reward >= solved_at for reward in rewards) / len(rewards)
    if rate < 0.05:
        return Verdict(rate, "too hard", "warm up longer on worked solutions (sft.steps), or take easier tasks")
    if rate > 0.95:
        return Verdict(rate, "too easy", "take harder tasks: nearly every group will have equal rewards and teach nothing")
    if 0.10 <= rate <= 0.80:
        return Verdict(rate, "productive", "the tasks suit the model")
    return Verdict(rate, "borderline", "it can work; many groups will have equal rewards and teach nothing")


def baseline_scores(reward: Callable[[str, Task], float | None], tasks: Sequence[Task], seed: int = 0) -> dict[str, float]:
    """Mean reward of answers that know nothing: `random` text, and the best `constant` one. Both should be about 0: what they earn is free."""
    rng = random.Random(seed)
    babble = ["".join(rng.choices(string.printable, k=rng.randrange(1, 80))) for _ in tasks]
    constants = [[constant] * len(tasks) for constant in CONSTANTS]
    return {"random": _mean(reward, babble, tasks), "constant": max(_mean(reward, answers, tasks) for answers in constants)}


def _mean(reward: Callable[[str, Task], float | None], answers: Sequence[str], tasks: Sequence[Task]) -> float:
    return sum(reward(answer, task) or 0.0 for answer, task in zip(answers, tasks, strict=True)) / len(tasks)
