"""Tokens and text of one episode while it is played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..types import SAMPLED, Kept, Routes, Turn
from .generator import Sampled


@dataclass
class Transcript:
    """Token streams of an episode, all of one length.

    Attributes:
        tokens: prompt, replies and observations so far.
        provenance: one letter per token, as in `Trajectory`.
        logp: log-prob of each sampled token; 0 for other tokens.
        version: weight version of each sampled token; -1 for other tokens.
        turns: the replies.
        kept: kept sets of the sampled tokens; empty without truncated sampling.
        routes: experts that computed the tokens, if they are recorded.
        pieces: text after the prompt, in parts.
    """

    tokens: list[int] = field(default_factory=list)
    provenance: str = ""
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    kept: Kept = field(default_factory=Kept)
    routes: Routes | None = None
    pieces: list[str] = field(default_factory=list)

    def write(self, tokens: Sequence[int], provenance: str, text: str = "") -> None:
        """Append tokens that the policy did not sample.

        Args:
            tokens: token ids.
            provenance: one letter per token: p, t or o.
            text: text of the tokens, without what the template adds.
        """
        self.tokens += tokens
        self.provenance += provenance
        self.logp += [0.0] * len(tokens)
        self.version += [-1] * len(tokens)
        self.pieces.append(text)

    def reply(self, sampled: Sampled, text: str) -> None:
        """Append a reply of the policy.

        Args:
            sampled: the reply.
            text: the reply as text, before the stop string that ended it.
        """
        start = len(self.tokens)
        self.tokens += sampled.tokens
        self.provenance += SAMPLED * len(sampled.tokens)
        self.logp += sampled.logp
        self.version += sampled.version
        if sampled.kept:
            self.kept.ids.extend(sampled.kept.ids)
            self.kept.counts.extend(sampled.kept.counts)
            self.kept.mass.extend(sampled.kept.mass)
        if sampled.routes:
            known = self.routes
            self.routes = sampled.routes if known is None else known.grown(sampled.routes)
        self.turns.append(
            Turn(
                start,
                len(self.tokens),
                finish_reason=sampled.finish_reason,
                seconds=sampled.seconds,
            )
        )
        self.pieces.append(text)

    def credit(self, reward: float, tool_errors: int, events: int) -> None:
        """Record the reward, tool errors and events of the last reply.

        Args:
            reward: reward of the reply.
            tool_errors: number of its tool calls that failed.
            events: number of events recorded after it.
        """
        if self.turns:
            self.turns[-1] = replace(
                self.turns[-1], reward=reward, tool_errors=tool_errors, events=events
            )

    @property
    def text(self) -> str:
        """Everything after the prompt as text."""
        return "".join(self.pieces)


def observation_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Content of the messages after a reply, without what the template adds."""
    return "\n".join(["", *(m["content"] for m in messages), ""])
