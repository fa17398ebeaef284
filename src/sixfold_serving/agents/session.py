"""One session: the requests of an agent in one episode, its reward and its trajectories."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sixfold.environment.episodes import AGENT
from sixfold.environment.grade import checked_value
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.conversations import Conversation, Conversations
from sixfold.rollout.generator import Sampled
from sixfold.rollout.player import Limits
from sixfold.types import PROMPT, Outcome, Reward, SamplingParams, Task, Trajectory


class RewardRefused(ValueError):
    """A posted reward is not accepted. The message says why."""


@dataclass(eq=False)
class Session:
    """Requests of one episode.

    Attributes:
        sample: index of the sample within the task.
        limits: maximum length of a sequence and maximum number of replies.
        renderer: converts messages to tokens.
        id: random id of the session, part of its base URL.
        reward: the posted reward, or None.
        limit: the limit that the last request exceeded, so that it was refused, or None.
        left: True if the client of the last request disconnected before its reply.
        ended: True once the agent has ended.
        running: calls of the generator that are in progress.
        latest: the last call of the generator that was started, or None.
        failure: gets the exception if the generator fails.
        began: start time, in seconds since the epoch.
        replies: number of replies, including those in progress.
    """

    task: Task
    sample: int
    params: SamplingParams
    limits: Limits
    renderer: Renderer
    id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    conversations: Conversations = field(init=False)
    reward: Reward | None = None
    limit: Outcome | None = None
    left: bool = False
    ended: bool = False
    running: set[asyncio.Future[Sampled]] = field(default_factory=set)
    latest: asyncio.Future[Sampled] | None = None
    failure: asyncio.Future[None] = field(init=False)
    began: float = field(default_factory=time.time)
    replies: int = 0
    # While the agent works: the time at which it started, plus the time that it has waited.
    # While it waits for replies: minus the time that it has used itself.
    _clock: float = field(default_factory=time.monotonic)
    _waiting: int = 0

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.renderer, self.task, self.sample)
        self.failure = asyncio.get_running_loop().create_future()

    def ask(self) -> None:
        """Count a request that waits for its reply. The agent's clock stops."""
        if not self._waiting:
            self._clock -= time.monotonic()
        self._waiting += 1

    def answered(self) -> None:
        """Count an answered request. The agent's clock continues after the last one."""
        self._waiting -= 1
        if not self._waiting:
            self._clock += time.monotonic()

    @property
    def seconds(self) -> float:
        """Time that the agent has used itself, in seconds, without waiting for replies."""
        return -self._clock if self._waiting else time.monotonic() - self._clock

    @property
    def is_cut(self) -> bool:
        """True if the latest reply reached its token limit."""
        call = self.latest
        if call is None or not call.done() or call.cancelled() or call.exception():
            return False
        return call.result().finish_reason == "length"

    def post(self, value: Any, parts: Mapping[str, Any]) -> None:
        """Set the reward of the session.

        Args:
            parts: named components, which are only logged.

        Raises:
            RewardRefused: the session has a reward, or a value is not a finite number.
        """
        if self.reward is not None:
            raise RewardRefused(
                f"this session already has a reward ({self.reward.value:g}). Post only one"
            )
        try:
            given = {name: checked_value(part) for name, part in parts.items()}
            self.reward = Reward(checked_value(value), given)
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardRefused(f"the reward {error}. Use a finite number") from error

    async def close(self) -> None:
        """End the session: running requests are cancelled, later ones are refused."""
        self.ended = True
        running = [*self.running]
        self.left = self.left or self.latest in running
        for call in running:
            call.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def trajectories(
        self,
        prompt: Sequence[int],
        outcome: Outcome,
        answer: str | None = None,
        failure: str = "",
    ) -> list[Trajectory]:
        """The conversations as trajectories, the main one first.

        Args:
            prompt: token ids of the task's prompt, for a session without a reply.
            outcome: how the episode ended.
            answer: text for the reward functions. None: the last reply.
            failure: how the agent failed, although the episode has a reward.
        """
        played = self.conversations.played
        if not played:
            return [self._trajectory(None, prompt, outcome, answer)]
        found = [self._trajectory(c, prompt, outcome, answer) for c in played]
        for other in found[1:]:  # all trajectories get the reward of the first
            other.graded = found[0].graded_text
        if self.reward is not None:
            # `sixfold replay` reads the reward from this event, which every trajectory needs.
            posted: dict[str, Any] = {
                "value": self.reward.value,
                "parts": dict(self.reward.parts),
                **({"failure": failure} if failure else {}),
            }
            for trajectory in found:
                *turns, last = trajectory.turns
                trajectory.turns = (*turns, replace(last, events=last.events + 1))
                trajectory.events += ({"kind": "posted_reward", **posted},)
        return found

    def _trajectory(
        self,
        conversation: Conversation | None,
        prompt: Sequence[int],
        outcome: Outcome,
        answer: str | None,
    ) -> Trajectory:
        """Make the trajectory of a conversation.

        Args:
            conversation: the conversation. None for a session without a reply.
            prompt: token ids of the task's prompt, for a session without a reply.
            outcome: how the episode ended.
            answer: text for the reward functions. None: the last reply.
        """
        if conversation is None:
            conversation = Conversation("", len(prompt))
            conversation.transcript.write(prompt, PROMPT * len(prompt))
        done, turns = conversation.transcript, conversation.transcript.turns
        reason = turns[-1].finish_reason if turns else "stop"
        if answer is None and len(turns) > 1:
            answer = self.renderer.opened(done.tokens[: turns[-1].start]) + done.pieces[-1]
        return Trajectory(
            task_id=self.task.id,
            sample=self.sample,
            tokens=done.tokens,
            provenance=done.provenance,
            logp=done.logp,
            version=done.version,
            turns=tuple(turns),
            outcome=reason if outcome == "ended" and reason != "stop" else outcome,
            text=done.text,
            kept=done.kept or None,
            routes=done.routes,
            opened=self.renderer.opened(done.tokens[: conversation.origin]),
            environment=AGENT,
            events=tuple(conversation.events),
            started=self.began,
            ended=time.time(),
            graded=answer,
        )
