"""Plain Python types that flow between the roles: Task -> Trajectory -> Group.

A data source makes Tasks. Rollout turns each Task into a Group of K Trajectories. The environment
fills in `reward`. `batch.collate` turns Groups into tensors. The counters and the occupancy of the
engine (`EngineStats`, `Usage`) are defined here too.

This module does not import torch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length", "aborted", "error"]

Outcome = Literal["ended", "length", "turns", "context", "timeout", "error", "aborted"]
"""How an episode ended.

- ended: the environment ended it.
- length: a reply reached its token limit.
- turns: the limit on turns.
- context: the next turn would exceed the model's context.
- timeout: a step of the environment took too long.
- error: the environment failed.
- aborted: nobody waits for the episode any more.
"""

LOG_RATIO_EDGES: tuple[float, ...] = (-1.0, -0.5, -0.2, -0.1, -0.01, 0.01, 0.1, 0.2, 0.5, 1.0)
"""Bin edges of `train/ratio_hist`, in log-ratio. Bin i counts edges[i-1] < x <= edges[i]. The first
and the last bin are open.
"""


class Message(TypedDict):
    """One chat message, in the form that every chat template reads."""

    role: str
    content: str


@dataclass(frozen=True)
class Task:
    """One prompt for the policy, and what the environment needs to check the answer.

    Attributes:
        id: unique within the dataset. The sampling noise depends on it.
        prompt: plain text, or chat messages that the tokenizer's chat template renders.
        answer: reference answer, or None if the checker needs none.
        trace: worked solution for SFT, or None.
        columns: other fields of the dataset row, passed to reward functions by name.
        source: name of the data source.
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: Any = None
    trace: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def prompt_text(self) -> str:
        """Prompt as one string: the text itself, or the content of the last message."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


@dataclass(frozen=True)
class SamplingParams:
    """Settings for sampling one completion.

    Temperature is part of the policy: sampling and scoring both use logits / temperature.

    If top_k, top_p or min_p is on, the recorded log-prob is that of the truncated and renormalised
    distribution. The set of kept tokens is recorded as `Kept`, so the trainer can score the same
    distribution.

    The three penalties depend on earlier tokens. The trainer does not reproduce them, so leave them
    off for training.

    Attributes:
        max_tokens: maximum completion length, in tokens.
        temperature: 0 means greedy.
        top_k: 0 means off.
        top_p: 1 means off.
        min_p: 0 means off.
        repetition_penalty: 1 means off.
        presence_penalty: subtracted once from the logit of every token that the completion already
            contains.
        frequency_penalty: subtracted once per occurrence of the token in the completion.
        counted_from: first position counted by the presence and frequency penalties. The engine
            sets it to the prompt length.
        constrained: a grammar restricts the next token. Set by the engine.
        stop_token_ids: tokens that end a completion.
        seed: the noise of a token depends only on (seed, task id, sample index, position).
        top_logprobs: number of most likely tokens recorded per position. Their log-probs are those
            of the sampled distribution.
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
        """True if some tokens cannot be drawn. The kept set is then recorded."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def is_plain(self) -> bool:
        """True if the sampled distribution is softmax(logits / temperature)."""
        return not (self.truncates or self.reads_history or self.constrained)

    @property
    def counts_tokens(self) -> bool:
        """True if a token's logit depends on how often the completion contains that token."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reads_history(self) -> bool:
        """True if a penalty makes the distribution depend on earlier tokens."""
        return self.counts_tokens or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class Reward:
    """Result of the environment for one trajectory.

    `score` and `solved` are None if the check failed, or if no reward that decides them applies.

    Attributes:
        value: scalar used for training. None if the checker failed; a failure is recorded and never
            becomes a zero.
        parts: named components, such as correctness and format.
        error: one line that says how the checker failed.
        seconds: time that the checker took.
        steps: process rewards as (index, reward). The index in `tokens` is that of the last token
            of the step. They train in addition to `value`.
        score: evaluated value: `value` or one of the parts, as set by `eval.metric`.
        solved: True if the score reaches `eval.solved_at`.
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
    """Token ids that truncated sampling could have drawn, for each sampled token in order.

    The sets are ragged: token n has the next `counts[n]` entries of `ids`.

    Attributes:
        ids: int32, ascending within a token.
        counts: int32. 0 means that the token was drawn from the full distribution.
        mass: probability of the set before renormalisation.
    """

    ids: array[int] = field(default_factory=lambda: array("i"))
    counts: array[int] = field(default_factory=lambda: array("i"))
    mass: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        """Number of sampled tokens."""
        return len(self.counts)

    def add(self, ids: array[int], mass: float) -> None:
        """Append the set of one more sampled token."""
        self.ids.extend(ids)
        self.counts.append(len(ids))
        self.mass.append(mass)

    def cut(self, tokens: int) -> None:
        """Keep only the first `tokens` sampled tokens."""
        del self.ids[sum(self.counts[:tokens]) :], self.counts[tokens:], self.mass[tokens:]

    def to_record(self) -> dict[str, list[int] | list[float]]:
        """Three flat lists. With the compression of the dumps they are as small as packed bytes."""
        return {
            "ids": self.ids.tolist(),
            "counts": self.counts.tolist(),
            "mass": self.mass.tolist(),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Sequence[Any]]) -> Kept:
        """Inverse of `to_record`. Dumps write a non-finite mass as null; it is read as NaN."""
        mass = array("d", [math.nan if m is None else m for m in record["mass"]])
        return cls(array("i", record["ids"]), array("i", record["counts"]), mass)


@dataclass
class Trajectory:
    """One sampled completion with its prompt, token by token.

    `tokens`, `mask`, `logp` and `version` have the same length, T.

    Attributes:
        tokens: prompt and everything after it.
        mask: True where the policy sampled the token. That includes the end-of-sequence token, but
            not prompt or environment tokens.
        logp: log-prob of the token under the distribution that sampled it. 0 where mask is False.
        version: version of the weights that sampled the token. -1 where mask is False.
        text: completion as text, up to the token or stop string that ends it.
        turns: start index of each turn in `tokens`.
        seconds: wall time from admission to the last token.
        kept: kept set of each sampled token under truncated sampling. None if all tokens were drawn
            from the full distribution.
        opened: tag of a think block that the prompt left open, or "". The completion then starts
            inside that block.

    Raises:
        ValueError: if the lengths, the mask, the prompt length and the kept sets do not agree.
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
            lengths = dict(
                tokens=n, mask=len(self.mask), logp=len(self.logp), version=len(self.version)
            )
            raise ValueError(f"trajectory streams differ in length: {lengths}")
        if not 0 < self.prompt_length <= n or any(self.mask[: self.prompt_length]):
            raise ValueError(
                f"prompt_length {self.prompt_length} of {n} tokens: at least 1, and no prompt token"
                " is sampled"
            )
        if self.kept and not (
            len(self.kept) == len(self.kept.mass) == sum(self.mask)
            and sum(self.kept.counts) == len(self.kept.ids)
        ):
            lengths = dict(
                sampled=sum(self.mask),
                counts=len(self.kept),
                mass=len(self.kept.mass),
                ids=len(self.kept.ids),
            )
            raise ValueError(
                f"kept sets do not speak of the sampled tokens: {lengths}, counts add up to"
                f" {sum(self.kept.counts)}"
            )

    @property
    def completion_length(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def graded_text(self) -> str:
        """Text that rewards read.

        It is the completion, preceded by the think tag that the prompt left open.
        """
        return self.opened + self.text

    def to_record(self) -> dict[str, Any]:
        """JSON-ready dict, from which `from_record` restores every field.

        `kept` and `opened` are left out if they are empty.
        """
        record = asdict(self)
        del record["kept"]
        if not self.opened:
            del record["opened"]
        return record | ({"kept": self.kept.to_record()} if self.kept else {})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trajectory:
        """Inverse of `to_record`. Other keys of the record are ignored.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: if the record has another form.
        """
        fields = {
            name: record[name]
            for name in cls.__dataclass_fields__
            if name not in ("kept", "opened")
        }
        reward, kept = fields["reward"], record.get("kept")
        if reward is not None:
            fields["reward"] = Reward(
                **{**reward, "steps": tuple((int(i), float(v)) for i, v in reward.get("steps", ()))}
            )
        opened = record.get("opened", "")  # earlier releases did not write it
        return cls(**fields, kept=None if kept is None else Kept.from_record(kept), opened=opened)


@dataclass
class Group:
    """One task and its K trajectories. A group baseline is computed over one group.

    Attributes:
        task: the task.
        trajectories: K samples, which are trained on.
        greedy: completion at temperature 0 whose reward is a baseline. It is not trained on. None
            if the method needs none.
    """

    task: Task
    trajectories: list[Trajectory]
    greedy: Trajectory | None = None

    @property
    def rewards(self) -> list[float | None]:
        """Reward values in sample order. None where the checker failed or has not run."""
        return [t.reward.value if t.reward else None for t in self.trajectories]


@dataclass
class EngineStats:
    """Engine counters since it was created, and peaks since the last `restart_peaks`.

    Attributes:
        prefill_tokens: prompt tokens that were computed.
        reused_tokens: prompt tokens that were not computed, because samples share a prompt or the
            prefix cache held them.
        recomputed_tokens: tokens of preempted sequences that were computed again.
        decoded_tokens: sampled tokens.
        decode_rows: rows of decode steps that advanced a sequence by one token.
        decode_slots: all rows of decode steps, including finished sequences in a static batch.
        preemptions: times a running sequence was stopped for lack of blocks, to continue later.
        taken_out_bytes: KV cache bytes of preempted sequences copied to host memory.
        brought_back_bytes: KV cache bytes of preempted sequences copied back from host memory.
        aborted: sequences that the caller aborted, whether they had started or not.
        peak_blocks: largest number of KV cache blocks held by requests.
        peak_waiting: largest number of requests and preempted sequences in the queue.
        graph_captures: captured CUDA graphs.
        graph_replays: decode forward passes that replayed a CUDA graph.
        eager_decodes: decode forward passes without a replay while CUDA graphs are on.
        proposed_tokens: speculative tokens that were proposed and verified.
        accepted_tokens: speculative tokens that became part of a completion.
        target_passes: verifications, counted per sequence.
        pass_tokens: tokens added to completions by verifications.
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
        """Reset the peaks to 0."""
        self.peak_blocks = self.peak_waiting = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens, over all samples, that were not computed."""
        return self.reused_tokens / max(1, self.prefill_tokens + self.reused_tokens)

    @property
    def acceptance_rate(self) -> float:
        """Share of speculative tokens that were accepted."""
        return self.accepted_tokens / max(1, self.proposed_tokens)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens added to a sequence per forward pass of the model. 1 without speculation."""
        return self.pass_tokens / self.target_passes if self.target_passes else 1.0


@dataclass(frozen=True)
class Usage:
    """Occupancy of the engine at one moment.

    Attributes:
        waiting: requests and preempted sequences in the queue.
        running: running sequences.
        used: blocks held by requests.
        idle: blocks held only by the prefix cache. They are freed when room is needed.
        free: remaining blocks.
        wasted_slots: token slots of used blocks that are still empty.
        fragmentation: wasted slots divided by all slots of used blocks. The waste is less than one
            block per sequence.
    """

    waiting: int
    running: int
    used: int
    idle: int
    free: int
    wasted_slots: int
    fragmentation: float
