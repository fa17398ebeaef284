"""DAPO with each of its four changes on or off: a model of their effects on one run."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import fmean

from sixfold.pages.lab import Breaking, Chart, Control, Curve, Lab, Outcome

from .controls import seed_control, source_control
from .dapo_changes import STEPS, Changes

USEFUL_SHARE = 0.34
"""Share of steps with a gradient if degenerate groups are not replaced: p = 0.9, K = 4."""


def entropy_after(step: int, clip_higher: bool) -> float:
    """Entropy after `step` steps, from 1: it falls more slowly, and less far, with clip-higher."""
    decay, floor = (0.0015, 0.2) if clip_higher else (0.005, 0.02)
    return max(floor, 1 - decay * step)


def reward_at(step: int, changes: Changes) -> float:
    """Reward of a useful step, counted from 0. Low entropy caps what the policy can find."""
    progress = 1 / (1 + math.exp(-(step - 80) / 25))
    reward = 0.4 + 0.55 * progress
    if not changes.token_level and reward > 0.7:
        reward -= 0.0008 * (step - 80)
    reward = min(reward, 0.45 + 0.65 * entropy_after(step + 1, changes.clip_higher))
    return reward if changes.overlong_penalty else reward - 0.04 * progress


@dataclass(frozen=True)
class Run:
    """A run: reward of each step that has a gradient, and the relative entropy after each step.

    Attributes:
        rewards: reward of every step. None: the step has no gradient.
        entropies: entropy after every step, from 1.
        mean_length: mean tokens of an answer in the last 40 steps. None: not modelled.
    """

    rewards: list[float | None]
    entropies: list[float]
    mean_length: float | None


def modelled(changes: Changes, seed: int) -> Run:
    """The model of the published effects.

    Args:
        seed: decides which steps have a gradient without dynamic sampling.
    """
    draw = random.Random(seed)
    useful = [changes.dynamic_sampling or draw.random() < USEFUL_SHARE for _ in range(STEPS)]
    return Run(
        [reward_at(step, changes) if on else None for step, on in enumerate(useful)],
        [entropy_after(step + 1, changes.clip_higher) for step in range(STEPS)],
        None,
    )


def trained(changes: Changes, seed: int) -> Run:
    """A small policy trained with the library's parts."""
    from .dapo_training import train

    done = train(changes, seed)
    pairs = zip(done.rewards, done.useful, strict=True)
    return Run([r if on else None for r, on in pairs], done.entropies, fmean(done.lengths[-40:]))


def dapo_ablation(
    *,
    clip_higher: bool,
    dynamic_sampling: bool,
    token_level: bool,
    overlong_penalty: bool,
    seed: int,
    source: str,
) -> Outcome:
    """Train for 200 steps with the chosen changes."""
    changes = Changes(clip_higher, dynamic_sampling, token_level, overlong_penalty)
    run = (modelled if source == "formula" else trained)(changes, seed)
    average = 0.0
    rewards: list[tuple[float, float | None]] = []
    for step, reward in enumerate(run.rewards, 1):
        if reward is not None:
            average = 0.95 * average + 0.05 * reward
        rewards.append((step, average))
    return Outcome(
        values={
            "final_reward_average": average,
            "useful_steps": sum(reward is not None for reward in run.rewards),
            "steps": STEPS,
            "entropy": run.entropies[-1],
            "mean_length": run.mean_length,
        },
        figures=(
            Chart("Reward", "step", "reward average", (Curve("reward average", rewards),)),
            Chart(
                "Entropy",
                "step",
                "entropy, relative",
                (Curve("entropy", list(enumerate(run.entropies, 1))),),
            ),
        ),
    )


DAPO_ABLATION = Lab(
    name="dapo-ablation",
    title="DAPO without each of its four changes: clip-higher matters most",
    about=(
        "A model of DAPO's ablation (arXiv:2503.14476). Reward"
        " 0.4 + 0.55 progress with progress = sigmoid((step - 80) / 25), at most"
        " 0.45 + 0.65 entropy. Entropy falls by 0.0015 per step to 0.2 with clip-higher, otherwise"
        " by 0.005 to 0.02. Without dynamic sampling a step has a gradient with probability 0.34."
        " Without the token-level loss the reward falls by 0.0008 (step - 80) once it is above 0.7."
        " Without the overlong penalty it falls by 0.04 progress. Average: 0.95 and 0.05. With the"
        " library as source, a small policy is trained with sixfold's clipped surrogate, loss"
        " aggregation, overlong penalty and group advantages. Dynamic sampling replaces a group"
        " with equal rewards, in at most four rounds. The numbers are not those of the publication."
    ),
    controls=(
        Control("clip_higher", True, "wider clip band for A > 0: 1.28 instead of 1.2"),
        Control("dynamic_sampling", True, "replace groups with equal rewards"),
        Control("token_level", True, "average the loss over tokens, not sequences"),
        Control("overlong_penalty", True, "soft penalty for overlong responses"),
        seed_control("the samples"),
        source_control("a model of the published effects", "train a small policy"),
    ),
    run=dapo_ablation,
    breaking=Breaking(
        breaks={"clip_higher": False},
        safe={},
        why="Without clip-higher the entropy collapses, and the policy stops finding answers.",
        failed=lambda outcome: outcome.number("final_reward_average") < 0.7,
    ),
)

LABS = (DAPO_ABLATION,)
