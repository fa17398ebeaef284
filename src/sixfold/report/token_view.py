"""Trajectories token by token, as `templates/trajectories.html` shows them.

Colour shows the advantage, the underline shows the surprise. Tokens that the policy did not sample
are grey; those of the environment are also in italics. In an episode of several turns, a mark after
each turn shows its number and its reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..types import OBSERVATION, PROMPT, SAMPLED, TEMPLATE
from .marks import Dot, dot
from .untrusted import one_line

GROUPS_SHOWN = 3
SAMPLES_SHOWN = 8
TOKENS_SHOWN = 1200

_NOT_SAMPLED = {
    PROMPT: ("grey", "prompt"),
    TEMPLATE: ("grey", "chat template"),
    OBSERVATION: ("grey observed", "environment"),
}
"""Provenance -> CSS classes and name of a token that the policy did not sample."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Token:
    """One token.

    Attributes:
        style: CSS classes.
        tip: the numbers shown on hover.
        lines: its text, split at newlines.
        mark: mark of the turn that ends with this token. Empty for other tokens.
    """

    style: str
    tip: str
    lines: Sequence[str]
    mark: str = ""


@dataclass(frozen=True)
class SampleView:
    """One completion.

    Attributes:
        dot: its mark.
        about: sample number, reward, verdict, advantage, length, finish reason, turns, tool calls,
            parts of the reward.
        error: error of its check, or the detail of its verdict. Empty if there is none.
        tokens: its tokens.
        more: number of tokens that are not shown.
    """

    dot: Dot
    about: str
    error: str
    tokens: Sequence[Token]
    more: int


@dataclass(frozen=True)
class GroupView:
    """One task and its completions.

    Attributes:
        dots: marks of all completions.
        prompt: start of the prompt.
        about: task, reference answer, source.
        tokens: tokens of the prompt.
        more: number of prompt tokens that are not shown.
        samples: the first completions.
        hidden: number of completions that are not shown.
        is_open: whether the group is shown open.
    """

    dots: Sequence[Dot]
    prompt: str
    about: str
    tokens: Sequence[Token]
    more: int
    samples: Sequence[SampleView]
    hidden: int
    is_open: bool


@dataclass(frozen=True)
class StepView:
    """Some groups of a step, of `total`."""

    number: int
    total: int
    groups: Sequence[GroupView]


def trajectories(step: int, records: Sequence[Record], first_open: bool = False) -> StepView:
    """The groups of a step with the widest spread of rewards.

    Args:
        step: number of the step.
        records: records of the step's dump.
        first_open: whether the first group is shown open.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record.get("task_id", "")), []).append(record)
    widest = sorted(groups.values(), key=_spread, reverse=True)[:GROUPS_SHOWN]
    scale = max(
        (abs(a) for group in widest for record in group for a in _advantages(record)), default=0.0
    )
    views = [_group(group, scale, first_open and group is widest[0]) for group in widest]
    return StepView(step, len(groups), views)


def _group(records: Sequence[Record], scale: float, is_open: bool) -> GroupView:
    first = records[0]
    about = [
        f"task {first.get('task_id', '')}",
        f"reference answer {first.get('answer')}",
        f"source {first.get('source') or '—'}",
    ]
    tokens, more = _tokens(first, 0, _prompt_length(first), scale)
    return GroupView(
        dots=[_dot(record) for record in records],
        prompt=one_line(str(first.get("prompt", "")), 90),
        about=" · ".join(about),
        tokens=tokens,
        more=more,
        samples=[_sample(record, scale) for record in records[:SAMPLES_SHOWN]],
        hidden=max(0, len(records) - SAMPLES_SHOWN),
        is_open=is_open,
    )


def _sample(record: Record, scale: float) -> SampleView:
    reward = record.get("reward") or {}
    facts = [f"#{record.get('sample', '?')}", f"reward {_figure(_reward(record))}"]
    facts += [str(fact) for fact in (reward.get("verdict"), reward.get("isolation")) if fact]
    advantages = _advantages(record)
    if advantages and min(advantages) == max(advantages):
        facts.append(f"advantage {advantages[0]:+.3g}")
    facts += [
        f"{record['provenance'].count(SAMPLED)} tokens",
        str(record.get("finish_reason", "?")),
        *_episode(record),
    ]
    weights = reward.get("weights") or {}
    facts += [
        f"{name} {_figure(value)}" + (f" × {_figure(weights[name])}" if name in weights else "")
        for name, value in (reward.get("parts") or {}).items()
    ]
    tokens, more = _tokens(record, _prompt_length(record), len(_stream(record, "tokens")), scale)
    why = str(reward.get("error") or reward.get("detail") or "")
    return SampleView(_dot(record), " · ".join(facts), why, tokens, more)


def _episode(record: Record) -> list[str]:
    """Facts about an episode. Empty for one turn that ended by itself or at its length limit."""
    turns, outcome = record["turns"], str(record.get("outcome", ""))
    facts = [f"{len(turns)} turns"] if len(turns) > 1 else []
    calls = sum(event.get("kind") == "tool_call" for event in record.get("events", ()))
    if calls:
        failed = sum(turn["tool_errors"] for turn in turns)
        facts.append(f"{calls} tool calls" + (f", {failed} failed" if failed else ""))
    if outcome not in ("ended", "length", record.get("finish_reason")):
        facts.append(f"outcome {outcome}")
    if record.get("environment"):
        facts.append(f"environment {record['environment']}")
    return facts


def _marks(record: Record) -> dict[int, str]:
    """Token index -> mark of the turn that ends there. Empty for one turn without a reward."""
    turns = record["turns"]
    if len(turns) == 1 and not turns[0]["reward"]:
        return {}
    return {
        turn["stop"] - 1: f"turn {number}" + (f": {turn['reward']:+.3g}" if turn["reward"] else "")
        for number, turn in enumerate(turns, start=1)
        if turn["stop"] > turn["start"]
    }


def _tokens(record: Record, start: int, stop: int, scale: float) -> tuple[list[Token], int]:
    """Tokens `start` to `stop`, at most TOKENS_SHOWN, and the number of those left out."""
    ids, logp, version = (_stream(record, name) for name in ("tokens", "logp", "version"))
    pieces = record.get("pieces")
    advantages, kept, marks = _advantages(record), _kept(record), _marks(record)
    last = min(stop, start + TOKENS_SHOWN)
    tokens = []
    for t in range(start, last):
        text = _piece(pieces[t] if isinstance(pieces, list) and t < len(pieces) else None, ids[t])
        if record["provenance"][t] == SAMPLED:
            advantage = (
                advantages[t]
                if len(advantages) == len(ids)
                else advantages[0]
                if advantages
                else None
            )
            surprise, probability = _probability(logp[t])
            style = f"{_shade(advantage, scale)} p{surprise}"
            tip = f"id {ids[t]} · {probability} · version {version[t]}"
            tip += f" · advantage {_figure(advantage)}{kept.get(t, '')}"
        else:
            style, name = _NOT_SAMPLED[record["provenance"][t]]
            tip = f"id {ids[t]} · not sampled: {name}"
        tokens.append(Token(style, tip, text.split("\n"), marks.get(t, "")))
    return tokens, stop - last


def _probability(logp: object) -> tuple[int, str]:
    """Level of surprise, and the log-prob in words."""
    if isinstance(logp, float | int):
        return _surprise(logp), f"log-prob {logp:.4f} (p {math.exp(min(logp, 0.0)):.3g})"
    return 4, "log-prob not finite"


def _kept(record: Record) -> dict[int, str]:
    """Token index -> the tokens kept by truncated sampling, in words. Empty without truncation."""
    kept = record.get("kept")
    if not kept:
        return {}
    sampled = [t for t, letter in enumerate(record["provenance"]) if letter == SAMPLED]
    return {
        t: f" · one of {n} kept (p {_figure(mass)})"
        for t, n, mass in zip(sampled, kept["counts"], kept["mass"], strict=True)
    }


def _surprise(logp: float) -> int:
    """Level of surprise: 0 for a probability of at least 90 %, 4 for less than 1 %."""
    return sum(logp < math.log(edge) for edge in (0.9, 0.5, 0.1, 0.01))


def _shade(advantage: float | None, scale: float) -> str:
    """CSS class n4 ... n1, a0, a1 ... a4: four depths per sign.

    Any value but 0 gets at least depth 1.
    """
    if not advantage or not scale:
        return "a0"
    depth = max(1, min(4, round(abs(advantage) / scale * 4)))
    return f"{'a' if advantage > 0 else 'n'}{depth}"


def _piece(text: object, token: object) -> str:
    """Text of a token. A token without text shows its id."""
    if text is None:
        return f"{token} "
    return f"⟨{token}⟩" if text == "" else str(text)


def _dot(record: Record) -> Dot:
    reward = record.get("reward")
    solved = reward.get("solved") if isinstance(reward, Mapping) else None
    verdict = reward.get("verdict") if isinstance(reward, Mapping) else None
    return dot(
        _reward(record),
        solved if isinstance(solved, bool) else None,
        verdict if isinstance(verdict, str) else None,
    )


def _figure(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float | int) else "—"


def _reward(record: Record) -> float | None:
    reward = record.get("reward")
    value = reward.get("value") if isinstance(reward, Mapping) else None
    return value if isinstance(value, float | int) else None


def _spread(records: Sequence[Record]) -> float:
    rewards = [reward for record in records if (reward := _reward(record)) is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def _advantages(record: Record) -> list[float]:
    """One advantage for the completion, or one per token. Empty if missing or containing null."""
    value = record.get("advantage")
    values = value if isinstance(value, list) else [value]
    numbers = [float(v) for v in values if isinstance(v, float | int)]
    return numbers if len(numbers) == len(values) else []


def _prompt_length(record: Record) -> int:
    return int(record["prompt_length"])


def _stream(record: Record, name: str) -> list[Any]:
    return list(record[name])
