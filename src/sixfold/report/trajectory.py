"""A dumped trajectory as a list of parts: prompt, turns, observations, with tokens and events.

`token_view.py` shows the parts in the report, `terminal.py` on a terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..types import OBSERVATION, PROMPT, SAMPLED, TEMPLATE
from .numbers import number

Record = Mapping[str, Any]
"""A record of a dump, as `rollouts.read_rollouts` returns it."""

ORIGINS = {
    PROMPT: "prompt",
    SAMPLED: "sampled",
    TEMPLATE: "template",
    OBSERVATION: "observation",
}
"""Letter of the provenance -> origin of a token, in one word."""


@dataclass(frozen=True)
class Token:
    """One token.

    Attributes:
        text: text of the token. None if the dump has none.
        origin: letter of its provenance.
        logp: log-prob at sampling. None if the token was not sampled, or if it was not finite.
        version: version of the weights that sampled it. -1 if it was not sampled.
        advantage: its advantage. None if unknown.
        kept: with truncated sampling: number of tokens that could be drawn, and their total
            probability. Otherwise None.
    """

    index: int
    id: int
    text: str | None
    origin: str
    logp: float | None
    version: int
    advantage: float | None
    kept: tuple[int, float] | None = None

    @property
    def shown(self) -> str:
        """The text, or the id if the token has no text."""
        if self.text is None:
            return f"{self.id} "
        return self.text or f"⟨{self.id}⟩"


@dataclass(frozen=True)
class Event:
    """An event of the environment as text.

    Attributes:
        label: "tool call", or the kind of the event.
        failed: True for a failed tool call.
    """

    label: str
    text: str
    failed: bool = False


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of one origin: the prompt, a reply, template tokens or an observation.

    Attributes:
        turn: number of the reply, starting at 1. 0 if it is not a reply.
        origin: letter of the provenance of all its tokens.
        tokens: the tokens. A reply may be empty.
        facts: texts about the reply: reward, number of tokens, finish reason, duration.
        events: events that the environment recorded after the reply.
    """

    turn: int
    origin: str
    tokens: Sequence[Token]
    facts: Sequence[str] = ()
    events: Sequence[Event] = ()

    @property
    def label(self) -> str:
        return f"turn {self.turn}" if self.turn else ORIGINS[self.origin]


def parts(record: Record) -> list[Part]:
    """The parts of a trajectory, in order. Each token is in exactly one part.

    A tool call has no result in its event if the observation after the reply shows it.
    """
    tokens, events = _tokens(record), list(record.get("events") or ())
    starts = [turn["start"] for turn in record["turns"][1:]] + [len(tokens)]
    counts = [int(turn.get("events", 0)) for turn in record["turns"]]
    # Index of the first event after a reply. Records of earlier releases have no counts: all their
    # events are shown at the end (`other_events`).
    at = len(events) - sum(counts) if any(counts) else len(events)
    found, end, differ = list[Part](), 0, len(advantages(record)) > 1
    for n, turn in enumerate(record["turns"], start=1):
        found += _between(tokens[end : turn["start"]])
        shown = _observation_text(tokens[turn["stop"] : starts[n - 1]])
        own = [_event(event, shown) for event in events[at : at + counts[n - 1]]]
        end, at = turn["stop"], at + len(own)
        reply, about = tokens[turn["start"] : end], turn_facts(turn)
        if differ and len({token.advantage for token in reply}) == 1:
            about.append(f"advantage {reply[0].advantage:+.3g}")
        found.append(Part(n, SAMPLED, reply, about, own))
    return found + list(_between(tokens[end:]))


def other_events(record: Record) -> list[Event]:
    """Events before the first reply. In records without counts, all events."""
    events = [_event(event) for event in record.get("events") or ()]
    return events[: len(events) - sum(int(turn.get("events", 0)) for turn in record["turns"])]


def turn_facts(turn: Mapping[str, Any]) -> list[str]:
    """Texts about one reply: reward, number of tokens, finish reason, duration, failed calls."""
    facts = [f"reward {turn['reward']:+.3g}"] if turn["reward"] else []
    facts += [f"{turn['stop'] - turn['start']} tokens", str(turn["finish_reason"])]
    facts += [f"{turn['seconds']:.2g} s"] if turn["seconds"] else []
    if turn["tool_errors"]:
        facts.append(f"failed tool calls: {turn['tool_errors']}")
    return facts


def facts(record: Record) -> list[str]:
    """Texts about a trajectory: reward, verdict, advantage, length, finish reason, episode."""
    reward = record.get("reward") or {}
    found = [f"reward {figure(total_reward(record))}"]
    found += [str(fact) for fact in (reward.get("verdict"), reward.get("isolation")) if fact]
    values = advantages(record)
    if values and min(values) == max(values):
        found.append(f"advantage {values[0]:+.3g}")
    found += [
        f"{record['provenance'].count(SAMPLED)} tokens",
        str(record.get("finish_reason", "?")),
        *_episode(record),
    ]
    weights = reward.get("weights") or {}
    return found + [
        f"{name} {figure(value)}" + (f" × {figure(weights[name])}" if name in weights else "")
        for name, value in (reward.get("parts") or {}).items()
    ]


def problem(record: Record) -> str:
    """Error of the check, or detail of the verdict, or ""."""
    reward = record.get("reward") or {}
    return str(reward.get("error") or reward.get("detail") or "")


def final_reward(record: Record) -> float | None:
    """The final reward, without rewards of turns and steps. None if the check failed."""
    reward = record.get("reward")
    value = reward.get("value") if isinstance(reward, Mapping) else None
    return float(value) if isinstance(value, float | int) else None


def total_reward(record: Record) -> float | None:
    """Sum of the final reward and those of turns and steps. None if the check failed."""
    value = final_reward(record)
    if value is None:
        return None
    steps = (record["reward"].get("steps") or ()) if record.get("reward") else ()
    return value + sum(turn["reward"] for turn in record["turns"]) + sum(s[1] for s in steps)


def advantages(record: Record) -> list[float]:
    """One advantage for the completion, or one per token. Empty if missing, or if one is null."""
    value = record.get("advantage")
    values = value if isinstance(value, list) else [value]
    numbers = [float(v) for v in values if isinstance(v, float | int)]
    return numbers if len(numbers) == len(values) else []


def figure(value: object) -> str:
    """A number with three significant digits, or a dash for any other value."""
    return f"{value:.3g}" if isinstance(value, float | int) else "—"


def _episode(record: Record) -> list[str]:
    """Texts about an episode. Empty for one turn that ended by itself or at its token limit."""
    turns, outcome = record["turns"], str(record.get("outcome", ""))
    found = [f"{len(turns)} turns"] if len(turns) > 1 else []
    calls = sum(event.get("kind") == "tool_call" for event in record.get("events", ()))
    failed = sum(turn["tool_errors"] for turn in turns)
    if calls or failed:
        found.append(f"{calls} tool calls" + (f", {failed} failed" if failed else ""))
    if outcome not in ("ended", "length", record.get("finish_reason")):
        found.append(f"outcome {outcome}")
    if record.get("environment"):
        found.append(f"environment {record['environment']}")
    if branch := record.get("branch"):
        found.append(f"branch of #{branch[0]}, {branch[1]} tokens shared")
    return found


def _tokens(record: Record) -> list[Token]:
    ids, pieces = record["tokens"], record.get("pieces")
    known, kept = advantages(record), _kept_sets(record)
    texts = pieces if isinstance(pieces, list) and len(pieces) == len(ids) else [None] * len(ids)
    one = known[0] if known else None
    per_token: list[float | None] = [one] * len(ids)
    if len(known) == len(ids):
        per_token = [*known]
    return [
        Token(
            index=t,
            id=ids[t],
            text=None if text is None else str(text),
            origin=letter,
            logp=record["logp"][t] if letter == SAMPLED else None,
            version=record["version"][t],
            advantage=per_token[t] if letter == SAMPLED else None,
            kept=kept.get(t),
        )
        for t, (letter, text) in enumerate(zip(record["provenance"], texts, strict=True))
    ]


def _kept_sets(record: Record) -> dict[int, tuple[int, float]]:
    """Token index -> number of tokens that could be drawn, and their total probability.

    Empty without truncated sampling.
    """
    kept = record.get("kept")
    if not kept:
        return {}
    sampled = [t for t, letter in enumerate(record["provenance"]) if letter == SAMPLED]
    return dict(zip(sampled, zip(kept["counts"], kept["mass"], strict=True), strict=True))


def _between(tokens: Sequence[Token]) -> Iterator[Part]:
    """One part per run of consecutive tokens of the same origin."""
    for origin, run in groupby(tokens, key=lambda token: token.origin):
        yield Part(0, origin, list(run))


def _observation_text(tokens: Sequence[Token]) -> str:
    """Text of the observation among some tokens. Empty if the dump has no texts."""
    return "".join(token.text or "" for token in tokens if token.origin == OBSERVATION)


def _event(given: Mapping[str, Any], shown: str = "") -> Event:
    """An event as text.

    Args:
        shown: text that is shown after it. A result in this text is not repeated.
    """
    if given.get("kind") != "tool_call":
        rest = {key: value for key, value in given.items() if key != "kind"}
        return Event(str(given.get("kind", "event")), _as_text(rest) if rest else "")
    name = given.get("tool", given.get("name", ""))
    text = f"{name}({_as_text(given.get('arguments', ''))})"
    seconds = given.get("seconds")
    after = f" in {number(seconds)} s" if isinstance(seconds, float | int) else ""
    if given.get("error"):
        why = ": ".join(_as_text(given[key]) for key in ("error", "message") if given.get(key))
        return Event("tool call", f"{text} failed{after}: {why}", failed=True)
    result = given.get("result")
    said = "" if result is None or _has(shown, _as_text(result)) else f" → {_as_text(result)}"
    return Event("tool call", text + after + said)


def _has(text: str, part: str) -> bool:
    """True if a text has a part that is not the inside of a longer word or number."""
    return bool(part.strip()) and bool(
        re.search(rf"(?<![\w.]){re.escape(part.strip())}(?!\.?\w)", text)
    )


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
