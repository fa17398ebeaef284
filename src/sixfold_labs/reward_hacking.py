"""A policy that can solve a task or write a phrase that the reward likes."""

from __future__ import annotations

import random

from sixfold.pages.lab import Bars, Breaking, Chart, Control, Curve, Lab, Outcome

from .controls import seed_control
from .softmax_policy import reinforce, softmax

ACTIONS = ("solve", "phrase")
CORRECT = (0.7, 0.4)
"""Probability of a correct answer after each action."""
ETA = 0.2
BREAK_EVEN = CORRECT[0] - CORRECT[1]
"""Bonus at which both actions have the same expected training reward."""


def train(rho: float, steps: int, seed: int) -> tuple[list[float], list[tuple[float, float]]]:
    """Train by REINFORCE on correct + rho * phrase.

    Returns:
        (logits, averages of training reward and correctness after each step).
    """
    draw = random.Random(seed)
    logits = [0.0, 0.0]
    averages: list[tuple[float, float]] = []
    reward_average = correct_average = 0.5
    for _ in range(steps):
        policy = softmax(logits)
        action = 0 if draw.random() < policy[0] else 1
        correct = float(draw.random() < CORRECT[action])
        reward = correct + rho * action
        logits = reinforce(logits, policy, action, ETA * reward)
        reward_average = 0.95 * reward_average + 0.05 * reward
        correct_average = 0.95 * correct_average + 0.05 * correct
        averages.append((reward_average, correct_average))
    return logits, averages


def reward_hacking(*, rho: float, steps: int, seed: int) -> Outcome:
    """Train a policy whose reward has a bonus for a phrase."""
    logits, averages = train(rho, steps, seed)
    solve, phrase = policy = softmax(logits)
    held_out = solve * CORRECT[0] + phrase * CORRECT[1]
    return Outcome(
        values={
            "probability_of_solve": solve,
            "probability_of_phrase": phrase,
            "train_reward": averages[-1][0],
            "held_out_average": averages[-1][1],
            "expected_train_reward": held_out + rho * phrase,
            "expected_held_out": held_out,
            "break_even_rho": BREAK_EVEN,
        },
        figures=(
            Bars("Policy", "probability", ACTIONS, policy),
            Chart(
                "Averages",
                "step",
                "reward",
                (
                    Curve("training reward", [(n, a[0]) for n, a in enumerate(averages, 1)]),
                    Curve("held-out reward", [(n, a[1]) for n, a in enumerate(averages, 1)]),
                ),
            ),
        ),
    )


REWARD_HACKING = Lab(
    name="reward-hacking",
    title="A bonus for a phrase: above the break-even the policy stops solving",
    about=(
        "The policy samples one of two actions. 'solve' is correct with probability 0.7; 'phrase'"
        " is correct with probability 0.4 and earns the bonus rho. REINFORCE with learning rate"
        " 0.2 maximises correct + rho * phrase. The held-out reward is correctness alone. Both"
        " actions have equal expected reward at rho = 0.3. The averages start at 0.5 and follow"
        " 0.95 * average + 0.05 * reward."
    ),
    controls=(
        Control("rho", 0.5, "bonus for the phrase", low=0.0, high=1.0, step=0.05),
        Control("steps", 1000, "number of samples", low=1, high=5000, step=100),
        seed_control("the samples", sweep=(0, 1, 2, 3)),
    ),
    run=reward_hacking,
    breaking=Breaking(
        breaks={"rho": 0.5, "steps": 1000},
        safe={"rho": 0.1, "steps": 1000},
        why="A bonus above 0.3 pays more than the correct answers that the phrase costs.",
        failed=lambda outcome: outcome.number("probability_of_phrase") > 0.5,
    ),
    most_outcomes=343,
)

LABS = (REWARD_HACKING,)
