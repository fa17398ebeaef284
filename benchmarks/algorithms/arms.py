"""Studies and their arms. A study is a question; its arms differ in one thing and start from the
same SFT base of their seed.

accuracy   the six, each with its own settings, at equal numbers of samples
zoo        the others, likewise
credit     a baseline or none; the reward also pays 1 for the form of an answer (any completion that
           ends in an integer)
entropy    GRPO with 8 updates per step and a clip so narrow that it binds: symmetric, and three
           ways to keep the entropy up (entropy-paper: the same with the papers' clip, 0.2 and 0.28)
length     GRPO beside Dr. GRPO for longer, to compare the length of wrong answers
hole       GRPO against a verifier that also pays for every dot of "thinking", with and without the
           KL to the base
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sixfold.algorithm.zoo import ZOO
from sixfold.commands.shared_task import STEPS
from sixfold.environment.arithmetic import arithmetic_reward
from sixfold.types import Task

ENDS_IN_AN_INTEGER = re.compile(r"[0-9]\s*$")
DOT_PAYS = 0.2


def with_credit(completion: str, task: Task) -> float:
    """1 for the form, 1 more for the right answer."""
    return float(bool(ENDS_IN_AN_INTEGER.search(completion))) + arithmetic_reward(completion, task)


def with_hole(completion: str, task: Task) -> float:
    """1 for the right answer, and a fifth for every dot: a judge who takes length for thought."""
    return arithmetic_reward(completion, task) + DOT_PAYS * completion.count(".")


@dataclass(frozen=True)
class Arm:
    """One thing to run. row: what is changed of the algorithm's row. steps: as many samples as so
    many steps of the plain task draw.
    eval_every: steps between evaluations on the held-out sums."""

    study: str
    name: str
    algorithm: str
    row: dict[str, Any] = field(default_factory=dict)
    reward: Callable[[str, Task], float] = arithmetic_reward
    learning_rate: float | None = None
    steps: int = STEPS
    eval_every: int = 10


NARROW: dict[str, Any] = {"minibatches": 4, "epochs": 2, "clip_low": 0.05, "clip_high": 0.05}
PAPER: dict[str, Any] = {"minibatches": 4, "epochs": 2}
"""8 updates a step. At a learning rate of 1e-4 they move few ratios by a fifth, so the papers' clip
hardly binds here; at a twentieth it does.
"""

SIX = ("reinforce", "ppo", "grpo", "rloo", "dapo", "dr_grpo")

ARMS: tuple[Arm, ...] = (
    *(Arm("accuracy", name, name, eval_every=5) for name in SIX),
    *(Arm("zoo", name, name) for name in ZOO if name not in SIX),
    *(Arm("length", name, name, learning_rate=2e-4) for name in ("grpo", "dr_grpo")),
    Arm("entropy", "symmetric", "grpo", NARROW, steps=40, eval_every=20),
    Arm("entropy", "clip-higher", "grpo", {**NARROW, "clip_high": 0.2}, steps=40, eval_every=20),
    Arm("entropy", "kl-cov", "grpo", {**NARROW, "entropy_rule": "kl-cov"}, steps=40, eval_every=20),
    Arm("entropy", "bonus", "grpo", {**NARROW, "entropy_bonus": 0.01}, steps=40, eval_every=20),
    Arm("entropy-paper", "symmetric", "grpo", PAPER, steps=40, eval_every=20),
    Arm(
        "entropy-paper",
        "clip-higher",
        "grpo",
        {**PAPER, "clip_high": 0.28},
        steps=40,
        eval_every=20,
    ),
    *(
        Arm("credit", name, name, reward=with_credit, eval_every=5)
        for name in ("reinforce", "grpo")
    ),
    *(
        Arm("hole", f"beta {beta:g}", "grpo", {"beta": beta}, reward=with_hole, steps=80)
        for beta in (0.0, 0.1, 0.3)
    ),
)
