"""Plays episodes by running an agent against the endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sixfold.environment.grade import checked_value
from sixfold.errors import one_line
from sixfold.recipe.schema.environment import AgentConfig
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.environment_fault import EnvironmentFault
from sixfold.rollout.generator import Generator
from sixfold.rollout.meter import Meter
from sixfold.rollout.player import Limits, Played, Player
from sixfold.timeline import Timeline
from sixfold.types import Outcome, Reward, SamplingParams, Task

from ..requests import Limits as RequestLimits
from .command import CommandRunner
from .endpoint import Endpoint
from .function_runner import FunctionRunner
from .runner import Runner
from .session import RewardRefused, Session


@dataclass(frozen=True)
class _Ended:
    """How an agent has ended.

    Attributes:
        fault: its failure, or None.
    """

    given: object = None
    fault: EnvironmentFault | None = None


class AgentPlayer:
    """Plays episodes with an agent. The driver uses it like a `Player`.

    Args:
        player: has the generator, renderer, limits and stop strings.
        vocabulary: number of token ids.
        concurrency: maximum number of agents that run at the same time.
        timeout_s: time limit for an agent, in seconds. Time in which it waits for replies does not
            count.
    """

    def __init__(
        self,
        player: Player,
        runner: Runner,
        vocabulary: int,
        concurrency: int = 8,
        timeout_s: float = 60.0,
    ) -> None:
        self._player = player
        self._runner = runner
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._loop: asyncio.AbstractEventLoop | None = None
        limits = RequestLimits(
            vocabulary, player.limits.tokens, player.limits.tokens, player.renderer.longest_token
        )
        self._endpoint = Endpoint(
            player.generator, player.renderer, player.stops, limits, player.meter, player.timeline
        )

    @property
    def generator(self) -> Generator:
        """Samples the replies."""
        return self._player.generator

    @property
    def renderer(self) -> Renderer:
        """Converts messages to tokens, and tokens to text."""
        return self._player.renderer

    @property
    def meter(self) -> Meter:
        """Measures the generator."""
        return self._player.meter

    @property
    def timeline(self) -> Timeline:
        """Keeps when groups were played and scored."""
        return self._player.timeline

    @property
    def limits(self) -> Limits:
        """Limits that end an episode before the agent does."""
        return self._player.limits

    async def play(
        self, task: Task, sample: int, prompt: Sequence[int], params: SamplingParams
    ) -> Played:
        """Play one episode until the agent or a limit ends it, see `Plays.play`."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a semaphore belongs to one event loop
            self._loop, self._slots = loop, asyncio.Semaphore(self._concurrency)
        async with self._slots:
            session = Session(task, sample, params, self.limits, self.renderer)
            address = await self._endpoint.open(session)
            try:
                ended = await self._run(session, address)
            finally:
                await self._endpoint.end(session)
            return _played(session, prompt, ended)

    async def close(self) -> None:
        """Stop the endpoint and end the agents' processes."""
        await self._endpoint.close()
        await self._runner.close()

    async def _run(self, session: Session, address: str) -> _Ended:
        """Run the agent until it ends or reaches its time limit."""
        agent = asyncio.ensure_future(self._runner.run(session.task, address))
        try:
            while not agent.done():
                left = self._timeout_s - session.seconds
                if left <= 0:
                    raise EnvironmentFault(
                        f"it took longer than environment.agent.timeout_s = {self._timeout_s:g} s,"
                        " not counting the time in which it waited for replies",
                        "timeout",
                    )
                waiting: set[asyncio.Future[Any]] = {agent, session.failure}
                await asyncio.wait(
                    waiting, timeout=max(left, 0.01), return_when=asyncio.FIRST_COMPLETED
                )
                if session.failure.done():
                    session.failure.result()
            return _Ended(agent.result())
        except EnvironmentFault as fault:
            return _Ended(fault=fault)
        finally:
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)


def _played(session: Session, prompt: Sequence[int], ended: _Ended) -> Played:
    """The episode of a session that has ended.

    Args:
        prompt: token ids of the task's prompt.
        ended: how the agent has ended.
    """
    fault, answer = ended.fault, None
    if fault is None:
        answer, fault = _scored(session, ended.given)
    known, failure = session.reward, ""
    is_cut = fault is not None and fault.by_agent and session.is_cut
    stopped_at: Outcome | None = session.limit or ("length" if is_cut else None)
    unscored = known is None and answer is None
    if stopped_at and (unscored or fault) and not (fault and fault.outcome == "timeout"):
        # As in the player: an episode that a limit ends has the given final reward, or 0.
        session.reward = known = Reward(0.0) if known is None else known
        failure, fault = str(fault or ""), None
    if fault is None:
        fault = _unfinished(session, unscored)
    outcome = fault.outcome if fault else stopped_at or "ended"
    first, *more = session.trajectories(prompt, outcome, answer, failure)
    first.reward = None if fault else known
    return Played(first, f"agent: {fault}" if fault else "", more=tuple(more))


def _scored(session: Session, given: object) -> tuple[str | None, EnvironmentFault | None]:
    """Process the return value of an agent: a reward, a text for the reward functions, or None.

    Returns:
        The text or None, and a fault or None. A value that is neither a finite number nor a text is
        a fault.
    """
    if given is None:
        return None, None
    if isinstance(given, str):
        return given, None
    try:
        session.post(checked_value(given), {})
    except (RewardRefused, TypeError, ValueError, OverflowError) as error:
        return None, EnvironmentFault(one_line(error))
    return None, None


def _unfinished(session: Session, unscored: bool) -> EnvironmentFault | None:
    """Fault of an agent that ended by itself but left no episode that can be scored, or None.

    Args:
        unscored: True if the agent gave neither a reward nor a text.
    """
    if not session.conversations.played and session.limit:
        return EnvironmentFault(
            "its first request does not fit. Shorten it, or raise rollout.max_episode_tokens",
            session.limit,
        )
    if not session.conversations.played:
        return EnvironmentFault(
            "it ended without a reply of the policy. Check that it sends requests to its base URL"
        )
    if session.left and unscored and not session.limit:
        return EnvironmentFault(
            "its client disconnected in the middle of a reply, and it gave no reward", "aborted"
        )
    return None


def make_agent(config: AgentConfig, player: Player, vocabulary: int) -> AgentPlayer:
    """Make the player for the recipe's agent.

    Args:
        player: samples with the run's generator.
        vocabulary: number of token ids.

    Raises:
        UserError: if the program or the function cannot be used.
    """
    command = config.command
    runner: Runner = (
        FunctionRunner(command) if config.is_function else CommandRunner(command, config.answers)
    )
    return AgentPlayer(player, runner, vocabulary, config.concurrency, config.timeout_s)
