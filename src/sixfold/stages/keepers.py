"""Rejection sampling: which of the K scored completions of a task are kept. No torch.

Each group is judged alone, so the choice does not depend on the order of groups or samples. Among
equal rewards, the smaller sample index comes first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..data.rows import check_value
from ..environment.episodes import AGENT
from ..errors import UserError
from ..recipe.schema import SampleConfig
from ..types import Group, Task, Trajectory

Reason = Literal[
    "error",
    "unfinished",
    "unusable",
    "unsolved",
    "below_threshold",
    "duplicate",
    "not_best",
    "over_per_task",
]
"""Why a completion is dropped. The first that holds, in this order.

- error: the check or the episode failed, or no reward applies.
- unfinished: a limit cut a reply or the episode. Who imitates it learns to stop too early.
- unusable: a reply is empty, or is no text that a dataset can hold: it has a special token, which
  would be read as plain text.
- unsolved: the verifier refused it.
- below_threshold: its reward is less than `sample.threshold`.
- duplicate: a kept completion of the task differs only in white space.
- not_best: another completion of the task is the best.
- over_per_task: `sample.per_task` completions with larger rewards are kept.
"""

REASONS: tuple[Reason, ...] = get_args(Reason)

Completion = str | tuple[str, ...]
"""A completion as a worked solution (`Task.trace`): text, or the text of each reply of an episode.
"""


@dataclass(frozen=True)
class Keeper:
    """A kept completion.

    Attributes:
        task: its task.
        sample: index of the sample within the task.
        completion: what a model can learn to write.
        reward: its total reward.
    """

    task: Task
    sample: int
    completion: Completion
    reward: float


@dataclass(frozen=True)
class Selection:
    """Kept and dropped completions.

    Attributes:
        kept: in the order of the groups, and within a group by sample index.
        dropped: the reason by (task id, sample index).
    """

    kept: list[Keeper] = field(default_factory=list)
    dropped: dict[tuple[str, int], Reason] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Number of kept completions, and of dropped ones by reason, zeros included."""
        found = Counter(self.dropped.values())
        return {"kept": len(self.kept), **{reason: found[reason] for reason in REASONS}}


def select(
    groups: Iterable[Group],
    config: SampleConfig,
    read: Callable[[Trajectory], Completion],
    has_special: Callable[[str], bool] = lambda text: False,
) -> Selection:
    """Choose the completions that become rows of a dataset.

    Args:
        groups: scored groups of different tasks.
        config: the recipe's [sample] section.
        read: returns the completion of a trajectory, see `completion_of`.
        has_special: whether a reply has a special token.
    """
    selection = Selection()
    for group in groups:
        read_once = {t.sample: read(t) for t in group.trajectories}
        reasons = _reasons(group.trajectories, config, read_once, has_special)
        selection.dropped.update({(group.task.id, k): why for k, why in sorted(reasons.items())})
        selection.kept.extend(
            Keeper(group.task, t.sample, read_once[t.sample], t.total_reward or 0.0)
            for t in sorted(group.trajectories, key=lambda t: t.sample)
            if t.sample not in reasons
        )
    return selection


def completion_of(
    trajectory: Trajectory, decode: Callable[[Sequence[int]], str], stops: Sequence[str]
) -> Completion:
    """The completion of a trajectory, as a worked solution that can be played again.

    Args:
        trajectory: of one turn, or of an episode.
        decode: converts the tokens of a reply to text, without its end token.
        stops: strings that end a reply of the episode. Characters that the last token has after
            one are cut off: the environment has not read them.

    Returns:
        Text, or for an episode the text of each reply.

    Raises:
        UserError: an outside agent has played the episode, which has prompts of its own.
    """
    if trajectory.environment == AGENT:
        raise UserError(
            "environment.agent: the conversations of an agent cannot become rows, because SFT could"
            " not play them again. Sample with environment.episode, or without an episode"
        )
    if not trajectory.environment:
        return trajectory.text
    texts = (decode(trajectory.tokens[turn.start : turn.stop]) for turn in trajectory.turns)
    return tuple(_until_stop(text, stops) for text in texts)


def check_enough(counts: Mapping[str, int], config: SampleConfig) -> None:
    """Refuse a dataset that is too small.

    Args:
        counts: `Selection.counts` of the stage.
        config: the recipe's [sample] section.

    Raises:
        UserError: fewer than `sample.min_rows` completions are kept.
    """
    if counts["kept"] >= config.min_rows:
        return
    dropped = ", ".join(f"{counts[r]:,} {r}" for r in REASONS if counts[r]) or "none"
    raise UserError(
        f"sample.min_rows = {config.min_rows}, but {counts['kept']} completions are kept (dropped:"
        f" {dropped}). Raise sample.samples or sample.tasks, choose easier tasks, or lower"
        " sample.min_rows"
    )


def _reasons(
    trajectories: Sequence[Trajectory],
    config: SampleConfig,
    read: Mapping[int, Completion],
    has_special: Callable[[str], bool],
) -> dict[int, Reason]:
    """Why samples of one task are dropped, by sample index."""
    found = {
        t.sample: _fault(t, read[t.sample], has_special) or _failure(t, config)
        for t in trajectories
    }
    reasons: dict[int, Reason] = {sample: why for sample, why in found.items() if why}
    good = [t for t in trajectories if t.sample not in reasons]
    best = config.keep == "best"
    limit = 1 if best else config.per_task or len(good)
    kept: list[str] = []
    for t in sorted(good, key=lambda t: (-(t.total_reward or 0.0), t.sample)):
        completion = read[t.sample]
        replies = (completion,) if isinstance(completion, str) else completion
        text = "\n".join(" ".join(reply.split()) for reply in replies)
        if config.deduplicate and text in kept:
            reasons[t.sample] = "duplicate"
        elif len(kept) == limit:
            reasons[t.sample] = "not_best" if best else "over_per_task"
        else:
            kept.append(text)
    return reasons


def _fault(
    trajectory: Trajectory, completion: Completion, has_special: Callable[[str], bool]
) -> Reason | None:
    """Why nobody should learn from a trajectory, whatever is kept."""
    reward = trajectory.total_reward
    if trajectory.finish_reason in ("error", "aborted") or reward is None:
        return "error"
    if not math.isfinite(reward):
        return "error"
    if trajectory.outcome != "ended" or any(t.finish_reason != "stop" for t in trajectory.turns):
        return "unfinished"
    replies = (completion,) if isinstance(completion, str) else completion
    try:
        check_value("", "", replies)
    except UserError:
        return "unusable"
    usable = all(reply.strip() and not has_special(reply) for reply in replies)
    return None if replies and usable else "unusable"


def _failure(trajectory: Trajectory, config: SampleConfig) -> Reason | None:
    """Why a trajectory with a known reward is not good enough."""
    if config.keep == "solved":
        solved = trajectory.reward.solved if trajectory.reward else None
        return "error" if solved is None else None if solved else "unsolved"
    below = config.keep == "reward" and (trajectory.total_reward or 0.0) < config.threshold
    return "below_threshold" if below else None


def _until_stop(text: str, stops: Sequence[str]) -> str:
    """A reply up to and including the stop string that is complete first."""
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text
