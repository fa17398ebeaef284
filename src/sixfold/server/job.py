"""One HTTP request inside the server: its prompts, the choices being sampled for it, and what goes back to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine.scoring import PromptScore
from ..engine.sequence import Constraint, Request
from ..engine.sequence import Sequence as EngineSequence
from ..rollout.text_stream import CompletionText
from ..types import FinishReason, SamplingParams, Trajectory


@dataclass
class Delta:
    """What one choice gained. tokens, logp and version speak of the same sampled tokens, and so does top, the likeliest at each position, where
    asked for; text may lag behind them. finish_reason: set on its last.
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
        id: of the answer.
        prompts: token ids. Each is sampled n times; choice index = prompt * n + sample.
        params: how completions are drawn.
        n: completions of each prompt.
        stops: stop strings.
        stream: deltas are wanted as they come.
        task_id: for the record.
        asked: what else the record holds.
        adapter: its name, or None for the model as it is.
        constraint: which tokens may be sampled, or None for all.
        scored: whether the prompts' log-probs are wanted.
        scores: these, one a prompt, before the first delta comes.
        requests: the engine's.
        inbox: filled by the event loop on the engine thread's behalf.
        created: seconds since the epoch.
        open: choices that have not ended, as the reader has seen it.
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
    scores: list[PromptScore] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    inbox: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)
    created: float = field(default_factory=time.time)
    open: int = 0

    def __post_init__(self) -> None:
        self.open = self.choices

    @property
    def choices(self) -> int:
        """Completions of the job."""
        return len(self.prompts) * self.n

    async def deltas(self) -> AsyncIterator[Delta]:
        """What the choices gain, until all have ended. Raises what ended the job otherwise."""
        while self.open:
            item = await self.inbox.get()
            if isinstance(item, Exception):
                self.open = 0
                raise item
            self.open -= item.finish_reason is not None
            yield item

    async def answers(self) -> list[Delta]:
        """Every choice whole, in order. For a job that does not stream."""
        return sorted([delta async for delta in self.deltas()], key=lambda delta: delta.index)


class Choice:
    """The engine thread's side of one choice: turns a growing sequence into deltas.

    watched: it must be looked at after every step, as its text is streamed or may hold a stop string.
    """

    def __init__(self, job: Job, index: int, decode: Callable[[Sequence[int]], str]) -> None:
        self.job = job
        self.index = index
        self.watched = job.stream or bool(job.stops)
        self._text = CompletionText(decode, job.stops)
        self._delta = Delta(index)
        self._seen = 0
        self._told = 0

    @property
    def text(self) -> str:
        """What of the completion is settled."""
        return self._text.text

    def advance(self, sequence: EngineSequence) -> bool:
        """Take the sequence's new tokens in. True when they complete a stop string; those behind it, where a step drew several, are cut off."""
        at = len(sequence.request.prompt) + self._seen
        # The token that ended it is no text, also where only this request names it.
        used = self._text.push(sequence.tokens[at : -1 if sequence.finish_reason == "stop" else None])
        if used is not None:
            sequence.cut(at + used)
        new = sequence.tokens[at:]
        self._delta.tokens += new
        self._delta.logp += sequence.logp[self._seen :]
        self._delta.version += sequence.version[self._seen :]
        self._delta.top += sequence.top[self._seen :]
        self._seen += len(new)
        stopped = used is not None or (sequence.finish_reason is not None and self._text.finish())
        self._delta.text += self.text[self._told :]
        self._told = len(self.text)
        return stopped

    def take(self, finish_reason: FinishReason | None = None) -> Delta:
        """What has gathered since the last call."""
        delta, self._delta = self._delta, Delta(self.index)
        delta.finish_reason = finish_reason
        return delta

    @property
    def has_text(self) -> bool:
        """True when there is something to stream. Tokens whose text is held back wait for it."""
        return bool(self._delta.text)

    def trajectory(self, sequence: EngineSequence, reason: FinishReason, opened: str = "") -> Trajectory:
        """The exchange as training takes it; its text is what the client was given. opened: tag of a think block that the prompt left open."""
        prompt, sampled = len(sequence.request.prompt), len(sequence.logp)
        return Trajectory(
            task_id=self.job.task_id,
            sample=self.index,
            tokens=list(sequence.tokens),
            prompt_length=prompt,
            mask=[False] * prompt + [True] * sampled,
            logp=[0.0] * prompt + sequence.logp,
            version=[-1] * prompt + sequence.version,
            finish_reason=reason,
            text=self.text,
            turns=[prompt],
            seconds=sequence.seconds,
            kept=sequence.kept or None,
            opened=opened,
        )


def noise_key(prompt: Sequence[int]) -> str:
    """What names a prompt in the sampling noise: with the same seed, the same prompt gets the same answers, and another prompt other noise."""
    return "serve:" + ",".join(map(str, prompt))
