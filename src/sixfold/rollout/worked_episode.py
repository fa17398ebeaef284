"""Worked solutions of episodes: an episode is played with the replies of a task's trace.

The environment answers them as it answers the policy. So SFT trains on the tokens of a rollout: the
replies are trained, and what the environment says is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from ..errors import UserError
from ..renderer.renderer import Renderer, RenderError
from ..types import Reward, SamplingParams, Task, Trajectory
from .generator import Sampled, SampleKey
from .player import Player
from .without_model import WithoutModel


class _Unplayable(Exception):
    """The replies do not fit the episode. The message says why."""


class Script(WithoutModel):
    """Generator that gives the replies of a worked solution, one after the other.

    A reply ends with a stop string or, if it has none, with the end of the turn.

    Args:
        renderer: converts the replies to tokens.
        replies: texts of the replies.
    """

    def __init__(self, renderer: Renderer, replies: Sequence[str]) -> None:
        self.left = deque(replies)
        self._renderer = renderer

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        if not self.left:
            raise _Unplayable("the environment asks for another reply after the last one")
        text = self.left.popleft()
        stop = max((stop for stop in stops if text.endswith(stop)), key=len, default="")
        said = text.removesuffix(stop)
        if early := [stop for stop in stops if stop in said]:
            raise _Unplayable(f"the reply {text!r} goes on after the stop string {early[0]!r}")
        ids = self._renderer.suffix_text(tokens, text).tokens
        ids = ids if stop else ids + self._renderer.turn_end_tokens
        return Sampled(
            tokens=ids,
            logp=[0.0] * len(ids),
            version=[self.version] * len(ids),
            finish_reason="stop",
            reused=0,
            seconds=0.0,
            text=said if stop else None,
        )


async def worked_episodes(player: Player, tasks: Sequence[Task]) -> list[Trajectory]:
    """Play each task's episode with the replies of its trace, or else with its answer.

    Args:
        player: its environment and limits are used.
        tasks: tasks with a trace or an answer.

    Raises:
        UserError: if the replies do not fit the episode.
    """
    return [await _play_worked(player, task) for task in tasks]


async def _play_worked(player: Player, task: Task) -> Trajectory:
    trace = task.worked
    script = Script(player.renderer, (trace,) if isinstance(trace, str) else trace)
    params = SamplingParams(max_tokens=player.limits.tokens)
    try:
        played = await replace(player, generator=script).play(
            task, 0, player.renderer.encode(task), params
        )
        if played.error:
            raise _Unplayable(played.error)
        if played.trajectory.outcome != "ended":
            raise _Unplayable(f"the episode ends by its limit ({played.trajectory.outcome})")
        if script.left:
            raise _Unplayable(f"the environment ends before the reply {script.left[0]!r}")
    except (_Unplayable, RenderError) as problem:
        raise UserError(
            f"task {task.id}: its worked solution does not fit the environment: {problem}. Correct"
            " its replies (data.trace_field), or set sft.steps = 0"
        ) from problem
    played.trajectory.reward = Reward(0.0)
    return played.trajectory
