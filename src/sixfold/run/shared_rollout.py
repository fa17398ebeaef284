"""A rollout whose tasks are divided among the ranks of a run.

Rank r plays the tasks i with i % size == r. Then the ranks exchange their scored groups. So every
rank has all groups, in the order of the tasks. Dynamic sampling, advantages and metrics are
computed from them on every rank, without further communication. A trajectory depends on the seed,
its task and its sample, not on the rank that plays it.

Failed checks are exchanged too, because all ranks share one error budget. If one rank fails, all
raise an error, so that they can still save the last step together.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from ..controller.rounds import Round, merged_stats
from ..environment.base import Scorer, Tally
from ..ranks import Ranks, together
from ..rollout.base import Choose, Rollout, groups_in_order
from ..types import Group, Task


class SharedRollout:
    """Rollout of all ranks.

    Args:
        inner: rollout of this rank.
        ranks: the ranks.
    """

    def __init__(self, inner: Rollout, ranks: Ranks) -> None:
        self._inner = inner
        self._ranks = ranks
        self._stats: dict[str, float] = {}

    @property
    def samples(self) -> int:
        """Episodes per task."""
        return self._inner.samples

    @property
    def version(self) -> int:
        """Version of the weights that sample, equal on all ranks."""
        return self._inner.version

    def stats(self) -> dict[str, float]:
        """Metrics of the last `play`, over all ranks."""
        return self._stats

    async def play(
        self,
        tasks: Sequence[Task],
        seed: int,
        scorer: Scorer | None = None,
        choose: Choose | None = None,
        on_sampled: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Group, None]:
        """As `Rollout.play`. All ranks must call this with the same tasks.

        `scorer` scores only the groups that this rank plays. Its error budget counts the checks of
        all ranks.

        Raises:
            Exception: if one rank has failed (`Ranks.agree`).
        """
        rank, size = self._ranks.rank, self._ranks.size
        own = tasks[rank::size]
        groups = list[Group]()
        failure: Exception | None = None
        try:
            if own:
                stream = self._inner.play(own, seed, scorer, choose, on_sampled)
                groups = await groups_in_order(stream, own)
        except Exception as error:  # noqa: BLE001  raised on all ranks
            failure = error
        self._ranks.agree(failure)
        # Without the tasks: their columns may hold objects that cannot be sent.
        played = [group.trajectories for group in groups]
        tally = scorer.tally() if scorer else Tally()
        shares = self._ranks.gather((played, self._inner.stats() if own else {}, tally))
        rounds = [
            Round([Group(task, t) for task, t in zip(tasks[r::size], found, strict=True)], s, 1, 0)
            for r, (found, s, _) in enumerate(shares)
        ]
        if scorer:
            others = [tally for r, (_, _, tally) in enumerate(shares) if r != rank]
            together(self._ranks, partial(scorer.count, others))
        busy = [r for r in rounds if r.groups]
        self._stats = merged_stats(busy) if busy else {}
        if "rollout/tok_s" in self._stats:  # ranks sample at the same time
            self._stats["rollout/tok_s"] = sum(r.stats["rollout/tok_s"] for r in busy)
        for i in range(len(tasks)):
            yield rounds[i % size].groups[i // size]
