"""Work for the engine's thread: prompts, their choices, and the deltas that are sent back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..engine.scoring import PromptScore
from ..engine.sequence import Constraint, Request
from ..engine.sequence import Sequence as EngineSequence
from ..renderer.renderer import Renderer
from ..types import FinishReason, SamplingParams
from .generator import ALONE, GeneratorClosed, Peers
from .stop_watch import SequenceText

log = logging.getLogger("sixfold.engine")


@dataclass
class Delta:
    """New output of one choice. `text` may lag behind the tokens.

    Attributes:
        index: index of the choice.
        text: new text that is final. Empty if the job is not decoded.
        tokens: new token ids.
        logp: log-prob of each token.
        version: version of the weights that sampled each token.
        top: likeliest tokens at each position, id -> log-prob. Empty if they were not requested.
        finish_reason: set on the last delta of a choice.
        stopped: True on the last delta if a stop string ended the choice.
        sequence: the finished sequence, on the last delta. None if nothing was sampled.
        peers: on the last delta: the choices of the same prompt.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stopped: bool = False
    sequence: EngineSequence | None = None
    peers: Peers = ALONE


class RecordError(RuntimeError):
    """A choice could not be recorded."""


Record = Callable[[int, EngineSequence, str, FinishReason], None]
"""Records a choice that has ended: its index, its sequence, its text, and why it ended. Raises
RecordError if that fails."""


@dataclass(eq=False)
class Job:
    """Prompts that are sampled with the same parameters.

    The choices of a job are numbered: prompt index * len(samples) + position in `samples`.

    Attributes:
        names: name of each prompt's sampling noise.
        prompts: token ids of each prompt.
        params: sampling parameters.
        samples: indices of the samples of each prompt, all different.
        receive: called with each delta, or with the error that ended the job, in the thread of the
            event loop.
        stops: stop strings.
        stream: True to send deltas during sampling.
        decoded: True if the deltas have text.
        origin: position of the first token that has noise. None: the length of each prompt.
        adapter: name of the LoRA adapter, or None for the base model.
        constraint: restricts the tokens that may be sampled; None for no restriction.
        scored: True if the log-probs of the prompts are computed, before sampling.
        priority: larger values leave the queue first.
        record: called in the engine's thread with every choice that ends or is aborted, before its
            last delta is sent. A RecordError is sent instead of the delta. None for no record.
        due: by sample, the weight version that must sample each token (`Engine.add`).
        scores: the log-probs of the prompts. Set before the first delta arrives.
        requests: the engine's requests, one per prompt.
        loop: the event loop that submitted the job.
    """

    names: Sequence[str]
    prompts: list[list[int]]
    params: SamplingParams
    samples: Sequence[int]
    receive: Callable[[Delta | Exception], None]
    stops: tuple[str, ...] = ()
    stream: bool = False
    decoded: bool = False
    origin: int | None = None
    adapter: str | None = None
    constraint: Constraint | None = None
    scored: bool = False
    priority: int = 0
    record: Record | None = None
    due: Mapping[int, Sequence[int]] = field(default_factory=dict)
    scores: list[PromptScore] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop | None = None

    @property
    def choices(self) -> int:
        return len(self.prompts) * len(self.samples)


class Choice:
    """Converts one growing sequence to deltas, in the engine's thread.

    Args:
        job: the choice's job.
        index: index of the choice.
        renderer: decodes tokens. None if no job has text.

    Attributes:
        watched: True if the choice needs a check after every step, because it streams or has stop
            strings.
    """

    def __init__(self, job: Job, index: int, renderer: Renderer | None) -> None:
        self.job = job
        self.index = index
        self.watched = job.stream or bool(job.stops)
        self._reader = (
            SequenceText(renderer, job.stops, job.params.stop_token_ids)
            if renderer is not None and (job.decoded or job.stops)
            else None
        )
        self._delta = Delta(index)
        self._taken = 0
        self._told = 0

    @property
    def text(self) -> str:
        """The part of the completion's text that is final."""
        return "" if self._reader is None else self._reader.text

    def advance(self, sequence: EngineSequence) -> bool:
        """Add the sequence's new tokens to the delta.

        Returns:
            True if a stop string is complete. Tokens after it, from a step that sampled several,
            are removed from the sequence.
        """
        reader = self._reader
        stopped = reader is not None and reader.advance(sequence)
        first, self._taken = self._taken, len(sequence.logp)
        self._delta.tokens += sequence.tokens[len(sequence.request.prompt) + first :]
        self._delta.logp += sequence.logp[first:]
        self._delta.version += sequence.version[first:]
        self._delta.top += sequence.top[first:]
        if reader is not None and not stopped and sequence.finish_reason is not None:
            stopped = reader.finish()
        self._delta.text += self.text[self._told :]
        self._told = len(self.text)
        return stopped

    def take(self) -> Delta:
        """The output since the last call."""
        delta, self._delta = self._delta, Delta(self.index)
        return delta

    def last(self, sequence: EngineSequence, reason: FinishReason, stopped: bool) -> Delta:
        """The last delta."""
        delta = self.take()
        delta.finish_reason, delta.stopped, delta.sequence = reason, stopped, sequence
        return delta

    @property
    def has_text(self) -> bool:
        """True if there is text to stream. Tokens are sent together with their text."""
        return bool(self._delta.text)


def send_all(
    loop: asyncio.AbstractEventLoop, messages: list[tuple[Job, Delta | Exception]]
) -> None:
    try:
        loop.call_soon_threadsafe(_receive_all, messages)
    except RuntimeError:  # the event loop is closed
        log.warning("%d messages dropped: their callers are gone", len(messages))


def _receive_all(messages: list[tuple[Job, Delta | Exception]]) -> None:
    for job, message in messages:
        job.receive(message)


def refuse_all(jobs: Sequence[Job], error: GeneratorClosed) -> None:
    """Send an error to jobs that the engine does not take."""
    for job in jobs:
        if job.loop is not None:
            send_all(job.loop, [(job, error)])
