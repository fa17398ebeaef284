"""State of the engine's work: requests, their tickets in the queue, and the sequences being
sampled.

Invariant of a running sequence: 0 < prompt <= cached < length <= limit. The KV cache holds `cached`
tokens: all but the newest, which the next decode step computes.

Invariant of a ticket: 0 <= computed <= tokens. Sampling starts or resumes when they are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ..types import FinishReason, Kept, Routes, SamplingParams
from .adapters import LoadedAdapter

Rank = tuple[int, int, int, int]
"""(-priority, 0 if preempted or 1 if new, arrival, sample). Smaller ranks go first."""


class Matcher(Protocol):
    """State of a constraint for one completion."""

    def allowed(self, completion: Many[int]) -> Tensor:
        """Mask of tokens that may follow a completion.

        The result must depend on the completion only. A matcher may cache the last completion.

        Returns:
            [V] bool on the CPU, with at least one True.
        """


class Constraint(Protocol):
    """Set of completions that a request allows, for example JSON that matches a schema."""

    def start(self) -> Matcher:
        """Create a matcher for one completion."""


@dataclass(eq=False)
class Request:
    """One prompt and its samples.

    Attributes:
        key: task name, which enters the sampling noise.
        prompt: token ids.
        samples: sample indices that have not started.
        priority: larger values go first.
        count: number of samples.
        unfinished: number of samples that have not ended.
        claimed: True if the prompt's blocks are part of the reservation.
        stale: True if some keys and values may come from older weights. They must not enter the
            prefix cache.
        adapter: adapter to apply, or None.
        constraint: which tokens may be sampled; None for all.
        origin: position that has the first noise of (seed, key, sample). The token at position p
            is drawn with noise p - origin. None: the prompt's length.
        due: by sample, the weight version that must sample each completion token. Samples that are
            not in it use the current weights.
    """

    key: str
    prompt: list[int]
    params: SamplingParams
    samples: list[int]
    priority: int = 0
    arrival: int = 0
    count: int = 0
    unfinished: int = 0
    claimed: bool = False
    stale: bool = False
    adapter: LoadedAdapter | None = None
    constraint: Constraint | None = None
    origin: int | None = None
    due: Mapping[int, Many[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.count = self.unfinished = len(self.samples)

    @property
    def first_noise(self) -> int:
        """Index of the noise that draws the first token after the prompt."""
        return 0 if self.origin is None else len(self.prompt) - self.origin

    @property
    def space(self) -> int:
        """Prefix cache space of the request: keys and values also depend on the adapter."""
        return 0 if self.adapter is None else self.adapter.number

    @property
    def limit(self) -> int:
        """Maximum length of a sequence of this request in tokens, including the prompt."""
        return len(self.prompt) + self.params.max_tokens


@dataclass(eq=False)
class Sequence:
    """One sample of a request: the prompt and the completion so far.

    Attributes:
        started: start time in seconds (`time.perf_counter`).
        reused: prompt tokens that were not computed for this sequence.
        logp: log-prob of each completion token.
        version: weight version that sampled each completion token.
        kept: tokens kept by truncation at each completion position; empty without truncation.
        top: most likely tokens and their log-probs at each completion position, if requested.
        routes: experts that computed each token, set when the sequence ends. None if experts are
            not recorded.
        finish_reason: None while the sequence runs.
        seconds: time from start to end.
        stops: the request's stop tokens.
    """

    request: Request
    sample: int
    noise: list[float]
    tokens: list[int]
    blocks: list[int]
    started: float
    reused: int = 0
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    kept: Kept = field(default_factory=Kept)
    top: list[dict[int, float]] = field(default_factory=list)
    routes: Routes | None = None
    finish_reason: FinishReason | None = None
    seconds: float = 0.0
    limit: int = 0
    stops: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.limit, self.stops = self.request.limit, frozenset(self.request.params.stop_token_ids)

    @property
    def length(self) -> int:
        """Number of tokens so far, including the prompt."""
        return len(self.tokens)

    @property
    def needs(self) -> int:
        """Weight version that must sample the next token. 0: any version may."""
        due = self.request.due.get(self.sample, ())
        return due[len(self.logp)] if len(self.logp) < len(due) else 0

    def cut(self, length: int) -> None:
        """Discard the tokens from position `length` on. Only for a sequence that ends here."""
        sampled = length - len(self.request.prompt)
        del self.tokens[length:], self.logp[sampled:], self.version[sampled:], self.top[sampled:]
        self.kept.cut(sampled)
        self.routes = self.routes and self.routes.cut(length)

    @property
    def rank(self) -> Rank:
        """Order of preemption: the sequence with the largest rank is preempted first."""
        return (-self.request.priority, 0, self.request.arrival, self.sample)


@dataclass(eq=False)
class Ticket:
    """Queue entry: tokens that must be in the KV cache before sampling can start or resume.

    The ticket of a request holds its prompt, computed once and shared by the samples until all have
    started. The ticket of a preempted sequence holds all its tokens but the newest.

    Attributes:
        tokens: tokens to compute.
        sequence: the preempted sequence, or None for the ticket of a request.
        blocks: block table of the tokens computed so far.
        computed: number of tokens computed so far.
        reused: number of these that the prefix cache held.
        logits: [V] logits after the last token of a computed prompt.
        version: weight version of the logits.
    """

    request: Request
    tokens: list[int]
    sequence: Sequence | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    reused: int = 0
    logits: Tensor | None = None
    version: int = 0

    @property
    def ready(self) -> bool:
        """True if all tokens are in the KV cache."""
        return self.computed == len(self.tokens)

    @property
    def rank(self) -> Rank:
        """Position in the queue."""
        return (
            (-self.request.priority, 1, self.request.arrival, 0)
            if self.sequence is None
            else self.sequence.rank
        )


@dataclass(frozen=True)
class Chunk:
    """Positions [start, stop) of a ticket's tokens, to be computed in this step.

    Attributes:
        start: first position to compute.
        stop: position after the last one to compute.
        known: positions below this are cached and must not be written again. A fully cached prompt
            computes its last token again, for the logits.
    """

    ticket: Ticket
    blocks: list[int]
    start: int
    stop: int
    known: int

    @property
    def prompt_stop(self) -> int:
        """End of the prompt tokens in this chunk. Later tokens were sampled before a preemption."""
        return max(self.start, min(self.stop, len(self.ticket.request.prompt)))
