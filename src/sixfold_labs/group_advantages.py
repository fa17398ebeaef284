"""Advantages from the rewards of one group: REINFORCE, GRPO, RLOO and Dr. GRPO side by side."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome, Table

from .controls import SOURCE, seed_control

EPS = 1e-6
LEAST_STD = 1e-8
"""Below this standard deviation a group is degenerate."""

Advantages = Callable[[Sequence[float]], list[float]]


def std(rewards: Sequence[float]) -> float:
    """Population standard deviation."""
    mean = fmean(rewards)
    return math.sqrt(fmean((reward - mean) ** 2 for reward in rewards))


def degenerate(rewards: Sequence[float]) -> bool:
    """True if the rewards of a group are equal: it has no gradient."""
    return std(rewards) < LEAST_STD


def centred(rewards: Sequence[float]) -> list[float]:
    """r_i - mean: REINFORCE with a baseline, and Dr. GRPO."""
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def zscore(rewards: Sequence[float]) -> list[float]:
    """(r_i - mean) / (std + 1e-6) with the population std; 0 if all are equal. GRPO."""
    if degenerate(rewards):
        return [0.0] * len(rewards)
    size = std(rewards) + EPS
    return [a / size for a in centred(rewards)]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r_i - mean of the others, for at least 2 rewards. RLOO."""
    total, k = sum(rewards), len(rewards)
    return [reward - (total - reward) / (k - 1) for reward in rewards]


def functions(source: str) -> tuple[Advantages, Advantages, Advantages]:
    """(centred, zscore, leave_one_out) of this module, or of the library."""
    if source == "formula":
        return centred, zscore, leave_one_out
    import torch

    from sixfold.algorithm import advantages as library

    def one_group(function: Callable[..., torch.Tensor], *more: float) -> Advantages:
        def run(rewards: Sequence[float]) -> list[float]:
            values = torch.tensor(rewards, dtype=torch.float64)
            group = torch.zeros(len(rewards), dtype=torch.int64)
            found: list[float] = function(values, group, *more).tolist()
            return found

        return run

    return (
        one_group(library.group_mean),
        one_group(library.group_zscore, EPS),
        one_group(library.leave_one_out),
    )


def advantages(*, r0: float, r1: float, r2: float, source: str) -> Outcome:
    """Advantages of three rewards by five algorithms."""
    rewards = [r0, r1, r2]
    mean_of, zscore_of, others_of = functions(source)
    rows = {
        "REINFORCE": rewards,
        "REINFORCE, baseline": mean_of(rewards),
        "GRPO": zscore_of(rewards),
        "RLOO": others_of(rewards),
        "Dr. GRPO": mean_of(rewards),
    }
    equal = degenerate(rewards)
    return Outcome(
        values={
            "mean": fmean(rewards),
            "std": std(rewards),
            "degenerate": equal,
            "diagnostic": "degenerate: the step is skipped" if equal else "has a gradient",
        },
        tables=(
            Table(
                "Advantages", ("algorithm", "A0", "A1", "A2"), [(n, *a) for n, a in rows.items()]
            ),
        ),
        figures=tuple(Bars(n, "advantage", ("0", "1", "2"), a) for n, a in rows.items()),
    )


def grpo_group(*, r0: int, r1: int, r2: int, r3: int, source: str) -> Outcome:
    """GRPO advantages of four rewards of 0 or 1."""
    rewards = [float(reward) for reward in (r0, r1, r2, r3)]
    mean_of, zscore_of, _ = functions(source)
    around, scaled = mean_of(rewards), zscore_of(rewards)
    return Outcome(
        values={
            "mean": fmean(rewards),
            "std": std(rewards),
            "degenerate": degenerate(rewards),
            "advantages": scaled,
        },
        tables=(
            Table(
                "Group",
                ("sample", "reward", "centred", "advantage", "effect"),
                [
                    (i, rewards[i], around[i], scaled[i], _effect(scaled[i]))
                    for i in range(len(rewards))
                ],
            ),
        ),
        figures=(Bars("GRPO", "advantage", ("0", "1", "2", "3"), scaled),),
    )


def grpo_rloo(*, k: int, accuracy: float, seed: int, source: str) -> Outcome:
    """Centred (GRPO without std) and leave-one-out advantages of one sampled group."""
    draw = random.Random(seed)
    rewards = [float(draw.random() < accuracy) for _ in range(k)]
    mean_of, _, others_of = functions(source)
    around, others = mean_of(rewards), others_of(rewards)
    equal = degenerate(rewards)
    ratios = [b / a if a else None for a, b in zip(around, others, strict=True)]
    return Outcome(
        values={
            "mean": fmean(rewards),
            "ratio": next((r for r in ratios if r is not None), None),
            "expected_ratio": k / (k - 1),
            "degenerate": equal,
        },
        tables=(
            Table(
                "Group",
                ("sample", "reward", "GRPO, centred", "RLOO", "ratio"),
                [(i, rewards[i], around[i], others[i], ratios[i]) for i in range(k)],
            ),
        ),
        lines=("All rewards are equal: both advantages are 0.",) if equal else (),
    )


def _effect(advantage: float) -> str:
    return "none" if abs(advantage) <= 0.05 else "more likely" if advantage > 0 else "less likely"


def _reward(index: int, default: float) -> Control:
    return Control(f"r{index}", default, f"reward of sample {index}", low=0.0, high=1.0, step=0.01)


def _degenerate(outcome: Outcome) -> bool:
    return outcome.values["degenerate"] is True


ADVANTAGES = Lab(
    name="advantages",
    title="Three rewards, five algorithms: what each makes of one group",
    about=(
        "REINFORCE: r. With a baseline: r - mean. GRPO (arXiv:2402.03300): (r - mean) / (std +"
        " 1e-6), 0 if std < 1e-8. RLOO (arXiv:2402.14740): r - mean of the others. Dr. GRPO"
        " (arXiv:2503.20783): r - mean. The std is the population form."
    ),
    controls=(_reward(0, 0.0), _reward(1, 0.0), _reward(2, 1.0), SOURCE),
    run=advantages,
    breaking=Breaking(
        breaks={"r0": 0.5, "r1": 0.5, "r2": 0.5},
        safe={"r0": 0.0, "r1": 0.0, "r2": 1.0},
        why="Equal rewards do not say which sample was better, so all baselines leave 0.",
        failed=_degenerate,
    ),
)

GRPO_GROUP = Lab(
    name="grpo-group",
    title="Four rewards of 0 or 1 in GRPO: advantages and what they do",
    about=(
        "A_i = (r_i - mean) / (std + 1e-6) with the population std, arXiv:2402.03300. An advantage"
        " of at most 0.05 in size counts as no effect."
    ),
    controls=(
        *(Control(f"r{i}", 1 - i % 2, f"reward of sample {i}", low=0, high=1) for i in range(4)),
        SOURCE,
    ),
    run=grpo_group,
    breaking=Breaking(
        breaks={"r0": 1, "r1": 1, "r2": 1, "r3": 1},
        safe={"r0": 1, "r1": 1, "r2": 1, "r3": 0},
        why="A group that is all right or all wrong has advantages of 0.",
        failed=_degenerate,
    ),
)

LEAVE_ONE_OUT = Lab(
    name="grpo-rloo",
    title="GRPO against RLOO: the advantages differ by the factor K / (K - 1)",
    about=(
        "Centred: r_i - mean, which contains r_i itself. RLOO: r_i - mean of the other K - 1 ="
        " K / (K - 1) (r_i - mean). Rewards are 1 with the given accuracy. RLOO needs K >= 2."
    ),
    controls=(
        Control("k", 4, "samples of the prompt (K)", low=2, high=10),
        Control("accuracy", 0.5, "probability of reward 1", low=0.0, high=1.0, step=0.01),
        seed_control("the rewards"),
        SOURCE,
    ),
    run=grpo_rloo,
    breaking=Breaking(
        breaks={"accuracy": 1.0},
        safe={"accuracy": 0.5},
        why="A policy that is always right gives equal rewards, so both advantages are 0.",
        failed=_degenerate,
    ),
)

LABS = (ADVANTAGES, GRPO_GROUP, LEAVE_ONE_OUT)
