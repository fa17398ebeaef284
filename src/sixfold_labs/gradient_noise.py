"""Noise of the REINFORCE gradient: its standard error falls as 1 / sqrt(K)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean

from sixfold.pages.lab import Breaking, Chart, Control, Curve, Lab, Outcome, Table

from .controls import SOURCE, seed_control

TRUE = (1.0, 0.4)
GRID = 4096
"""Angles of the numerical integral."""

Vector = tuple[float, float]
Estimate = Callable[[Sequence[Vector], Sequence[float]], Vector]


def solve_probability(angle: float) -> float:
    """P(r = 1 | u) = P(u . TRUE > U(-0.5, 0.5)), for u at the angle on the unit circle."""
    dot = math.cos(angle) * TRUE[0] + math.sin(angle) * TRUE[1]
    return min(max(dot + 0.5, 0.0), 1.0)


@cache
def expected_gradient() -> Vector:
    """Exact gradient E[r u]: mean of P(r = 1 | u) u over all directions u, by a sum over a grid."""
    angles = [2 * math.pi * i / GRID for i in range(GRID)]
    return (
        fmean(solve_probability(a) * math.cos(a) for a in angles),
        fmean(solve_probability(a) * math.sin(a) for a in angles),
    )


@cache
def deviation() -> float:
    """Root of the mean squared distance of r u from its mean, for one sample.

    r u has length r, so E|r u|^2 = P(r = 1), which is 1/2 by symmetry.
    """
    x, y = expected_gradient()
    return math.sqrt(0.5 - x * x - y * y)


def mean_of_products(directions: Sequence[Vector], rewards: Sequence[float]) -> Vector:
    """mean of r u."""
    pairs = list(zip(directions, rewards, strict=True))
    return fmean(u[0] * r for u, r in pairs), fmean(u[1] * r for u, r in pairs)


def estimator(source: str) -> Estimate:
    """`mean_of_products`, or the same by automatic differentiation of the library's loss."""
    if source == "formula":
        return mean_of_products
    import torch

    from sixfold.algorithm.losses import policy_gradient

    def by_autograd(directions: Sequence[Vector], rewards: Sequence[float]) -> Vector:
        theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        logp = torch.tensor(directions, dtype=torch.float64) @ theta
        reward = torch.tensor(rewards, dtype=torch.float64)
        loss = policy_gradient(logp[:, None], reward[:, None]).mean()
        (gradient,) = torch.autograd.grad(loss, theta)
        return -float(gradient[0]), -float(gradient[1])

    return by_autograd


def gradient_noise(*, k: int, estimates: int, seed: int, source: str) -> Outcome:
    """Estimate the gradient many times from K samples each."""
    draw, estimate = random.Random(seed), estimator(source)
    exact = expected_gradient()
    found: list[Vector] = []
    for _ in range(estimates):
        angles = [draw.uniform(0, 2 * math.pi) for _ in range(k)]
        rewards = [float(draw.random() < solve_probability(angle)) for angle in angles]
        found.append(estimate([(math.cos(a), math.sin(a)) for a in angles], rewards))
    errors = [math.dist(one, exact) for one in found]
    rms = math.sqrt(fmean(error**2 for error in errors))
    against_true = math.sqrt(fmean(math.dist(one, TRUE) ** 2 for one in found))
    wrong = fmean(one[0] * exact[0] + one[1] * exact[1] <= 0 for one in found)
    law: list[tuple[float, float | None]] = [(n, deviation() / math.sqrt(n)) for n in range(1, 33)]
    return Outcome(
        values={
            "exact_gradient": list(exact),
            "last_estimate": list(found[-1]),
            "mean_of_last_50": [fmean(one[i] for one in found[-50:]) for i in (0, 1)],
            "rms_error": rms,
            "expected_error": deviation() / math.sqrt(k),
            "rms_distance_from_reward_direction": against_true,
            "share_pointing_away": wrong,
        },
        tables=(
            Table("Law", ("K", "sigma / sqrt(K)"), [law[n - 1] for n in (1, 2, 4, 8, 16, 32)]),
        ),
        figures=(
            Chart(
                "Error of the estimate",
                "K",
                "rms error",
                (Curve("sigma / sqrt(K)", law), Curve("measured", [(k, rms)])),
            ),
        ),
    )


GRADIENT_NOISE = Lab(
    name="gradient-noise",
    title="Noise of REINFORCE: the error of the gradient falls as 1 / sqrt(K)",
    about=(
        "u is uniform on the unit circle; r = 1 if u . (1, 0.4) exceeds a uniform number in"
        " [-0.5, 0.5]. An estimate is the mean of r u over K samples. Its error is measured against"
        " the exact expectation (0.285, 0.114). The distance to (1, 0.4) would not fall below 0.770"
        " at any K, because the expectation is that far away. With the library as source, the"
        " estimate is the gradient of sixfold's REINFORCE loss."
    ),
    controls=(
        Control("k", 8, "samples per estimate (K)", low=1, high=32),
        Control("estimates", 200, "number of estimates", low=1, high=1000),
        seed_control("the samples"),
        SOURCE,
    ),
    run=gradient_noise,
    breaking=Breaking(
        breaks={"k": 1},
        safe={"k": 32},
        why="With one sample the noise is twice the gradient, and many estimates point away.",
        failed=lambda outcome: outcome.number("share_pointing_away") > 0.25,
    ),
    most_outcomes=216,
)

LABS = (GRADIENT_NOISE,)
