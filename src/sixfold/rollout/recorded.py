"""A generator and a rollout that return recorded trajectories instead of sampling.

`RecordedReplies` gives the replies of a trajectory to an episode, so that the environment answers
and rewards them again. `RecordedRollout` gives the groups of a step to the training loop.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import islice

from ..environment.base import Scorer
from ..renderer.renderer import Renderer
from ..types import Group, Kept, SamplingParams, Task, Trajectory, Turn
from .base import Choose
from .generator import Sampled, SampleKey
from .stop_watch import cut_at_stop
from .without_model import WithoutModel


class RecordEnds(Exception):
    """The environment asks for more replies than were recorded."""


class RecordedReplies(WithoutModel):
    """Generator that gives the replies of a recorded trajectory, one after the other.

    Args:
        trajectory: the recorded trajectory. None: there are no replies.
        renderer: decodes the replies, to find the stop strings that ended them. Needed if there
            are replies.
    """

    def __init__(
        self, trajectory: Trajectory | None = None, renderer: Renderer | None = None
    ) -> None:
        self._trajectory = trajectory
        self._renderer = renderer
        self._left = iter(trajectory.turns if trajectory else ())
        self._kept = _kept_sets(trajectory.kept) if trajectory and trajectory.kept else None

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        """Return the next recorded reply. The arguments are ignored, except `stops`.

        Raises:
            RecordEnds: if no recorded reply is left.
        """
        turn, done, renderer = next(self._left, None), self._trajectory, self._renderer
        if turn is None or done is None or renderer is None:
            raise RecordEnds("the environment asks for a reply after the last recorded one")
        span = slice(turn.start, turn.stop)
        cut = cut_at_stop(done.tokens[span], renderer, stops)
        return Sampled(
            tokens=done.tokens[span],
            logp=done.logp[span],
            version=done.version[span],
            finish_reason=turn.finish_reason,
            reused=0,
            seconds=turn.seconds,
            kept=None if self._kept is None else self._kept(turn),
            text=cut[1] if cut else None,
        )


def _kept_sets(kept: Kept) -> Callable[[Turn], Kept]:
    """Function from a turn to the kept sets of its tokens. Call it for each turn, in order."""
    ids, counts, mass = iter(kept.ids), iter(kept.counts), iter(kept.mass)

    def of_turn(turn: Turn) -> Kept:
        part = Kept()
        for count, share in islice(zip(counts, mass, strict=True), turn.stop - turn.start):
            part.add(array("i", islice(ids, count)), share)
        return part

    return of_turn


class RecordedRollout:
    """Rollout that gives recorded groups instead of sampling.

    Attributes:
        groups: groups of the next call, with their rewards.
    """

    samples = 1

    def __init__(self) -> None:
        self.groups: Sequence[Group] = ()

    @property
    def version(self) -> int:
        """Newest version of the weights that sampled the groups."""
        return max((v for g in self.groups for t in g.trajectories for v in t.version), default=0)

    def stats(self) -> dict[str, float]:
        """Empty: nothing was sampled."""
        return {}

    async def play(
        self,
        tasks: Sequence[Task],
        seed: int,
        scorer: Scorer | None = None,
        choose: Choose | None = None,
        on_sampled: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Group, None]:
        """Yield the recorded groups, in order. The arguments are ignored, except `on_sampled`."""
        on_sampled()
        for group in self.groups:
            yield group
