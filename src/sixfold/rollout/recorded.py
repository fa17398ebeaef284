"""A generator and a collector that return recorded trajectories instead of sampling.

`RecordedReplies` gives the replies of a trajectory to an episode, so that the environment answers
and rewards them again. `RecordedGroups` gives the groups of a step to the training loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from ..renderer.renderer import Renderer
from ..types import Group, Kept, SamplingParams, Task, Trajectory, Turn
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


@dataclass
class RecordedGroups:
    """Collector that gives recorded groups instead of sampling. They may be of any age.

    Attributes:
        groups: groups of the next step, with their rewards.
    """

    groups: Sequence[Group] = ()

    def collect(
        self, tasks: Sequence[Task], seed: int, on_phase: Callable[[str], None]
    ) -> list[Group]:
        """The recorded groups. The arguments are ignored."""
        return [*self.groups]

    def stats(self) -> dict[str, float]:
        """Empty: nothing was sampled."""
        return {}
