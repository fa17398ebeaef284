"""REINFORCE on a bandit with five arms: the smallest policy gradient."""

from __future__ import annotations

import random

from sixfold.pages.lab import Bars, Breaking, Chart, Control, Curve, Lab, Outcome

from .controls import seed_control
from .softmax_policy import reinforce, softmax

ARMS = ("A", "B", "C", "D", "E")
REWARDS = (0.1, 0.3, 0.9, 0.4, 0.2)
BEST = REWARDS.index(max(REWARDS))


def bandit(*, eta: float, steps: int, seed: int) -> Outcome:
    """Train a softmax policy by REINFORCE without a baseline."""
    draw = random.Random(seed)
    logits = [0.0] * len(ARMS)
    policy = softmax(logits)
    arm, average = 0, 0.0
    curves: list[list[tuple[float, float | None]]] = [[], []]
    for step in range(steps):
        arm = draw.choices(range(len(ARMS)), policy)[0]
        reward = REWARDS[arm]
        logits = reinforce(logits, policy, arm, eta * reward)
        policy = softmax(logits)
        average = 0.9 * average + 0.1 * reward
        curves[0].append((step + 1, policy[BEST]))
        curves[1].append((step + 1, average))
    likely = policy.index(max(policy))
    return Outcome(
        values={
            "policy": policy,
            "most_likely_arm": ARMS[likely],
            "best_arm": ARMS[BEST],
            "last_action": ARMS[arm],
            "last_reward": REWARDS[arm],
            "reward_average": average,
            "locked_on_wrong_arm": likely != BEST and policy[likely] > 0.9,
        },
        figures=(
            Bars("Policy", "probability", ARMS, policy),
            Chart(
                "Training",
                "step",
                "share",
                (Curve("pi(best arm)", curves[0]), Curve("reward average", curves[1])),
            ),
        ),
    )


BANDIT = Lab(
    name="bandit",
    title="REINFORCE on five arms: a large step locks the policy on a wrong arm",
    about=(
        "Samples an arm a from pi = softmax(theta), receives the arm's reward r, and updates"
        " theta_i += eta * r * (1[i = a] - pi_i). Rewards of the arms: 0.1, 0.3, 0.9, 0.4, 0.2."
        " All rewards are positive and there is no baseline, so every sampled arm becomes more"
        " likely. Reward average: 0.9 * average + 0.1 * r. Williams (1992), REINFORCE."
    ),
    controls=(
        Control("eta", 0.4, "learning rate", low=0.01, high=2.0, step=0.01),
        Control("steps", 200, "number of updates", low=1, high=2000, step=1),
        seed_control("the samples"),
    ),
    run=bandit,
    breaking=Breaking(
        breaks={"eta": 2.0, "steps": 500, "seed": 31},
        safe={"eta": 0.4, "steps": 500, "seed": 31},
        why="With large steps the first sampled arms win before the best arm is tried.",
        failed=lambda outcome: outcome.values["locked_on_wrong_arm"] is True,
    ),
    most_outcomes=343,
)

LABS = (BANDIT,)
