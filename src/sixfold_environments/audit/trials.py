"""Score given texts, which no model sampled, with the rewards of an environment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from sixfold.checks.environment import Environment
from sixfold.environment.episode import (
    Action,
    Closing,
    End,
    Episode,
    MakeEpisode,
    final_reward,
    turn_reward,
)
from sixfold.errors import is_fault, one_line
from sixfold.event_loop import run_blocking
from sixfold.types import Group, Reward, Task, Trajectory
from sixfold.user_code import Blocked, Called, calling, own_copy

T = TypeVar("T")

MAX_TURNS = 16
"""Maximum replies in an episode of the audit. A longer episode ends without a final reward."""

Answer = str | Sequence[str]
"""Text of one reply, or all replies of an episode."""

ReadCalls = Callable[[Action, Sequence[Mapping[str, Any]]], Action]
"""Parses the tool calls of a reply. The second argument has the descriptions of the tools."""


class Trials:
    """Scores texts with the rewards of an environment.

    The token ids of a text are its UTF-8 bytes, because an audit has no tokenizer.

    Args:
        environment: the rewards. Their error budget is not applied: failed checks are findings.
        episode: plays a task in several turns. None: one reply is the whole completion.
        timeout_s: seconds for a step of an episode.
        read_calls: parses tool calls in episodes with tools. None: replies have no calls.

    Attributes:
        seconds: wall time of all checks so far.
        checked: number of texts that were scored.
    """

    def __init__(
        self,
        environment: Environment,
        episode: MakeEpisode | None = None,
        timeout_s: float = 5.0,
        read_calls: ReadCalls | None = None,
    ) -> None:
        self._environment = environment
        self._episode = episode
        self._timeout_s = timeout_s
        self._read_calls = read_calls
        self.seconds = 0.0
        self.checked = 0

    @property
    def full(self) -> float:
        """Score that counts as solved."""
        return self._environment.solved_rule.full

    def rewards(self, answers: Sequence[tuple[Task, Answer]]) -> list[Reward]:
        """Reward of each text, in the order given.

        Args:
            answers: tasks and texts. A task may occur several times. In an episode, a single text
                is given as every reply, and a list of texts as successive replies.
        """
        start = time.perf_counter()
        texts = [answer if isinstance(answer, str) else "".join(answer) for _, answer in answers]
        groups: dict[str, Group] = {}
        made = []
        for (task, _), text in zip(answers, texts, strict=True):
            group = groups.setdefault(task.id, Group(task, []))
            made.append(text_trajectory(task, len(group.trajectories), text))
            group.trajectories.append(made[-1])
        if self._episode:
            run_blocking(self._play(self._episode, answers, made))
        self._environment.score(list(groups.values()), error_budget=1.0)
        self.seconds += time.perf_counter() - start
        self.checked += len(made)
        return [t.reward or Reward.failed("not checked") for t in made]

    def solved(self, answers: Sequence[tuple[Task, Answer]]) -> list[bool]:
        """Whether each text solves its task. A failed check does not."""
        return [bool(reward.solved) for reward in self.rewards(answers)]

    def earned(self, answers: Sequence[tuple[Task, Answer]]) -> list[float]:
        """Score of each text as a share of the full score. 0 for a failed check."""
        full = self.full or 1.0
        return [(reward.score or 0.0) / full for reward in self.rewards(answers)]

    async def _play(
        self,
        make: MakeEpisode,
        answers: Sequence[tuple[Task, Answer]],
        trajectories: Sequence[Trajectory],
    ) -> None:
        for (task, answer), trajectory in zip(answers, trajectories, strict=True):
            try:
                trajectory.reward = await self._reward_of(make, task, answer)
            except BaseException as error:  # boundary: a failed episode is data
                if not is_fault(error):
                    raise
                trajectory.reward = Reward.failed(one_line(error))

    async def _reward_of(self, make: MakeEpisode, task: Task, answer: Answer) -> Reward | None:
        """Reward of one episode. None: the reward functions score it."""
        with calling(self._timeout_s):
            episode = make(own_copy(task))
        try:
            return await self._reply(episode, answer)
        finally:
            if isinstance(episode, Closing):
                # The episode is over: a failed close does not change its reward.
                with suppress(Exception):
                    await self._answer(episode.close)

    async def _reply(self, episode: Episode, answer: Answer) -> Reward | None:
        """Play an episode with given replies. None: the reward functions score it."""
        seen = await self._answer(episode.start)
        earned, tools = 0.0, seen.tools
        for turn in range(MAX_TURNS):
            if not isinstance(answer, str) and turn >= len(answer):
                break
            text = answer if isinstance(answer, str) else answer[turn]
            action = _action(text, seen.stops)
            if tools and self._read_calls:
                action = self._read_calls(action, tools)
            given = await self._answer(partial(episode.step, action))
            earned += turn_reward(given)
            if isinstance(given, End):
                final = final_reward(given)
                if final is None or final.value is None:
                    return final
                return self._with_score(replace(final, value=final.value + earned))
            seen = given
        return self._with_score(Reward(earned))

    async def _answer(self, call: Callable[[], Awaitable[T]]) -> T:
        async def answer() -> T:
            return await call()

        try:
            return await asyncio.wait_for(Called(answer, self._timeout_s), self._timeout_s)
        except Blocked as error:
            raise TimeoutError(str(error)) from error

    def _with_score(self, reward: Reward) -> Reward:
        """A reward from an episode, with its score."""
        rule = self._environment.solved_rule
        score = rule.score(reward.value or 0.0, reward.parts)
        solved = score is not None and rule.solves(score, reward.parts)
        return replace(reward, score=score, solved=solved)


def _action(text: str, stops: Sequence[str]) -> Action:
    """A reply as a rollout would return it: it ends before the first stop string."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    if not found:
        return Action(text)
    at, stop = min(found)
    return Action(text[:at], stopped_by=stop)


def text_trajectory(task: Task, sample: int, text: str) -> Trajectory:
    """Trajectory of a text that no model sampled. Its token ids are UTF-8 bytes."""
    prompt, ids = list(task.prompt_text.encode()) or [0], list(text.encode(errors="replace"))
    logp, version = [0.0] * len(ids), [-1] * len(ids)
    return Trajectory.one_turn(task.id, sample, prompt, ids, logp, version, "stop", text=text)
