"""What flows between the roles, as plain Python: Task -> Trajectory -> Group (tensors begin in `batch.py`), and what the engine says of itself.

A data source makes Tasks; rollout turns a Task into a Group of K Trajectories; the environment fills in `reward`; `batch.collate`
turns Groups into tensors. Nothing here imports torch or anything of ours but `errors`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length", "aborted", "error"]


class Message(TypedDict):
    """One chat message, in the form that every chat template reads."""

    role: str
    content: str


@dataclass(frozen=True)
class Task:
    """Something to ask the policy, and what the environment needs to check the answer.

    id: unique in its dataset; sampling noise is keyed by it. prompt: plain text, or chat messages that the tokenizer's template
    renders. answer: the reference answer, or None where the checker needs none. trace: a worked solution for SFT, or None.
    columns: the other fields of the dataset row, handed to reward functions by name. source: where the task came from.
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: Any = None
    trace: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def prompt_text(self) -> str:
        """The prompt as one string: the text itself, or the last message's content."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is drawn. Temperature is part of the policy: sampling and scoring both use logits / temperature.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off. With one of the first three on, the recorded log-prob is
    that of the truncated, renormalised distribution that was sampled from, and what was kept is recorded beside it (`Kept`), so that a trainer can
    score the same. Penalties depend on the tokens before, which no trainer here follows: train with them off.
    presence_penalty is taken once from the logit of every token that the completion has already, frequency_penalty as often as it is there. Both
    count tokens from position `counted_from` on, which the engine sets to the prompt's length. constrained: a grammar decides which tokens
    may follow; set by the engine too.
    seed: the noise of a token is a function of (seed, task id, sample index, position) and of nothing else. top_logprobs: how many of the likeliest
    tokens are kept at every position, with their log-probs in the distribution that was sampled from.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    counted_from: int = 0
    constrained: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    top_logprobs: int = 0

    @property
    def truncates(self) -> bool:
        """True when some tokens cannot be drawn: what is kept is then recorded."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def is_plain(self) -> bool:
        """True when the sampled distribution is softmax(logits / temperature)."""
        return not (self.truncates or self.reads_history or self.constrained)

    @property
    def counts_tokens(self) -> bool:
        """True when a token's logit depends on how often the completion has the token."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reads_history(self) -> bool:
        """True when the distribution depends on the tokens before beyond what the model makes of them."""
        return self.counts_tokens or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class Reward:
    """What the environment says of one trajectory.

    value: the scalar that trains, or None when the checker failed: a recorded outcome that never becomes a zero. parts: named
    components (correctness, format, ...). error: one line that says how the checker failed. seconds: time the checker took. steps: process rewards,
    each with the index in `tokens` of the last token it speaks of; they train beside `value`. score: what is evaluated, `value` or one part
    (`eval.metric`). solved: whether it reaches `eval.solved_at`. Both are None when the check failed or no reward that decides applies.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    steps: tuple[tuple[int, float], ...] = ()
    score: float | None = None
    solved: bool | None = None


@dataclass
class Kept:
    """Which token ids truncated sampling could have drawn, for each sampled token in order. Ragged: token n has the next `counts[n]` of `ids`.

    ids: int32, ascending within a token. counts: int32; 0 means that the token was drawn from the full distribution. mass: probability that the set
    had before it was renormalised.
    """

    ids: array[int] = field(default_factory=lambda: array("i"))
    counts: array[int] = field(default_factory=lambda: array("i"))
    mass: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        """Sampled tokens."""
        return len(self.counts)

    def add(self, ids: array[int], mass: float) -> None:
        """One more sampled token."""
        self.ids.extend(ids)
        self.counts.append(len(ids))
        self.mass.append(mass)

    def cut(self, tokens: int) -> None:
        """Forget all but the first `tokens` sampled tokens."""
        del self.ids[sum(self.counts[:tokens]) :], self.counts[tokens:], self.mass[tokens:]

    def to_record(self) -> dict[str, list[int] | list[float]]:
        """Three flat lists: under the dumps' compression as small as packed bytes, and readable."""
        return {"ids": self.ids.tolist(), "counts": self.counts.tolist(), "mass": self.mass.tolist()}

    @classmethod
    def from_record(cls, record: Mapping[str, Sequence[Any]]) -> Kept:
        """The inverse of `to_record`; a mass of null, as dumps write what is not finite, is NaN."""
        mass = array("d", [math.nan if m is None else m for m in record["mass"]])
        return cls(array("i", record["ids"]), array("i", record["counts"]), mass)


@dataclass
class Trajectory:
    """One sampled answer, token for token. `tokens`, `mask`, `logp` and `version` are streams of one length, T.

    Attributes:
        tokens: prompt and everything after it.
        mask: True exactly where the policy sampled the token (the end-of-sequence token is sampled; prompt and environment tokens are not).
        logp: log-prob of the token under the distribution that sampled it, 0 where mask is False.
        version: the weights that sampled it, -1 where mask is False.
        text: the completion as text, up to the token or the stop string that ends it.
        turns: start of each turn in `tokens`.
        seconds: wall clock from admission to the last token.
        kept: what truncated sampling kept of each sampled token; None where all were drawn from the full distribution.
        opened: tag of a think block that the prompt left open, so that the completion begins inside of it; else empty.
    """

    task_id: str
    sample: int
    tokens: list[int]
    prompt_length: int
    mask: list[bool]
    logp: list[float]
    version: list[int]
    finish_reason: FinishReason
    text: str = ""
    turns: list[int] = field(default_factory=list)
    seconds: float = 0.0
    reward: Reward | None = None
    kept: Kept | None = None
    opened: str = ""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if not n == len(self.mask) == len(self.logp) == len(self.version):
            lengths = dict(tokens=n, mask=len(self.mask), logp=len(self.logp), version=len(self.version))
            raise ValueError(f"trajectory streams differ in length: {lengths}")
        if not 0 < self.prompt_length <= n or any(self.mask[: self.prompt_length]):
            raise ValueError(f"prompt_length {self.prompt_length} of {n} tokens: at least 1, and no prompt token is sampled")
        if self.kept and not (len(self.kept) == len(self.kept.mass) == sum(self.mask) and sum(self.kept.counts) == len(self.kept.ids)):
            lengths = dict(sampled=sum(self.mask), counts=len(self.kept), mass=len(self.kept.mass), ids=len(self.kept.ids))
            raise ValueError(f"kept sets do not speak of the sampled tokens: {lengths}, counts add up to {sum(self.kept.counts)}")

    @property
    def completion_length(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def graded_text(self) -> str:
        """What rewards read: the completion, after the think tag that the prompt ended with."""
        return self.opened + self.text

    def to_record(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_record` gives the trajectory back, field for field. Without `kept` and `opened` where there is none."""
        record = asdict(self)
        del record["kept"]
        if not self.opened:
            del record["opened"]
        return record | ({"kept": self.kept.to_record()} if self.kept else {})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trajectory:
        """The inverse of `to_record`; what else the record holds is ignored.

        Raises KeyError, TypeError, ValueError or OverflowError on another form.
        """
        fields = {name: record[name] for name in cls.__dataclass_fields__ if name not in ("kept", "opened")}
        reward, kept = fields["reward"], record.get("kept")
        if reward is not None:
            fields["reward"] = Reward(**{**reward, "steps": tuple((int(i), float(v)) for i, v in reward.get("steps", ()))})
        opened = record.get("opened", "")  # records from before it have none
        return cls(**fields, kept=None if kept is None else Kept.from_record(kept), opened=opened)


@dataclass
class Group:
    """One task and its K trajectories: what a group baseline is computed over."""

    task: Task
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float | None]:
        """Reward values in sample order; None where the checker failed or has not run."""
        return [t.reward.value if t.reward else None for t in self.trajectories]


@dataclass
class EngineStats:
    """Counters since the engine was made, and peaks since `restart_peaks`.

    prefill_tokens: prompt tokens computed. reused_tokens: prompt tokens that were not, because samples share a prompt or the prefix cache had them.
    decode_rows, decode_slots: rows of decode steps that went one token further, and all of them, those of ended sequences in a static batch included.
    recomputed_tokens: tokens of preempted sequences computed once more. decoded_tokens: sampled. preemptions: sequences stopped for lack of blocks,
    to go on later. taken_out_bytes, brought_back_bytes: of theirs, to host memory and from it. aborted: sequences given up by the caller, begun or
    not. peak_blocks: cache blocks that requests held at the fullest moment.
    peak_waiting: requests and preempted sequences in the queue at its longest. graph_captures, graph_replays: CUDA graphs made, and
    decode forwards that were a replay of one; eager_decodes: those that were not, where graphs are on.

    Of speculation: proposed_tokens, guessed and checked; accepted_tokens, those that a completion took over; target_passes, how often a sequence was
    checked; pass_tokens, what completions grew by in them.
    """

    prefill_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    decoded_tokens: int = 0
    steps: int = 0
    decode_rows: int = 0
    decode_slots: int = 0
    preemptions: int = 0
    taken_out_bytes: int = 0
    brought_back_bytes: int = 0
    aborted: int = 0
    peak_blocks: int = 0
    peak_waiting: int = 0
    graph_captures: int = 0
    graph_replays: int = 0
    eager_decodes: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    target_passes: int = 0
    pass_tokens: int = 0

    def restart_peaks(self) -> None:
        """The peaks are of what comes from here on."""
        self.peak_blocks = self.peak_waiting = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens, over all samples, that were not computed."""
        return self.reused_tokens / max(1, self.prefill_tokens + self.reused_tokens)

    @property
    def padding_waste(self) -> float:
        """Share of the rows of decode steps that no sequence needed."""
        return 1 - self.decode_rows / max(1, self.decode_slots)

    @property
    def acceptance_rate(self) -> float:
        """Share of guessed tokens that completions took over."""
        return self.accepted_tokens / max(1, self.proposed_tokens)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a sequence goes further by one pass through the model; 1 without speculation."""
        return self.pass_tokens / self.target_passes if self.target_passes else 1.0


@dataclass(frozen=True)
class Usage:
    """The engine at one moment.

    waiting: requests and preempted sequences in the queue. running: sequences. used: blocks that requests hold. idle: blocks that the prefix cache
    alone holds; they are given up when room is needed. free: the rest. wasted_slots: token slots of used blocks that hold nothing yet.
    fragmentation: wasted slots as a share of all slots in used blocks; less than one block a sequence.
    """

    waiting: int
    running: int
    used: int
    idle: int
    free: int
    wasted_slots: int
    fragmentation: float
