"""Trajectories token by token. Colour is the advantage, the underline is the surprise.

Tokens that the policy did not sample are grey. All text here comes from a model or a dataset, and
each piece passes through `escape`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .marks import DOTS, mark
from .untrusted import escape, one_line

GROUPS_SHOWN = 3
SAMPLES_SHOWN = 8
TOKENS_SHOWN = 1200

Record = Mapping[str, Any]

LEGEND = (
    '<p class="legend">advantage <span class="n4">−max</span><span class="n2">−</span><span'
    ' class="a0">0</span><span class="a2">+</span><span class="a4">+max</span> · probability when'
    ' sampled <span class="a0 p1">&lt; 90 %</span> <span class="a0 p2">&lt; 50 %</span> <span'
    ' class="a0 p3">&lt; 10 %</span> <span class="a0 p4">&lt; 1 %</span> · <span class="grey">not'
    " sampled by the policy</span> · hover or tap a token for its numbers</p>"
)


def trajectories(step: int, records: Sequence[Record], first_open: bool = False) -> str:
    """HTML of the groups of a step with the widest spread of rewards, each in a <details>.

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
    shown = "".join(_group(group, scale, first_open and group is widest[0]) for group in widest)
    return (
        f"<h3>Step {step} <small>{len(widest)} of {len(groups)} groups, those with the widest"
        f" spread of rewards</small></h3>{shown}"
    )


def _group(records: Sequence[Record], scale: float, is_open: bool) -> str:
    first = records[0]
    dots = "".join(_dot(record) for record in records)
    prompt = one_line(str(first.get("prompt", "")), 90)
    head = f'<summary><span class="dots">{dots}</span> <code>{escape(prompt)}</code></summary>'
    about = [
        f"task {first.get('task_id', '')}",
        f"reference answer {first.get('answer')}",
        f"source {first.get('source') or '—'}",
    ]
    body = f'<p class="about">{escape(" · ".join(about))}</p>'
    body += f'<div class="tokens prompt">{_tokens(first, 0, _prompt_length(first), scale)}</div>'
    body += "".join(_sample(record, scale) for record in records[:SAMPLES_SHOWN])
    if len(records) > SAMPLES_SHOWN:
        body += f'<p class="about">{len(records) - SAMPLES_SHOWN} more samples in the dump</p>'
    return f"<details{' open' if is_open else ''}>{head}{body}</details>"


def _sample(record: Record, scale: float) -> str:
    facts = [f"#{record.get('sample', '?')}", f"reward {_figure(_reward(record))}"]
    advantages = _advantages(record)
    if advantages and min(advantages) == max(advantages):
        facts.append(f"advantage {advantages[0]:+.3g}")
    facts += [
        f"{len(_stream(record, 'tokens')) - _prompt_length(record)} tokens",
        str(record.get("finish_reason", "?")),
    ]
    reward = record.get("reward") or {}
    facts += [f"{name} {_figure(value)}" for name, value in (reward.get("parts") or {}).items()]
    error = f'<p class="error">{escape(reward["error"])}</p>' if reward.get("error") else ""
    tokens = _tokens(record, _prompt_length(record), len(_stream(record, "tokens")), scale)
    return (
        f'<p class="about">{_dot(record)} {escape(" · ".join(facts))}</p>{error}<div'
        f' class="tokens">{tokens}</div>'
    )


def _tokens(record: Record, start: int, stop: int, scale: float) -> str:
    ids, mask, logp, version = (
        _stream(record, name) for name in ("tokens", "mask", "logp", "version")
    )
    pieces = record.get("pieces")
    advantages, kept = _advantages(record), _kept(record)
    last = min(stop, start + TOKENS_SHOWN)
    spans = []
    for t in range(start, last):
        text = _piece(pieces[t] if isinstance(pieces, list) and t < len(pieces) else None, ids[t])
        if mask[t]:
            advantage = (
                advantages[t]
                if len(advantages) == len(ids)
                else advantages[0]
                if advantages
                else None
            )
            spans.append(
                _sampled(text, ids[t], logp[t], version[t], advantage, scale, kept.get(t, ""))
            )
        else:
            spans.append(
                f'<span class="grey" data-t="id {escape(ids[t])} · not sampled">{text}</span>'
            )
    more = f'<span class="grey"> … {stop - last} more tokens</span>' if stop > last else ""
    return "".join(spans) + more


def _sampled(
    text: str,
    token: object,
    logp: float | None,
    version: object,
    advantage: float | None,
    scale: float,
    kept: str,
) -> str:
    if isinstance(logp, float | int):
        surprise, probability = (
            _surprise(logp),
            f"log-prob {logp:.4f} (p {math.exp(min(logp, 0.0)):.3g})",
        )
    else:
        surprise, probability = 4, "log-prob not finite"
    tip = f"id {token} · {probability} · version {version} · advantage {_figure(advantage)}{kept}"
    return (
        f'<span class="{_shade(advantage, scale)} p{surprise}" data-t="{escape(tip)}">{text}</span>'
    )


def _kept(record: Record) -> dict[int, str]:
    """Token index -> the tokens kept by truncated sampling, in words. Empty without truncation."""
    kept = record.get("kept")
    if not kept:
        return {}
    sampled = [t for t, is_sampled in enumerate(_stream(record, "mask")) if is_sampled]
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
    if text is None:
        return f"{escape(token)} "
    if text == "":
        return f"⟨{escape(token)}⟩"
    return escape(text).replace("\n", '<span class="nl">⏎</span>\n')


def _dot(record: Record) -> str:
    reward = record.get("reward")
    solved = reward.get("solved") if isinstance(reward, Mapping) else None
    found = mark(_reward(record), solved if isinstance(solved, bool) else None)
    return (
        f'<span class="dot-{found}" title="reward {_figure(_reward(record))}">{DOTS[found]}</span>'
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
