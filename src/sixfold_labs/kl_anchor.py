"""The weight of the KL term: too low and the policy exploits the reward, too high and it stays."""

from __future__ import annotations

import math

from sixfold.pages.lab import Breaking, Chart, Control, Curve, Lab, Outcome

LOWEST, HIGHEST, START = 0.0, 10.0, 0.05
HACKED_ABOVE = 4.5
BONUS_FROM = 5.0
"""Above this theta the reward pays for its flaw."""


def reward(theta: float) -> float:
    """0.7 (1 - exp(-theta / 1.5)) + 0.5 max(0, theta - 5) / 5. The second term is the flaw."""
    return 0.7 * (1 - math.exp(-theta / 1.5)) + 0.5 * max(0.0, theta - BONUS_FROM) / 5


def reward_slope(theta: float) -> float:
    """Derivative of `reward`."""
    return 0.7 / 1.5 * math.exp(-theta / 1.5) + (0.1 if theta > BONUS_FROM else 0.0)


def kl_anchor(*, beta: float, eta: float, steps: int) -> Outcome:
    """Gradient ascent on reward(theta) - beta theta^2."""
    theta = START
    rewards: list[tuple[float, float | None]] = []
    divergences: list[tuple[float, float | None]] = []
    for step in range(1, steps + 1):
        theta += eta * (reward_slope(theta) - 2 * beta * theta)
        theta = min(max(theta, LOWEST), HIGHEST)
        rewards.append((step, reward(theta)))
        divergences.append((step, theta**2))
    hacked = theta > HACKED_ABOVE
    return Outcome(
        values={"theta": theta, "reward": reward(theta), "kl": theta**2, "hacked": hacked},
        figures=(
            Chart("Reward", "step", "reward", (Curve("reward", rewards),)),
            Chart(
                "Distance from the reference", "step", "KL, nats", (Curve("theta^2", divergences),)
            ),
        ),
        lines=(
            ("The policy has left the reference and collects the reward's flaw.",) if hacked else ()
        ),
    )


KL_ANCHOR = Lab(
    name="kl-anchor",
    title="The KL weight beta: 0 lets the policy hack the reward, 1 hardly lets it learn",
    about=(
        "One parameter theta in [0, 10], from 0.05. Reward: 0.7 (1 - exp(-theta / 1.5)), plus a"
        " flaw of 0.5 (theta - 5) / 5 above 5. KL to the reference: theta^2. Gradient ascent on"
        " reward - beta KL. The policy counts as hacked above theta = 4.5. With eta 0.05 and 200"
        " steps theta stays below 2.2 at any beta. The defaults are therefore 0.5 and 400."
    ),
    controls=(
        Control("beta", 0.05, "weight of the KL term", low=0.0, high=1.0, step=0.005),
        Control("eta", 0.5, "learning rate", low=0.01, high=0.5, step=0.01),
        Control("steps", 400, "number of updates", low=1, high=1000),
    ),
    run=kl_anchor,
    breaking=Breaking(
        breaks={"beta": 0.0},
        safe={"beta": 0.05},
        why="Without a KL term nothing holds the policy where the reward is still right.",
        failed=lambda outcome: outcome.values["hacked"] is True,
    ),
)

LABS = (KL_ANCHOR,)
