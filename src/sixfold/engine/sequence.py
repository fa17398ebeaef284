"""What is asked of the engine, where it stands in the queue, and where each completion stands, as a few integers.

Inequality chain of a running sequence: 0 < prompt <= cached < length <= limit, where `cached` tokens have their keys and values in the cache: all but
the newest, which the next decode step computes. Of a ticket: 0 <= computed <= tokens, and sampling goes on when they are equal.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ..types import FinishReason, Kept, SamplingParams
from .adapters import LoadedAdapter

Rank = tuple[int, int, int, int]
"""Smaller goes first: (-priority, preempted before new, arrival, sample)."""


class Matcher(Protocol):
    """A constraint applied to one completion."""

    def allowed(self, completion: Many[int]) -> Tensor:
        """Which tokens may follow: [V] bool on the CPU, at least one of them true.

        A function of the completion alone. A matcher may remember the completion that it saw last.
        """


class Constraint(Protocol):
    """Which completions a request takes, e.g. those that are JSON of a schema."""

    def start(self) -> Matcher:
        """A matcher for one completion."""


@dataclass(eq=False)
class Request:
    """One prompt and the samples wanted of it.

    key: names the task in the sampling noise. samples: sample indices still to start. priority: a larger one goes first. arrival: place in the order
    of arrival. unfinished: samples that have not ended. claimed: its prompt's blocks are part of the reservation. stale: some of its keys and values
    may be of older weights, so the prefix cache must not have them. adapter: what the model's layers add for it. constraint: which tokens may be
    sampled, or None for all.
    """

    key: str
    prompt: list[int]
    params: SamplingParams
    samples: list[int]
    priority: int = 0
    arrival: int = 0
    unfinished: int = 0
    claimed: bool = False
    stale: bool = False
    adapter: LoadedAdapter | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        self.unfinished = len(self.samples)

    @property
    def space(self) -> int:
        """Where its keys and values lie in the prefix cache: they are the adapter's as well as the tokens'."""
        return 0 if self.adapter is None else self.adapter.number

    @property
    def limit(self) -> int:
        """Longest a sequence of this request gets, prompt included."""
        return len(self.prompt) + self.params.max_tokens


@dataclass(eq=False)
class Sequence:
    """One completion being sampled. tokens holds prompt and completion; logp and version speak of the completion only, and so does kept, which stays
    empty without truncation, and top: the likeliest tokens at each position and their log-probs, where the request asks for them. limit, stops: the
    request's.
    """

    request: Request
    sample: int
    noise: list[float]
    tokens: list[int]
    blocks: list[int]
    started: float
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    kept: Kept = field(default_factory=Kept)
    top: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seconds: float = 0.0
    limit: int = 0
    stops: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.limit, self.stops = self.request.limit, frozenset(self.request.params.stop_token_ids)

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.tokens)

    def cut(self, length: int) -> None:
        """Forget the sampled tokens from position `length` on. For a sequence that ends here."""
        sampled = length - len(self.request.prompt)
        del self.tokens[length:], self.logp[sampled:], self.version[sampled:], self.top[sampled:]
        self.kept.cut(sampled)

    @property
    def rank(self) -> Rank:
        """The last in this order is the first to be preempted."""
        return (-self.request.priority, 0, self.request.arrival, self.sample)


@dataclass(eq=False)
class Ticket:
    """A place in the queue: tokens that must be in the cache before sampling can begin, or go on.

    Of a request: its prompt, computed once and shared by the samples until all have started. Of a preempted sequence: all its tokens but the newest.
    blocks: those of the tokens computed so far. logits: [V], predicts the token after a computed prompt. version: of the weights that gave the
    logits.
    """

    request: Request
    tokens: list[int]
    sequence: Sequence | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    logits: Tensor | None = None
    version: int = 0

    @property
    def ready(self) -> bool:
        """Everything is in the cache."""
        return self.computed == len(self.tokens)

    @property
    def rank(self) -> Rank:
        """Where it belongs in the queue."""
        return (-self.request.priority, 1, self.request.arrival, 0) if self.sequence is None else self.sequence.rank


@dataclass(frozen=True)
class Chunk:
    """Positions [start, stop) of a ticket's tokens, to be computed in this step.

    blocks: the ticket's table. known: positions before it are in the cache already and must not be written again (a prompt that was cached to its end
    computes its last token once more, for the logits).
    """

    ticket: Ticket
    blocks: list[int]
    start: int
    stop: int
    known: int

    @property
    def prompt_stop(self) -> int:
        """Tokens before it are the prompt's; those from it on were sampled, before a preemption."""
        return max(self.start, min(self.stop, len(self.ticket.request.prompt)))
