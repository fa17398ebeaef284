"""Convert deltas to JSON in OpenAI's formats for chats and texts, complete or in chunks.

On request, an answer also includes token ids, their log-probs and weight versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from heapq import nlargest
from typing import Any

from sixfold.renderer.call_formats import HERMES
from sixfold.renderer.renderer import Renderer
from sixfold.renderer.tool_calls import CallParser
from sixfold.rollout.engine_job import Delta
from sixfold.types import ToolCall

from .chat_ask import ChatAsk
from .exchange import Exchange
from .requests import Ask, TextAsk


class Reply:
    """Base class of all answer formats. It counts the sampled tokens.

    Args:
        renderer: shows tokens as text.

    Attributes:
        last_event: last line of a stream.
    """

    kind = ""
    chunk_kind = ""
    last_event = "data: [DONE]\n\n"

    def __init__(self, exchange: Exchange, ask: Ask, renderer: Renderer) -> None:
        self.exchange = exchange
        self.job = exchange.job
        self.ask = ask
        self._renderer = renderer
        self._sampled = 0

    def whole(self, answers: Sequence[Delta]) -> dict[str, Any]:
        """The body of an answer that does not stream, from one delta per sampled completion."""
        self._sampled += sum(len(delta.tokens) for delta in answers)
        choices: list[dict[str, Any]] = []
        for delta in self._best(answers):
            choice = self._choice(delta) | self._ours(delta, first=True)
            choices.append(choice | {"index": len(choices)})
        return self._envelope(self.kind) | {"choices": choices, "usage": self.usage()}

    def opening(self) -> list[dict[str, Any]]:
        """Chunks of a stream before the first token."""
        return []

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Chunks of a stream for one delta."""
        first = not self._sampled
        self._sampled += len(delta.tokens)
        return [self._chunk([self._part(delta) | self._ours(delta, first)])]

    def closing(self) -> list[dict[str, Any]]:
        """Chunks of a stream after the last token."""
        return (
            [self._envelope(self.chunk_kind) | {"choices": [], "usage": self.usage()}]
            if self._counts
            else []
        )

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """Chunk of a stream for an error. It is needed because the HTTP status is already sent."""
        return error

    def usage(self) -> dict[str, int]:
        """Token counts so far. A prompt is counted once, not n times."""
        prompt = sum(map(len, self.job.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._sampled,
            "total_tokens": prompt + self._sampled,
        }

    @property
    def _counts(self) -> bool:
        return self.ask.stream_options is not None and self.ask.stream_options.include_usage

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return (
            self._envelope(self.chunk_kind)
            | {"choices": choices}
            | ({"usage": None} if self._counts else {})
        )

    def _best(self, answers: Sequence[Delta]) -> list[Delta]:
        """The n completions of each prompt with the largest log-prob per token, best first.

        All of them, in order, if no more than n were sampled.
        """
        n, samples = self.ask.n, self.ask.samples
        if samples == n:
            return [*answers]
        prompts = [answers[at : at + samples] for at in range(0, len(answers), samples)]
        return [one for some in prompts for one in nlargest(n, some, key=_log_prob_per_token)]

    def _envelope(self, kind: str) -> dict[str, Any]:
        envelope = {
            "id": self.exchange.id,
            "object": kind,
            "created": int(self.exchange.created),
            "model": self.ask.model,
        }
        return envelope | ({"seed": self.job.params.seed} if self.ask.return_token_ids else {})

    def _ours(self, delta: Delta, first: bool) -> dict[str, Any]:
        if not self.ask.return_token_ids:
            return {}
        asked = self.job.prompts[self.exchange.prompt_of(delta.index)]
        prompt = {"prompt_token_ids": asked} if first else {}
        return prompt | {
            "token_ids": delta.tokens,
            "token_logprobs": delta.logp,
            "weight_versions": delta.version,
        }

    def _choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError


def _log_prob_per_token(delta: Delta) -> float:
    """Mean log-prob of the sampled tokens, the end token among them. 0 without tokens."""
    return math.fsum(delta.logp) / max(1, len(delta.logp))


class TextReply(Reply):
    """Answer of /v1/completions. With `echo`, a choice begins with its prompt.

    Args:
        renderer: shows tokens as text.
        echoed: the prompts as texts; empty without `echo`.
    """

    kind = chunk_kind = "text_completion"

    def __init__(
        self, exchange: Exchange, ask: TextAsk, renderer: Renderer, echoed: Sequence[str] = ()
    ) -> None:
        super().__init__(exchange, ask, renderer)
        choices = range(self.job.choices) if echoed else ()
        self._to_echo = {i: echoed[exchange.prompt_of(i)] for i in choices}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        echoes = delta.index in self._to_echo
        text = self._to_echo.pop(delta.index, "") + delta.text
        choice = {
            "index": delta.index,
            "text": text,
            "logprobs": self._logprobs(delta, echoes),
            "finish_reason": delta.finish_reason,
        }
        return choice | ({} if self.ask.named_noise is None else _facts(delta))

    def _part(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta)

    def _logprobs(self, delta: Delta, echoes: bool) -> dict[str, Any] | None:
        if not self.ask.wants_logprobs:
            return None
        tokens: list[int] = list(delta.tokens)
        logps: list[float | None] = list(delta.logp)
        tops: list[dict[int, float] | None] = list(delta.top)
        if echoes:  # the first token of a prompt has no log-prob
            prompt = self.exchange.prompt_of(delta.index)
            score = self.job.scores[prompt]
            tokens, logps, tops = (
                [*self.job.prompts[prompt], *tokens],
                [None, *score.logp, *logps],
                [None, *score.top, *tops],
            )
        shown = (
            [self._alternatives(t, p, top) for t, p, top in zip(tokens, logps, tops, strict=True)]
            if self.ask.alternatives
            else None
        )
        return {
            "tokens": [self._renderer.piece(t) for t in tokens],
            "token_logprobs": logps,
            "top_logprobs": shown,
            "text_offset": None,
        }

    def _alternatives(
        self, token: int, logp: float | None, top: dict[int, float] | None
    ) -> dict[str, float] | None:
        """Log-probs by token text, as in OpenAI's format. The sampled token is included.

        Of tokens with the same text the likeliest is shown. It comes last in the order, so it
        overwrites the others.

        Args:
            logp: its log-prob, or None for the first token of a prompt.
            top: likeliest tokens at this position, id -> log-prob.
        """
        if logp is None or top is None:
            return None
        ordered = sorted(({token: logp} | top).items(), key=lambda item: item[1])
        return {self._renderer.piece(t): p for t, p in ordered}


def _facts(delta: Delta) -> dict[str, Any]:
    """Facts about a finished completion that a generator reports (`Sampled`)."""
    if delta.sequence is None:
        return {}
    kept = delta.sequence.kept
    return {
        "stopped": delta.stopped,
        "reused_tokens": delta.sequence.reused,
        "seconds": delta.sequence.seconds,
        "kept_tokens": kept.to_record() if kept else None,
    }


class TokenLogprobs:
    """Log-probs of tokens in the format of chats and responses."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def content(self, delta: Delta) -> list[dict[str, Any]]:
        """One entry per sampled token, with the likeliest tokens at its position if requested."""
        tops = delta.top or [{}] * len(delta.tokens)
        return [
            self._token(token, logp) | {"top_logprobs": [self._token(t, p) for t, p in top.items()]}
            for token, logp, top in zip(delta.tokens, delta.logp, tops, strict=True)
        ]

    def _token(self, token: int, logp: float) -> dict[str, Any]:
        return {
            "token": self._renderer.piece(token),
            "logprob": logp,
            "bytes": list(self._renderer.piece_bytes(token)),
        }


def call_parser(ask: ChatAsk, renderer: Renderer, exchange: Exchange) -> CallParser:
    """Parser of tool calls in one answer.

    Under a grammar, calls have the format of the grammar. If the format of the model's template is
    unknown, the Hermes format is used, because most models write it.
    """
    if not ask.form().is_free:
        return HERMES.parser(ask.shown_tools())
    form = renderer.known_call_format or HERMES
    return form.parser(ask.shown_tools(), renderer.opened(exchange.job.prompts[0]))


class ChatReply(Reply):
    """Answer of /v1/chat/completions. The arguments are those of `Reply`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, exchange: Exchange, ask: ChatAsk, renderer: Renderer) -> None:
        super().__init__(exchange, ask, renderer)
        self._tokens = TokenLogprobs(renderer)
        choices = range(self.job.choices) if ask.uses_tools else ()
        self._parsers = [call_parser(ask, renderer, exchange) for _ in choices]
        self._calls = [0] * self.job.choices

    def opening(self) -> list[dict[str, Any]]:
        """One chunk per choice with the role of the assistant."""
        parts = [
            {
                "index": i,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            for i in range(self.job.choices)
        ]
        return [self._chunk([part]) for part in parts]

    def _choice(self, delta: Delta) -> dict[str, Any]:
        text, calls = self._read(delta)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [
                {k: v for k, v in call.items() if k != "index"} for call in calls
            ]
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": self._reason(delta),
        }

    def _part(self, delta: Delta) -> dict[str, Any]:
        text, calls = self._read(delta)
        gained: dict[str, Any] = ({"content": text} if text else {}) | (
            {"tool_calls": calls} if calls else {}
        )
        return {
            "index": delta.index,
            "delta": gained,
            "logprobs": self._logprobs(delta),
            "finish_reason": self._reason(delta),
        }

    def _read(self, delta: Delta) -> tuple[str, list[dict[str, Any]]]:
        """New text and new tool calls of a delta."""
        if not self._parsers:
            return delta.text, []
        parser = self._parsers[delta.index]
        found = parser.push(delta.text) + (parser.finish() if delta.finish_reason else [])
        calls = [self._call(delta.index, item) for item in found if isinstance(item, ToolCall)]
        return "".join(item for item in found if isinstance(item, str)), calls

    def _call(self, choice: int, call: ToolCall) -> dict[str, Any]:
        self._calls[choice] += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "index": self._calls[choice] - 1,
            "id": self.exchange.call_id(choice, self._calls[choice] - 1),
            "type": "function",
            "function": function,
        }

    def _reason(self, delta: Delta) -> str | None:
        return (
            "tool_calls"
            if delta.finish_reason == "stop" and self._calls[delta.index]
            else delta.finish_reason
        )

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return (
            {"content": self._tokens.content(delta), "refusal": None}
            if self.ask.wants_logprobs
            else None
        )


def shown_reply(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the message of an answer to the form of `ChatAsk.shown_messages`."""
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.loads(call["function"]["arguments"]),
            },
        }
        for call in message.get("tool_calls") or ()
    ]
    shown = {"role": "assistant", "content": message.get("content") or ""}
    return shown | ({"tool_calls": calls} if calls else {})
