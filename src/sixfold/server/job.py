"""One HTTP request inside the server: its prompts, its choices and the deltas that it returns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine.scoring import PromptScore
from ..engine.sequence import Constraint, Request
from ..engine.sequence import Sequence as EngineSequence
from ..rollout.renderer.renderer import Renderer
from ..rollout.stop_watch import SequenceText
from ..types import FinishReason, SamplingParams, Trajectory


@dataclass
class Delta:
    """New output of one choice. `text` may lag behind the tokens.

    Attributes:
        index: index of the choice.
        text: new text that is final.
        tokens: new token ids.
        logp: log-prob of each token.
        version: version of the weights that sampled each token.
        top: likeliest tokens at each position, id -> log-prob. Empty if they were not requested.
        finish_reason: set on the last delta of a choice.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(eq=False)
class Job:
    """One request.

    Attributes:
        id: id of the answer.
        prompts: token ids of each prompt. Choice index = prompt index * n + sample index.
        params: sampling parameters.
        n: completions per prompt.
        stops: stop strings.
        stream: True to send deltas during sampling.
        task_id: task id in the record.
        asked: other fields of the record.
        adapter: name of the LoRA adapter, or None for the base model.
        constraint: restricts the tokens that may be sampled; None for no restriction.
        scored: True if the log-probs of the prompts are requested.
        priority: larger values leave the queue first.
        scores: these log-probs, one per prompt. Set before the first delta arrives.
        requests: the engine's requests, one per prompt.
        inbox: deltas, or the error that ended the job. Filled in the event loop's thread.
        created: creation time, in seconds since the epoch.
        open: number of choices whose last delta has not been read.
    """

    id: str
    prompts: list[list[int]]
    params: SamplingParams
    n: int
    stops: tuple[str, ...] = ()
    stream: bool = False
    task_id: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    constraint: Constraint | None = None
    scored: bool = False
    priority: int = 0
    scores: list[PromptScore] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    inbox: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)
    created: float = field(default_factory=time.time)
    open: int = 0

    def __post_init__(self) -> None:
        self.open = self.choices

    @property
    def choices(self) -> int:
        """Number of completions of the job."""
        return len(self.prompts) * self.n

    async def deltas(self) -> AsyncIterator[Delta]:
        """Deltas of all choices, until all have ended. Raises the error if the job failed."""
        while self.open:
            item = await self.inbox.get()
            if isinstance(item, Exception):
                self.open = 0
                raise item
            self.open -= item.finish_reason is not None
            yield item

    async def answers(self) -> list[Delta]:
        """One complete delta per choice, in order. Only for a job that does not stream."""
        return sorted([delta async for delta in self.deltas()], key=lambda delta: delta.index)


class Choice:
    """Converts one growing sequence to deltas, in the engine's thread.

    Args:
        job: the choice's job.
        index: index of the choice.
        renderer: decodes tokens.

    Attributes:
        watched: True if the choice needs a check after every step, because it streams or has stop
            strings.
    """

    def __init__(self, job: Job, index: int, renderer: Renderer) -> None:
        self.job = job
        self.index = index
        self.watched = job.stream or bool(job.stops)
        self._reader = SequenceText(renderer, job.stops)
        self._delta = Delta(index)
        self._told = 0

    @property
    def text(self) -> str:
        """The part of the completion's text that is final."""
        return self._reader.text

    def advance(self, sequence: EngineSequence) -> bool:
        """Add the sequence's new tokens to the delta.

        Returns:
            True if a stop string is complete. Tokens after it, from a step that sampled several,
            are removed from the sequence.
        """
        first = self._reader.seen
        stopped = self._reader.advance(sequence)
        self._delta.tokens += sequence.tokens[len(sequence.request.prompt) + first :]
        self._delta.logp += sequence.logp[first:]
        self._delta.version += sequence.version[first:]
        self._delta.top += sequence.top[first:]
        if not stopped and sequence.finish_reason is not None:
            stopped = self._reader.finish()
        self._delta.text += self.text[self._told :]
        self._told = len(self.text)
        return stopped

    def take(self, finish_reason: FinishReason | None = None) -> Delta:
        """The output since the last call."""
        delta, self._delta = self._delta, Delta(self.index)
        delta.finish_reason = finish_reason
        return delta

    @property
    def has_text(self) -> bool:
        """True if there is text to stream. Tokens are sent together with their text."""
        return bool(self._delta.text)

    def trajectory(
        self, sequence: EngineSequence, reason: FinishReason, opened: str = ""
    ) -> Trajectory:
        """The exchange as a trajectory for training. Its text is the text that the client received.

        Args:
            sequence: the finished sequence.
            reason: why it ended.
            opened: tag of the think block that the prompt leaves open; empty if there is none.
        """
        prompt = sequence.request.prompt
        return Trajectory.one_turn(
            self.job.task_id,
            self.index,
            prompt,
            sequence.tokens[len(prompt) :],
            sequence.logp,
            sequence.version,
            reason,
            text=self.text,
            seconds=sequence.seconds,
            kept=sequence.kept or None,
            opened=opened,
        )


def noise_key(prompt: Sequence[int]) -> str:
    """Key of a prompt for the sampling noise.

    With the same seed, equal prompts get the same completions, and different prompts get different
    noise.
    """
    return "serve:" + ",".join(map(str, prompt))
