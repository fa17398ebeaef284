"""Rollout metrics. Shared by all rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..types import Group, Trajectory


def rollout_metrics(
    groups: Sequence[Group],
    seconds: float,
    prefilled: int,
    reused: int,
    sampled: int,
    started: int,
) -> dict[str, float]:
    """Metrics of one call of a rollout.

    Args:
        groups: the groups that the call returns.
        seconds: duration of the call.
        prefilled: prompt tokens that the engine computed.
        reused: prompt tokens that the engine found in its KV cache.
        sampled: sampled tokens, including those of samples that are in no group.
        started: number of samples that were started.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    lengths = [t.sampled_length for t in trajectories]
    cut = [t.kept for t in trajectories if t.kept]
    metrics = {
        "rollout/tokens": float(sampled),
        "rollout/prompt_tokens": float(prefilled + reused),
        "rollout/reused_frac": reused / max(1, prefilled + reused),
        "rollout/tok_s": sampled / max(seconds, 1e-9),
        "rollout/length_mean": sum(lengths) / max(1, len(lengths)),
        "rollout/length_max": float(max(lengths, default=0)),
        "rollout/truncated_frac": (
            sum(t.truncated for t in trajectories) / max(1, len(trajectories))
        ),
        # An agent's episode may have several trajectories.
        "rollout/kept_frac": min(1.0, len(trajectories) / max(1, started)),
        "rollout/dropped_tokens": float(sampled - sum(g.sampled_tokens for g in groups)),
    }
    played = [t for t in trajectories if t.environment]
    if played:
        metrics |= _episode_metrics(played)
    if cut:
        positions = max(1, sum(map(len, cut)))
        metrics |= {
            "rollout/kept_mean": sum(len(k.ids) for k in cut) / positions,
            "rollout/kept_mass_frac": math.fsum(m for k in cut for m in k.mass) / positions,
        }
    return metrics


def _episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of episodes with an environment."""
    replies = [turn for t in trajectories for turn in t.turns]
    return {
        "rollout/turns_mean": len(replies) / len(trajectories),
        "rollout/tool_error_frac": sum(r.tool_errors > 0 for r in replies) / max(1, len(replies)),
        "rollout/episode_s": sum(t.ended - t.started for t in trajectories) / len(trajectories),
    }
