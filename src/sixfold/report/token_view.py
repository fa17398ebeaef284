"""Trajectories token by token, as `templates/trajectories.html` shows them.

Colour shows the advantage, the underline shows the surprise. Tokens that the policy did not sample
are grey; those of the environment are in another colour and in italics. An episode of several turns
is shown turn by turn, with the reward of each turn, its tool calls and their results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..types import OBSERVATION, PROMPT, SAMPLED, TEMPLATE
from . import trajectory
from .marks import Dot, dot
from .trajectory import Event, Record, advantages, figure, final_reward, parts
from .untrusted import one_line

GROUPS_SHOWN = 3
SAMPLES_SHOWN = 8
TOKENS_SHOWN = 1200
EVENT_CHARACTERS = 400

_NOT_SAMPLED = {
    PROMPT: ("grey", "prompt"),
    TEMPLATE: ("grey template", "chat template"),
    OBSERVATION: ("grey observed", "environment"),
}
"""Provenance -> CSS classes and name of a token that the policy did not sample."""


@dataclass(frozen=True)
class Token:
    """One token.

    Attributes:
        style: CSS classes.
        tip: the numbers shown on hover.
        lines: its text, split at newlines.
    """

    style: str
    tip: str
    lines: Sequence[str]


@dataclass(frozen=True)
class PartView:
    """A reply, or what stands between two replies.

    Attributes:
        label: "turn 2", or "environment". Empty in a trajectory of one reply without events.
        tokens: its tokens.
        more: number of tokens that are not shown.
        events: tool calls and other events after the reply.
    """

    label: str
    about: str
    tokens: Sequence[Token]
    more: int
    events: Sequence[Event]


@dataclass(frozen=True)
class SampleView:
    """One completion.

    Attributes:
        about: sample number, reward, verdict, advantage, length, finish reason, turns, tool calls,
            parts of the reward.
        error: error of its check, or the detail of its verdict. Empty if there is none.
        parts: its tokens after the prompt, in parts.
        events: events that belong to no reply.
    """

    dot: Dot
    about: str
    error: str
    parts: Sequence[PartView]
    events: Sequence[Event]


@dataclass(frozen=True)
class GroupView:
    """One task and its completions.

    Attributes:
        about: task, reference answer, source.
        more: number of prompt tokens that are not shown.
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
        first_open: whether the first group is shown open.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record.get("task_id", "")), []).append(record)
    widest = sorted(groups.values(), key=_spread, reverse=True)[:GROUPS_SHOWN]
    scale = max(
        (abs(a) for group in widest for record in group for a in advantages(record)), default=0.0
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
    prompt = [token for part in parts(first) if part.origin == PROMPT for token in part.tokens]
    return GroupView(
        dots=[_dot(record) for record in records],
        prompt=one_line(str(first.get("prompt", "")), 90),
        about=" · ".join(about),
        tokens=_tokens(prompt[:TOKENS_SHOWN], scale),
        more=max(0, len(prompt) - TOKENS_SHOWN),
        samples=[_sample(record, scale) for record in records[:SAMPLES_SHOWN]],
        hidden=max(0, len(records) - SAMPLES_SHOWN),
        is_open=is_open,
    )


def _sample(record: Record, scale: float) -> SampleView:
    about = [f"#{record.get('sample', '?')}", *trajectory.facts(record)]
    return SampleView(
        _dot(record),
        " · ".join(about),
        trajectory.problem(record),
        list(_parts(record, scale)),
        [_short(event) for event in trajectory.other_events(record)],
    )


def _parts(record: Record, scale: float) -> Iterator[PartView]:
    """A trajectory after its prompt: replies, and what stands between them."""
    found = [part for part in parts(record) if part.origin != PROMPT]
    plain = len(found) == 1 and not found[0].events and not record["turns"][0]["reward"]
    left = TOKENS_SHOWN
    for turn, run in groupby(found, key=lambda part: part.turn):
        of_turn = list(run)
        every = [token for part in of_turn for token in part.tokens]
        label = "" if plain else of_turn[0].label if turn else "environment"
        about = "" if plain else " · ".join(of_turn[0].facts)
        events = [_short(event) for part in of_turn for event in part.events]
        shown = _tokens(every[:left], scale)
        yield PartView(label, about, shown, len(every) - len(shown), events)
        left -= len(shown)


def _short(event: Event) -> Event:
    return Event(event.label, one_line(event.text, EVENT_CHARACTERS), event.failed)


def _tokens(shown: Sequence[trajectory.Token], scale: float) -> list[Token]:
    found = []
    for token in shown:
        if token.origin == SAMPLED:
            surprise, probability = _probability(token.logp)
            style = f"{_shade(token.advantage, scale)} p{surprise}"
            tip = f"id {token.id} · {probability} · version {token.version}"
            tip += f" · advantage {figure(token.advantage)}{_kept_text(token)}"
        else:
            style, name = _NOT_SAMPLED[token.origin]
            tip = f"id {token.id} · not sampled: {name}"
        found.append(Token(style, tip, token.shown.split("\n")))
    return found


def _probability(logp: float | None) -> tuple[int, str]:
    """Level of surprise, and the log-prob in words."""
    if logp is not None and math.isfinite(logp):
        return surprise(logp), f"log-prob {logp:.4f} (p {math.exp(min(logp, 0.0)):.3g})"
    return 4, "log-prob not finite"


def _kept_text(token: trajectory.Token) -> str:
    """The tokens kept by truncated sampling, in words. Empty without truncation."""
    if token.kept is None:
        return ""
    return f" · one of {token.kept[0]} kept (p {figure(token.kept[1])})"


def surprise(logp: float) -> int:
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


def _dot(record: Record) -> Dot:
    reward = record.get("reward")
    solved = reward.get("solved") if isinstance(reward, Mapping) else None
    verdict = reward.get("verdict") if isinstance(reward, Mapping) else None
    return dot(
        final_reward(record),
        solved if isinstance(solved, bool) else None,
        verdict if isinstance(verdict, str) else None,
    )


def _spread(records: Sequence[Record]) -> float:
    rewards = [r for record in records if (r := trajectory.total_reward(record)) is not None]
    return max(rewards) - min(rewards) if rewards else 0.0
