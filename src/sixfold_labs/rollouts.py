"""K samples of one prompt, scored: when does a group of rewards carry a gradient?"""

from __future__ import annotations

import random
from statistics import fmean

from sixfold.environment.pass_rate import degenerate_probability
from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome, Table

from .controls import seed_control
from .group_advantages import degenerate, std
from .verifier import last_integer

ANSWER = "12"


def digit_probability(temperature: float) -> float:
    """Probability that one digit is right: 1 - 0.3 T, between 0.2 and 0.95."""
    return min(max(1 - 0.30 * temperature, 0.2), 0.95)


def rollouts(*, k: int, temperature: float, seed: int) -> Outcome:
    """Sample K responses and score them."""
    draw = random.Random(seed)
    right = digit_probability(temperature)
    responses = ["".join(_digit(draw, right, digit) for digit in ANSWER) + "#" for _ in range(k)]
    rewards = [float(last_integer(response) == ANSWER) for response in responses]
    equal = degenerate(rewards)
    return Outcome(
        values={
            "mean_reward": fmean(rewards),
            "std_reward": std(rewards),
            "degenerate": equal,
            "expected_reward": right**2,
            "degenerate_probability": degenerate_probability(right**2, k),
        },
        tables=(
            Table(
                "Trajectories",
                ("sample", "response", "reward"),
                [
                    (i, r, reward)
                    for i, (r, reward) in enumerate(zip(responses, rewards, strict=True))
                ],
            ),
        ),
        figures=(Bars("Rewards", "reward", [str(i) for i in range(k)], rewards),),
        lines=(
            ("All rewards are equal: the group has no gradient, and the step is skipped.",)
            if equal
            else ()
        ),
    )


def _digit(draw: random.Random, right: float, digit: str) -> str:
    wrong = [other for other in "0123456789" if other != digit]
    return digit if draw.random() < right else draw.choice(wrong)


ROLLOUTS = Lab(
    name="rollouts",
    title="K samples of one prompt: rewards, and when the group has no gradient",
    about=(
        "The prompt asks for 3 + 4 + 5. Each of the two digits of the answer is right with"
        " probability p = 1 - 0.3 T, kept between 0.2 and 0.95. The verifier compares the last"
        " integer with 12. A group is degenerate if the population standard deviation of its"
        " rewards is below 1e-8; the probability is q^K + (1 - q)^K with q = p^2."
    ),
    controls=(
        Control("k", 4, "samples of the prompt (K)", low=1, high=16),
        Control("temperature", 1.0, "sampling temperature T", low=0.5, high=1.5, step=0.05),
        seed_control("the samples"),
    ),
    run=rollouts,
    breaking=Breaking(
        breaks={"k": 1},
        safe={"k": 16},
        why="One sample cannot differ from itself, so its group has no gradient.",
        failed=lambda outcome: outcome.values["degenerate"] is True,
    ),
)

LABS = (ROLLOUTS,)
