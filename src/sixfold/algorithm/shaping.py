"""Rewards reshaped before they become advantages. All tensors are [B].

Lengths count completion tokens. A NaN reward (its check failed) stays NaN.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor


def overlong_penalty(
    lengths: Tensor,
    longest: int,
    buffer: int,
    penalty: float = 1.0,
    truncated: Tensor | None = None,
) -> Tensor:
    """Penalty for long completions, to be added to the reward (DAPO, arXiv:2503.14476 eq. 13).

    It is 0 up to longest - buffer, then falls linearly to -penalty at longest, and stays there.

    Args:
        lengths: [B] completion tokens.
        longest: longest completion, in tokens.
        buffer: width of the linear part, in tokens.
        penalty: largest penalty.
        truncated: bool [B]. If given, only rows cut off without an end of sequence pay. None: all
            long rows pay, as in DAPO.

    Returns:
        [B].

    Raises:
        ValueError: unless 0 < buffer <= longest.
    """
    _check(lengths, *([] if truncated is None else [truncated]))
    if not 0 < buffer <= longest:
        raise ValueError(f"the overlong buffer must be in (0, {longest}], got {buffer}")
    shaped = -penalty * ((lengths - (longest - buffer)) / buffer).clamp(0.0, 1.0)
    return shaped if truncated is None else torch.where(truncated, shaped, 0.0)


def kimi_length_reward(lengths: Tensor, correct: Tensor, group: Tensor) -> Tensor:
    """Length reward of Kimi k1.5 (arXiv:2501.12599 section 2.3.3).

    x = 0.5 - (length - shortest) / (longest - shortest) of the row's group

    The reward is x for a right answer, min(0, x) for a wrong one, and 0 if all lengths of the group
    are equal.

    Args:
        lengths: [B] completion tokens.
        correct: bool [B].
        group: [B] number of each row's group.

    Returns:
        [B].
    """
    _check(lengths, correct, group)
    size = lengths if lengths.is_floating_point() else lengths.to(torch.get_default_dtype())
    groups = int(group.max()) + 1
    longest = size.new_zeros(groups).scatter_reduce(0, group, size, "amax", include_self=False)[
        group
    ]
    shortest = size.new_zeros(groups).scatter_reduce(0, group, size, "amin", include_self=False)[
        group
    ]
    x = 0.5 - (size - shortest) / (longest - shortest).clamp_min(1)
    return torch.where(longest == shortest, 0.0, torch.where(correct.bool(), x, x.clamp_max(0.0)))


def cosine_length_reward(
    lengths: Tensor,
    correct: Tensor,
    longest: int,
    correct_short: float,
    correct_long: float,
    wrong_short: float,
    wrong_long: float,
    exceed: float,
) -> Tensor:
    """Cosine length reward (arXiv:2502.03373 section 4.1).

    The reward goes from `short` at length 0 to `long` at `longest` along half a cosine, separately
    for right and wrong answers. Short right answers and long wrong ones are worth more. The paper
    uses 2 to 1, -10 to 0 and -10 (`parts.COSINE`); TRL 1 to 0.5 and -1 to -0.5, without `exceed`.

    Args:
        lengths: [B] completion tokens.
        correct: bool [B].
        longest: longest completion, in tokens.
        correct_short: reward of a right answer at length 0.
        correct_long: reward of a right answer at `longest`.
        wrong_short: reward of a wrong answer at length 0.
        wrong_long: reward of a wrong answer at `longest`.
        exceed: reward from `longest` on.

    Returns:
        [B].
    """
    _check(lengths, correct)
    short = (1 + (pi * lengths / longest).cos()) / 2
    right = correct_long + (correct_short - correct_long) * short
    wrong = wrong_long + (wrong_short - wrong_long) * short
    return torch.where(lengths >= longest, exceed, torch.where(correct.bool(), right, wrong))


def stop_properly(rewards: Tensor, truncated: Tensor, coefficient: float) -> Tensor:
    """Reduce the rewards of truncated rows (ProRL v2; OpenRLHF).

    A coefficient from 0 to 1 multiplies the reward; a negative one replaces it. Multiplying a
    negative reward improves it, so use a negative coefficient if rewards can be below 0.

    Args:
        rewards: [B].
        truncated: bool [B].
        coefficient: at most 1.

    Returns:
        [B].

    Raises:
        ValueError: if the coefficient is above 1.
    """
    _check(rewards, truncated)
    if not coefficient <= 1:
        raise ValueError(
            "stop_properly multiplies by 0 to 1 or replaces by a negative number, got"
            f" {coefficient}"
        )
    shaped = (
        rewards * coefficient
        if coefficient >= 0
        else torch.where(rewards.isnan(), rewards, coefficient)
    )
    return torch.where(truncated, shaped, rewards)


class Moments(NamedTuple):
    """Statistics of one source's rewards.

    Attributes:
        seen: number of rewards.
        mean: their mean.
        squares: sum of (reward - mean)^2.
    """

    seen: float
    mean: float
    squares: float

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return sqrt(self.squares / max(self.seen, 1.0))

    def merged(self, other: Moments) -> Moments:
        """Statistics of both sets of rewards together (Chan et al. 1979)."""
        seen = max(self.seen + other.seen, 1.0)
        gap = other.mean - self.mean
        mean = self.mean + gap * other.seen / seen
        return Moments(
            self.seen + other.seen,
            mean,
            self.squares + other.squares + gap**2 * self.seen * other.seen / seen,
        )


class RunningWhiten:
    """(reward - mean) / std of the reward's source over the run so far, clamped to +-clip.

    Sources of different scale then have the same effect. With one scale for all sources, a drifting
    reward model would decide the sign of a verifier's advantages. The statistics use unclamped
    rewards. Clamped rewards would shrink the std that decides the clamping, and a rare success
    would fade to nothing.

    A source number must mean the same source at every step.

    Args:
        clip: bound, in standard deviations.

    Raises:
        ValueError: unless clip is positive.
    """

    def __init__(self, clip: float) -> None:
        if not clip > 0:
            raise ValueError(f"clip must be positive, got {clip}")
        self.clip = clip
        self.sources: dict[int, Moments] = {}

    def update(self, rewards: Tensor, source: Tensor) -> None:
        """Count rewards [B] of sources [B] (int64). Rewards that are not finite are left out."""
        _check(rewards, source)
        for number in source.unique().tolist():
            values = rewards[(source == number) & rewards.isfinite()].double()
            mean = float(values.mean()) if len(values) else 0.0
            new = Moments(float(len(values)), mean, float((values - mean).square().sum()))
            self.sources[number] = self.sources.get(number, Moments(0.0, 0.0, 0.0)).merged(new)

    def __call__(self, rewards: Tensor, source: Tensor) -> Tensor:
        """[B] whitened rewards; NaN where the reward is not finite.

        Raises:
            ValueError: for a source that `update` has not seen.
        """
        _check(rewards, source)
        unseen = set(source.tolist()) - set(self.sources)
        if unseen:
            raise ValueError(f"no statistics of source {min(unseen)} yet: update first")
        known = [self.sources[number] for number in source.tolist()]
        mean = rewards.new_tensor([m.mean for m in known], dtype=torch.float64)
        std = rewards.new_tensor([m.std for m in known], dtype=torch.float64).clamp_min(1e-6)
        whitened = ((rewards.double() - mean) / std).clamp(-self.clip, self.clip)
        return torch.where(rewards.isfinite(), whitened, torch.nan).to(rewards.dtype)

    def state(self) -> dict[str, list[float]]:
        """The statistics, JSON-serialisable: source number -> [count, mean, sum of squares]."""
        return {str(number): list(moments) for number, moments in self.sources.items()}

    def load(self, state: dict[str, list[float]]) -> None:
        self.sources = {int(number): Moments(*moments) for number, moments in state.items()}


def _check(first: Tensor, *others: Tensor) -> None:
    shapes = {tuple(t.shape) for t in (first, *others)}
    if len(shapes) != 1 or first.ndim != 1:
        raise ValueError(f"reward shaping takes [B] tensors of one length, got {sorted(shapes)}")
