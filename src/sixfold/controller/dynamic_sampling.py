"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): replace groups whose rewards are equal.

A group whose rewards are all equal gives no gradient. After each round of sampling, every slot with
such a group gets another task, until all groups are mixed or the rounds are used up.

The extra tasks depend only on the tasks of the step, its seed and the weights. No state is saved,
and a resumed run draws the same tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice

from ..types import Group, Task
from .mixture import weighted_order
from .rounds import Round, merged_stats
from .stream import step_seed

PlayRound = Callable[[Sequence[Task], int], Awaitable[Round]]
"""Samples and scores tasks with a seed."""


class Refill:
    """Policy that samples until the groups of a step have unequal rewards.

    Round 1 samples the tasks of the step with the seed of the step. Each later round has its own
    seed and samples one new task per open slot, never one already sampled in this step. A slot that
    is never filled keeps its original group, so a step always has as many groups as tasks.

    Args:
        tasks: all tasks of the run, from which new ones are drawn.
        max_rounds: maximum rounds per step. 1: nothing is replaced.
        weights: source name to weight, as in `MixtureStream`. Empty: all tasks have the same
            chance.
        whole_steps: new tasks are of the sources of the step.

    Raises:
        ValueError: if `max_rounds` is less than 1.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        max_rounds: int,
        weights: Mapping[str, float] | None = None,
        whole_steps: bool = False,
    ) -> None:
        if max_rounds < 1:
            raise ValueError(f"max_rounds must be at least 1, got {max_rounds}")
        self._tasks = tasks
        self._max_rounds = max_rounds
        self._weights = weights or {}
        self._whole_steps = whole_steps

    async def groups(
        self, first: Round, taken: Collection[str], seed: int, play: PlayRound
    ) -> tuple[list[Group], dict[str, float]]:
        """Sample one scored group per slot.

        Slot i holds the i-th group of the first round, or the mixed group that replaced it. The
        first mixed group of a round goes to the first open slot.

        Args:
            first: round of the tasks of the step.
            taken: ids of other tasks that are not drawn.
            seed: seed of the step.
            play: samples and scores a further round.

        Returns:
            The groups, and the metrics over all rounds with the cost of refilling.
        """
        rounds = [first]
        slots = list(rounds[0].groups)
        open_slots = deque(i for i, group in enumerate(slots) if not mixed(group))
        taken = {group.task.id for group in slots} | {*taken}
        sources = {group.task.source for group in slots} if self._whole_steps else None
        further = self._further(taken, sources, len(slots), seed)
        while (
            open_slots
            and len(rounds) < self._max_rounds
            and (chosen := list(islice(further, len(open_slots))))
        ):
            rounds.append(await play(chosen, step_seed(seed, len(rounds) + 1)))
            for group in filter(mixed, rounds[-1].groups):
                slots[open_slots.popleft()] = group
        return slots, merged_stats(rounds) | _dynamic_stats(rounds, slots)

    def _further(
        self, taken: Collection[str], sources: Collection[str] | None, slots: int, seed: int
    ) -> Iterator[Task]:
        """Tasks that are not taken, in an order drawn from the seed of the step.

        Yields at most as many as the rounds can use. sources: those to draw from. None: all.
        """
        tasks = [t for t in self._tasks if t.source in sources] if sources else self._tasks
        count = min(len(tasks), slots * (self._max_rounds - 1) + len(taken))
        for i in weighted_order(tasks, count, f"{seed}/refill", self._weights):
            if tasks[i].id not in taken:
                yield tasks[i]


def mixed(group: Group) -> bool:
    """True if two known rewards of the group differ. Failed checks have no reward.

    Rewards of turns are compared by the index of the turn, and those of steps in order, not by
    token position, because replies differ in length.
    """
    found = set[tuple[object, ...]]()
    for t in group.trajectories:
        if t.reward and t.reward.value is not None:
            turns = tuple((i, turn.reward) for i, turn in enumerate(t.turns) if turn.reward)
            found.add((t.reward.value, turns, tuple(step for _, step in t.reward.steps)))
    return len(found) > 1


def _all_groups(rounds: Sequence[Round]) -> list[Group]:
    return [group for r in rounds for group in r.groups]


def _tokens(groups: Sequence[Group]) -> float:
    return float(sum(group.sampled_tokens for group in groups))


def _dynamic_stats(rounds: Sequence[Round], kept: Sequence[Group]) -> dict[str, float]:
    groups = _all_groups(rounds)
    kept_trajectories = sum(len(g.trajectories) for g in kept)
    begun = sum(r.trajectories / r.stats.get("rollout/kept_frac", 1.0) for r in rounds)
    dropped = (
        _tokens(groups)
        - _tokens(kept)
        + sum(r.stats.get("rollout/dropped_tokens", 0.0) for r in rounds)
    )
    return {
        "rollout/kept_frac": kept_trajectories / begun,
        "rollout/dropped_tokens": dropped,
        "dynamic/rounds": float(len(rounds)),
        "dynamic/check_s": sum(r.check_s for r in rounds),
        **sampled_stats(groups, kept),
    }


def sampled_stats(groups: Sequence[Group], kept: Sequence[Group]) -> dict[str, float]:
    """Metrics of all sampled groups, of which some are kept."""
    sampled = sum(len(g.trajectories) for g in groups)
    unfilled = sum(not mixed(g) for g in kept)
    stats = {
        "dynamic/extra_frac": sampled / sum(len(g.trajectories) for g in kept) - 1,
        "dynamic/kept_frac": sum(map(mixed, groups)) / len(groups),
        "dynamic/unfilled": float(unfilled),
        "dynamic/degenerate_frac": unfilled / len(kept),
    }
    known = [value for g in groups for value in g.rewards if value is not None]
    judged = [
        t.reward.solved
        for g in groups
        for t in g.trajectories
        if t.reward and t.reward.solved is not None
    ]
    stats |= {"dynamic/reward_mean": sum(known) / len(known)} if known else {}
    return stats | ({"dynamic/solved_frac": sum(judged) / len(judged)} if judged else {})
