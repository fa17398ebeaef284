"""What every rollout does with a finished completion: make it a trajectory, and measure the lot."""

from __future__ import annotations

from collections.abc import Sequence

from ..types import FinishReason, Group, Kept, Trajectory


def completed(
    task_id: str,
    sample: int,
    prompt: list[int],
    completion: list[int],
    logp: list[float],
    version: list[int],
    finish_reason: FinishReason,
    text: str,
    seconds: float,
    kept: Kept | None = None,
    opened: str = "",
) -> Trajectory:
    """A prompt and what was sampled after it as one trajectory of one turn.

    Args:
        task_id: of the task.
        sample: index of the sample.
        prompt: token ids.
        completion: sampled token ids.
        logp: log-prob of each sampled token.
        version: weights that sampled each of them.
        finish_reason: why sampling ended.
        text: the completion as text.
        seconds: from admission to the last token.
        kept: what truncated sampling kept at each sampled token.
        opened: tag of the think block that the prompt left open.
    """
    length = len(prompt)
    return Trajectory(
        task_id=task_id,
        sample=sample,
        tokens=prompt + completion,
        prompt_length=length,
        mask=[False] * length + [True] * len(completion),
        logp=[0.0] * length + logp,
        version=[-1] * length + version,
        finish_reason=finish_reason,
        text=text,
        turns=[length],
        seconds=seconds,
        kept=kept,
        opened=opened,
    )


def rollout_metrics(groups: Sequence[Group], seconds: float, prefilled: int, reused: int, begun: Sequence[int] | None = None) -> dict[str, float]:
    """Metrics of one call. prefilled, reused: prompt tokens that the engine computed, and that it had in its cache. begun: sampled tokens of every
    sample that was begun, in the groups or not (None: those of the groups are all)."""
    trajectories = [t for g in groups for t in g.trajectories]
    lengths = [t.completion_length for t in trajectories]
    begun = lengths if begun is None else begun
    cut = [t.kept for t in trajectories if t.kept]
    metrics = {
        "rollout/tokens": float(sum(begun)),
        "rollout/prompt_tokens": float(prefilled + reused),
        "rollout/reused_frac": reused / max(1, prefilled + reused),
        "rollout/tok_s": sum(begun) / max(seconds, 1e-9),
        "rollout/length_mean": sum(lengths) / max(1, len(lengths)),
        "rollout/length_max": float(max(lengths, default=0)),
        "rollout/truncated_frac": sum(t.finish_reason == "length" for t in trajectories) / max(1, len(trajectories)),
        "rollout/kept_frac": len(trajectories) / max(1, len(begun)),
        "rollout/dropped_tokens": float(sum(begun) - sum(lengths)),
    }
    if cut:
        positions = max(1, sum(map(len, cut)))
        metrics |= {
            "rollout/kept_mean": sum(len(k.ids) for k in cut) / positions,
            "rollout/kept_mass_frac": sum(sum(k.mass) for k in cut) / positions,
        }
    return metrics
