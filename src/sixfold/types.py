"""Plain Python types that flow between the roles: Task -> Trajectory -> Group.

A data source makes Tasks. Rollout turns each Task into a Group of K Trajectories. The environment
fills in `reward`. `batch.collate` turns Groups into tensors.

This module does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

from .errors import UserError
from .reward import NOT_APPLICABLE as NOT_APPLICABLE
from .reward import VERDICTS as VERDICTS
from .reward import Reward as Reward
from .reward import Verdict as Verdict
from .streams import Kept as Kept
from .streams import Routes as Routes

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

PromptForm = Literal["messages", "continued", "rendered"]
"""How the model reads a prompt.

- messages: a text is a message of the user, and the policy writes the next one.
- continued: the policy continues the last message, which is from the assistant.
- rendered: the prompt is the text that the model reads. No chat template is applied, and special
  tokens in it are special tokens.
"""

PROMPT, SAMPLED, TEMPLATE, OBSERVATION = "psto"
"""Letters of `Trajectory.provenance`."""

LOG_RATIO_EDGES: tuple[float, ...] = (-1.0, -0.5, -0.2, -0.1, -0.01, 0.01, 0.1, 0.2, 0.5, 1.0)
"""Bin edges of `train/ratio_hist`, in log-ratio. Bin i counts edges[i-1] < x <= edges[i]. The first
and the last bin are open.
"""

DELTA_EDGES: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Bin edges of `reward_model/heldout_delta_hist`, in |delta|. The last bin is open."""


class Message(TypedDict):
    """One chat message, in the form that every chat template reads."""

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    weight: NotRequired[float]


def is_trained(message: Mapping[str, Any]) -> bool:
    """True for a reply of the assistant without weight 0, which OpenAI's files may give it."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool by the policy.

    Attributes:
        name: name of the function.
        arguments: its arguments as the text of a JSON object.
        id: id that the policy gave the call, or "".
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Task:
    """One prompt for the policy, and what the environment needs to check the answer.

    Attributes:
        id: unique within the dataset. The sampling noise depends on it.
        prompt: plain text, or chat messages that the tokenizer's chat template renders.
        answer: reference answer, or None if the checker needs none.
        trace: worked solution for SFT: text, or the text of each reply of an episode. Or None.
        columns: other fields of the dataset row, passed to reward functions by name.
        source: name of the data source.
        world: what else the episode starts from, such as the seed of a game. Tasks with one prompt
            and different worlds are different tasks.
        tools: descriptions of functions that the prompt shows to the model.
        template_args: variables of the chat template for this prompt.
        form: form of the prompt.
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: Any = None
    trace: str | tuple[str, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    world: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    form: PromptForm = "messages"

    @property
    def prompt_text(self) -> str:
        """Prompt as one string: the text itself, or the content of the last message.

        A prefill does not count as a message.
        """
        if isinstance(self.prompt, str):
            return self.prompt
        return self.prompt[-2 if self.prefill and len(self.prompt) > 1 else -1]["content"]

    @property
    def prefill(self) -> str:
        """Start of the assistant's turn that the policy continues, or ""."""
        if isinstance(self.prompt, str) or self.form != "continued":
            return ""
        return self.prompt[-1]["content"]

    @property
    def prompt_key(self) -> str:
        """A text that is equal for two tasks exactly if the model reads the same prompt."""
        said = [self.prompt, self.tools, self.template_args, self.form]
        return json.dumps(said, sort_keys=True, default=str)

    @property
    def worked(self) -> str | tuple[str, ...]:
        """The worked solution, or else the reference answer as text.

        Raises:
            UserError: the answer is a list or an object, which is no text to imitate.
        """
        if self.trace is not None:
            return self.trace
        if isinstance(self.answer, list | tuple | Mapping):
            raise UserError(
                f"task {self.id}: its answer is a {type(self.answer).__name__}, which SFT cannot"
                " imitate. Name a column with worked solutions (data.trace_field), or set"
                " sft.steps = 0"
            )
        return str(self.answer)


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
class Turn:
    """One reply of the policy within a trajectory.

    Attributes:
        start: index of the first token of the reply.
        stop: index after the last token of the reply, which may be an end-of-turn token.
        reward: reward for this reply. It is credited to the last token, in addition to the final
            reward.
        finish_reason: why sampling ended.
        seconds: time from admission of the request to the last token.
        tool_errors: number of tool calls in the reply that failed.
        events: number of events that the environment recorded after the reply.
    """

    start: int
    stop: int
    reward: float = 0.0
    finish_reason: FinishReason = "stop"
    seconds: float = 0.0
    tool_errors: int = 0
    events: int = 0


_OPTIONAL = frozenset({"kept", "routes", "opened", "graded", "branch"})
"""Fields of a trajectory that its record leaves out if they are empty."""


@dataclass
class Trajectory:
    """One episode of the policy, token by token.

    `tokens`, `provenance`, `logp` and `version` have the same length, T. Statistics, penalties and
    limits of length count sampled tokens only: `sampled_length`.

    Attributes:
        tokens: prompt and everything after it.
        provenance: one letter per token. "p" is the prompt, "s" was sampled by the policy, "t" was
            written by the chat template, "o" is an observation from the environment. The
            end-of-sequence token of a reply is sampled.
        logp: log-prob of the token under the distribution that sampled it. 0 for other tokens.
        version: version of the weights that sampled the token. -1 for other tokens, and for tokens
            that no model sampled, such as worked solutions.
        turns: replies in order. They cover exactly the sampled tokens. A reply may be empty.
        outcome: how the episode ended.
        text: everything after the prompt as text, replies and observations. It ends before the
            stop string or token that ends the last reply.
        kept: kept set of each sampled token under truncated sampling. None if all tokens were drawn
            from the full distribution.
        routes: experts that computed the tokens, at sampling. None unless the engine records them.
        opened: tag of a think block that the prompt left open, or "". The completion then starts
            inside that block.
        environment: name of the environment that played the episode, or "".
        events: facts that the environment recorded, in order: JSON-ready dictionaries. A tool call
            has the kind "tool_call".
        started: start of the episode, in seconds since 1970. 0 if unknown.
        ended: end of the episode.
        graded: text that rewards read in place of `text`. None: they read `text`.
        branch: for a branch of another sample's episode: the index of that sample, and the number
            of tokens that both have in common. None for an episode played from its start.

    Raises:
        ValueError: if lengths, provenance, turns, kept sets and routes do not agree.
    """

    task_id: str
    sample: int
    tokens: list[int]
    provenance: str
    logp: list[float]
    version: list[int]
    turns: tuple[Turn, ...]
    outcome: Outcome = "ended"
    text: str = ""
    reward: Reward | None = None
    kept: Kept | None = None
    routes: Routes | None = None
    opened: str = ""
    environment: str = ""
    events: tuple[Mapping[str, Any], ...] = ()
    started: float = 0.0
    ended: float = 0.0
    graded: str | None = None
    branch: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        streams = ("tokens", "provenance", "logp", "version")
        lengths = {name: len(getattr(self, name)) for name in streams}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"trajectory streams differ in length: {lengths}")
        self._check_provenance()
        kept = self.kept
        if kept and not (
            len(kept) == len(kept.mass) == self.sampled_length and sum(kept.counts) == len(kept.ids)
        ):
            lengths = {"counts": len(kept), "mass": len(kept.mass), "ids": len(kept.ids)}
            raise ValueError(
                f"kept sets do not match the {self.sampled_length} sampled tokens: {lengths},"
                f" counts add up to {sum(kept.counts)}"
            )

        if self.branch and not 0 < self.branch[1] <= len(self.tokens):
            raise ValueError(f"branch = {self.branch}, but there are {len(self.tokens)} tokens")
        if self.routes and len(self.routes) > len(self.tokens):
            raise ValueError(
                f"routes are those of {len(self.routes)} tokens, but there are {len(self.tokens)}"
            )

    def _check_provenance(self) -> None:
        """Raise ValueError if `provenance` is malformed or `turns` do not cover the sampled tokens.

        A prompt has at least one token.
        """
        rest = self.provenance[self.prompt_length :]
        if self.prompt_length == 0 or set(rest) - set("sto"):
            raise ValueError(
                "provenance must be one or more 'p', then 's', 't' or 'o', got"
                f" {self.provenance[:80]!r}"
            )
        end = self.prompt_length
        for number, turn in enumerate(self.turns):
            letters = self.provenance[turn.start : turn.stop]
            if not end <= turn.start <= turn.stop or letters != SAMPLED * (turn.stop - turn.start):
                raise ValueError(
                    f"turns: turn {number}, tokens {turn.start} to {turn.stop}, must follow the"
                    " turn before it and contain only sampled tokens"
                )
            if turn.start == turn.stop and turn.reward:
                raise ValueError(f"turns: turn {number} has a reward but no token to credit it to")
            end = turn.stop
        covered = sum(turn.stop - turn.start for turn in self.turns)
        if covered != self.sampled_length:
            raise ValueError(
                f"turns cover {covered} of {self.sampled_length} sampled tokens; they must cover"
                " all of them"
            )

    @classmethod
    def one_turn(
        cls,
        task_id: str,
        sample: int,
        prompt: Sequence[int],
        completion: Sequence[int],
        logp: Sequence[float],
        version: Sequence[int],
        finish_reason: FinishReason,
        *,
        text: str = "",
        seconds: float = 0.0,
        reward: Reward | None = None,
        kept: Kept | None = None,
        opened: str = "",
    ) -> Trajectory:
        """Trajectory with one turn, from a prompt and its completion.

        Args:
            task_id: id of the task.
            sample: index of the sample within the task.
            prompt: token ids of the prompt, length P.
            completion: sampled token ids, length C.
            logp: log-prob of each sampled token, length C.
            version: version of the weights that sampled each token, length C.
            finish_reason: why sampling ended.
            text: the completion as text.
            seconds: time from admission to the last token.
            reward: result of the environment, if it is known.
            kept: kept set of each sampled token; None without truncated sampling.
            opened: tag of the think block that the prompt leaves open; empty if there is none.

        Returns:
            Trajectory with streams of length P + C.
        """
        before = len(prompt)
        turn = Turn(before, before + len(completion), finish_reason=finish_reason, seconds=seconds)
        return cls(
            task_id=task_id,
            sample=sample,
            tokens=[*prompt, *completion],
            provenance=PROMPT * before + SAMPLED * len(completion),
            logp=[0.0] * before + [*logp],
            version=[-1] * before + [*version],
            turns=(turn,),
            outcome="ended" if finish_reason == "stop" else finish_reason,
            text=text,
            reward=reward,
            kept=kept,
            opened=opened,
        )

    @property
    def mask(self) -> list[bool]:
        """[T], True exactly for the tokens that the policy sampled."""
        return [letter == SAMPLED for letter in self.provenance]

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first reply and the first observation."""
        return len(self.provenance) - len(self.provenance.lstrip(PROMPT))

    @property
    def sampled_length(self) -> int:
        return self.provenance.count(SAMPLED)

    @property
    def seconds(self) -> float:
        return sum(turn.seconds for turn in self.turns)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the last reply ended: "stop" (by itself), "length", "aborted" or "error".

        It is "error" if the environment failed after the reply.
        """
        if self.outcome in ("error", "timeout"):
            return "error"
        if self.outcome == "aborted":
            return "aborted"
        return self.turns[-1].finish_reason if self.turns else "stop"

    @property
    def truncated(self) -> bool:
        """True if a limit ended the episode: tokens of a reply, turns, or the model's context.

        A failure of the environment is no truncation.
        """
        return self.outcome in ("length", "turns", "context") or self.finish_reason == "length"

    @property
    def step_rewards(self) -> tuple[tuple[int, float], ...]:
        """Rewards besides the final one as (token index, reward): of turns, then of steps."""
        turns = tuple((turn.stop - 1, turn.reward) for turn in self.turns if turn.reward)
        return turns + (self.reward.steps if self.reward else ())

    @property
    def total_reward(self) -> float | None:
        """Sum of all rewards. None if the checker failed or has not run."""
        if self.reward is None or self.reward.value is None:
            return None
        steps = self.step_rewards
        return self.reward.value + sum(r for _, r in steps) if steps else self.reward.value

    @property
    def graded_text(self) -> str:
        """Text that rewards read: `graded`, or `text` after the prompt's open think tag."""
        return self.opened + self.text if self.graded is None else self.graded

    def to_record(self) -> dict[str, Any]:
        """JSON-ready dict, from which `from_record` restores every field.

        It also has the derived values `prompt_length`, `sampled_length` and `finish_reason`.
        `kept`, `routes`, `opened`, `graded` and `branch` are left out if they are empty.
        """
        record = {name: getattr(self, name) for name in self.__dataclass_fields__}
        record |= {name: list(record[name]) for name in ("tokens", "logp", "version")}
        record |= {"turns": [asdict(turn) for turn in self.turns]}
        record |= {"events": [dict(event) for event in self.events]}
        record |= {"reward": self.reward and asdict(self.reward)}
        record |= {"kept": self.kept and self.kept.to_record()}
        record |= {"routes": self.routes and self.routes.to_record()}
        derived = ("prompt_length", "sampled_length", "finish_reason")
        record |= {name: getattr(self, name) for name in derived}
        graded = {} if self.graded is None else {"graded": self.graded}
        return {k: v for k, v in record.items() if v or k not in _OPTIONAL} | graded

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trajectory:
        """Inverse of `to_record`. Other keys of the record are ignored.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: if the record has another form.
        """
        required = set(cls.__dataclass_fields__) - _OPTIONAL
        fields = {name: record[name] for name in required}
        reward, kept, routes = fields["reward"], record.get("kept"), record.get("routes")
        # Dumps write a non-finite log-prob as null.
        fields["logp"] = [math.nan if logp is None else logp for logp in fields["logp"]]
        if not isinstance(fields["provenance"], str):
            raise TypeError("provenance is not text")
        if reward is not None:
            steps = tuple((int(i), float(v)) for i, v in reward.get("steps", ()))
            fields["reward"] = Reward(**{**reward, "steps": steps})
        # Adding 0 refuses text in place of a number.
        numbers = {"reward": 0.0, "tool_errors": 0, "events": 0}
        turns = [t | {k: 0 + (numbers | t)[k] for k in numbers} for t in fields["turns"]]
        fields["turns"] = tuple(Turn(**turn) for turn in turns)
        fields["events"] = tuple({**event} for event in fields["events"])
        fields["kept"] = None if kept is None else Kept.from_record(kept)
        fields["routes"] = None if routes is None else Routes.from_record(routes)
        if (branch := record.get("branch")) is not None:
            sample, shared = branch
            fields["branch"] = (int(sample), int(shared))
        return cls(**fields, opened=record.get("opened", ""), graded=record.get("graded"))


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
    def sampled_tokens(self) -> int:
        """Sampled tokens of the trajectories. Those that branches share count once."""
        total, trunks = 0, {t.sample for t in self.trajectories if t.branch is None}
        for t in self.trajectories:
            shared = 0 if t.branch is None or t.branch[0] not in trunks else t.branch[1]
            total += t.provenance[shared:].count(SAMPLED)
            trunks |= {t.branch[0]} if t.branch else set()
        return total

    @property
    def rewards(self) -> list[float | None]:
        """Total rewards in sample order. None where the checker failed or has not run."""
        return [t.total_reward for t in self.trajectories]
