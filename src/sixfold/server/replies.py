"""Deltas to JSON in OpenAI's two forms, whole or in chunks. Ours beside it, when asked for: token ids, their log-probs and weight versions."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from .job import Delta, Job
from .requests import Ask, ChatAsk
from .tool_calls import ToolCall, ToolCallParser


class Reply:
    """What both forms share. piece: one token as text. It counts the tokens of a stream as they pass."""

    kind = ""
    chunk_kind = ""

    def __init__(self, job: Job, ask: Ask, piece: Callable[[int], str]) -> None:
        self.job = job
        self.ask = ask
        self._piece = piece
        self._sampled = 0

    def whole(self, answers: Sequence[Delta]) -> dict[str, Any]:
        """The body of an answer that does not stream."""
        choices = []
        for delta in answers:
            self._sampled += len(delta.tokens)
            choices.append(self._choice(delta) | self._ours(delta, first=True))
        return self._envelope(self.kind) | {"choices": choices, "usage": self.usage()}

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        return []

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One chunk of a stream."""
        first = not self._sampled
        self._sampled += len(delta.tokens)
        return self._chunk([self._part(delta) | self._ours(delta, first)])

    def closing(self) -> list[dict[str, Any]]:
        """Chunks after the last token."""
        return [self._envelope(self.chunk_kind) | {"choices": [], "usage": self.usage()}] if self._counts else []

    def usage(self) -> dict[str, int]:
        """Tokens so far. A prompt counts once, whatever n."""
        prompt = sum(map(len, self.job.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": self._sampled, "total_tokens": prompt + self._sampled}

    @property
    def _counts(self) -> bool:
        return self.ask.stream_options is not None and self.ask.stream_options.include_usage

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope(self.chunk_kind) | {"choices": choices} | ({"usage": None} if self._counts else {})

    def _envelope(self, kind: str) -> dict[str, Any]:
        envelope = {"id": self.job.id, "object": kind, "created": int(self.job.created), "model": self.ask.model}
        return envelope | ({"seed": self.job.params.seed} if self.ask.return_token_ids else {})

    def _ours(self, delta: Delta, first: bool) -> dict[str, Any]:
        if not self.ask.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": self.job.prompts[delta.index // self.job.n]} if first else {}
        return prompt | {"token_ids": delta.tokens, "token_logprobs": delta.logp, "weight_versions": delta.version}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError


class TextReply(Reply):
    """/v1/completions."""

    kind = chunk_kind = "text_completion"

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {"index": delta.index, "text": delta.text, "logprobs": self._logprobs(delta), "finish_reason": delta.finish_reason}

    def _part(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self.ask.wants_logprobs:
            return None
        top = [self._alternatives(t, p, top) for t, p, top in zip(delta.tokens, delta.logp, delta.top, strict=True)] if delta.top else None
        return {"tokens": [self._piece(t) for t in delta.tokens], "token_logprobs": delta.logp, "top_logprobs": top, "text_offset": None}

    def _alternatives(self, token: int, logp: float, top: dict[int, float]) -> dict[str, float]:
        """By text, as the form has it; the sampled token is among them. Of tokens that look alike the likeliest is shown, so it is written last."""
        ordered = sorted(({token: logp} | top).items(), key=lambda item: item[1])
        return {self._piece(t): p for t, p in ordered}


class ChatReply(Reply):
    """/v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, ask: ChatAsk, piece: Callable[[int], str]) -> None:
        super().__init__(job, ask, piece)
        self._parsers = [ToolCallParser() for _ in range(job.choices)] if ask.uses_tools else []
        self._calls = [0] * job.choices

    def opening(self) -> list[dict[str, Any]]:
        """Every choice says who speaks."""
        parts = [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None} for i in range(self.job.choices)
        ]
        return [self._chunk([part]) for part in parts]

    def _choice(self, delta: Delta) -> dict[str, Any]:
        text, calls = self._read(delta)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return {"index": delta.index, "message": message, "logprobs": self._logprobs(delta), "finish_reason": self._reason(delta)}

    def _part(self, delta: Delta) -> dict[str, Any]:
        text, calls = self._read(delta)
        gained: dict[str, Any] = ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})
        return {"index": delta.index, "delta": gained, "logprobs": self._logprobs(delta), "finish_reason": self._reason(delta)}

    def _read(self, delta: Delta) -> tuple[str, list[dict[str, Any]]]:
        """(text, tool calls) that the delta brings."""
        if not self._parsers:
            return delta.text, []
        parser = self._parsers[delta.index]
        found = parser.push(delta.text) + (parser.finish() if delta.finish_reason else [])
        calls = [self._call(delta.index, item) for item in found if isinstance(item, ToolCall)]
        return "".join(item for item in found if isinstance(item, str)), calls

    def _call(self, choice: int, call: ToolCall) -> dict[str, Any]:
        self._calls[choice] += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": self._calls[choice] - 1, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}

    def _reason(self, delta: Delta) -> str | None:
        return "tool_calls" if delta.finish_reason == "stop" and self._calls[delta.index] else delta.finish_reason

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self.ask.wants_logprobs:
            return None
        tops = delta.top or [{}] * len(delta.tokens)
        content = [
            self._token(token, logp) | {"top_logprobs": [self._token(t, p) for t, p in top.items()]}
            for token, logp, top in zip(delta.tokens, delta.logp, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logp: float) -> dict[str, Any]:
        text = self._piece(token)
        whole = "\ufffd" not in text  # a token may hold a part of a character, whose bytes its text does not show
        return {"token": text, "logprob": logp, "bytes": list(text.encode()) if whole else None}
