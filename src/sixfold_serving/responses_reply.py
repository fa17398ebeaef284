"""Convert deltas to the events and the response object of /v1/responses."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from sixfold.renderer.renderer import Renderer
from sixfold.rollout.engine_job import Delta
from sixfold.types import ToolCall

from .chat_ask import ChatAsk
from .exchange import Exchange
from .replies import Reply, TokenLogprobs, call_parser
from .responses_ask import ResponsesAsk


class ResponsesReply(Reply):
    """One answer: a message, function calls, or both.

    Items are numbered in the order in which they begin.

    Args:
        renderer: shows tokens as text.
        asked: the body of the request.
    """

    last_event = ""

    def __init__(
        self, exchange: Exchange, ask: ChatAsk, renderer: Renderer, asked: ResponsesAsk
    ) -> None:
        super().__init__(exchange, ask, renderer)
        self._asked = asked
        self._id = exchange.id
        self._parser = call_parser(ask, renderer, exchange) if ask.uses_tools else None
        self._logprobs = TokenLogprobs(renderer)
        self._items: list[dict[str, Any]] = []
        self._text: dict[str, Any] | None = None
        self._number = 0
        self._reason: str | None = None

    def whole(self, answers: Sequence[Delta]) -> dict[str, Any]:
        """The complete response object, for an answer that does not stream."""
        for delta in answers:
            self.chunks(delta)
        self.closing()
        return self._response(self._status)

    def opening(self) -> list[dict[str, Any]]:
        """The events before the first token."""
        return [
            self._event(f"response.{name}", response=self._response("in_progress"))
            for name in ("created", "in_progress")
        ]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of a delta."""
        self._sampled += len(delta.tokens)
        self._reason = delta.finish_reason or self._reason
        found: list[str | ToolCall] = [delta.text] if delta.text else []
        if self._parser is not None:
            found = self._parser.push(delta.text) + (
                self._parser.finish() if delta.finish_reason else []
            )
        events: list[dict[str, Any]] = []
        for item in found:
            events += self._call(item) if isinstance(item, ToolCall) else self._more_text(item)
        if self.ask.wants_logprobs and self._parser is None:
            events += self._begin_text() if self._text is None else []
            assert self._text is not None
            self._text["content"][0]["logprobs"] += self._logprobs.content(delta)
        return events

    def closing(self) -> list[dict[str, Any]]:
        """The events after the last token: the end of the message, and the complete response."""
        events = self._end_text()
        if not self._items:  # an answer without text or calls still needs an (empty) message
            events = self._begin_text() + self._end_text()
        kind = "response.completed" if self._status == "completed" else "response.incomplete"
        return [*events, self._event(kind, response=self._response(self._status))]

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The event of an answer that ended with an error."""
        inner = error["error"]
        response = self._response("failed") | {
            "error": {"code": "server_error", "message": inner["message"]}
        }
        return self._event("response.failed", response=response)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _begin_text(self) -> list[dict[str, Any]]:
        self._text = {
            "type": "message",
            "id": f"msg_{secrets.token_hex(12)}",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        at = len(self._items)
        self._items.append(self._text)
        added = self._event(
            "response.output_item.added", output_index=at, item=self._text | {"content": []}
        )
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._text["content"].append(part)
        where = {"item_id": self._text["id"], "output_index": at, "content_index": 0}
        return [
            added,
            self._event(
                "response.content_part.added", **where, part=dict(part, annotations=[], logprobs=[])
            ),
        ]

    def _more_text(self, text: str) -> list[dict[str, Any]]:
        events = [] if self._text is not None else self._begin_text()
        assert self._text is not None
        self._text["content"][0]["text"] += text
        where = {
            "item_id": self._text["id"],
            "output_index": self._items.index(self._text),
            "content_index": 0,
        }
        return [
            *events,
            self._event("response.output_text.delta", **where, delta=text, logprobs=[]),
        ]

    def _end_text(self) -> list[dict[str, Any]]:
        if self._text is None:
            return []
        item, self._text = self._text, None
        item["status"] = self._status
        part = item["content"][0]
        where = {"item_id": item["id"], "output_index": self._items.index(item), "content_index": 0}
        return [
            self._event(
                "response.output_text.done", **where, text=part["text"], logprobs=part["logprobs"]
            ),
            self._event("response.content_part.done", **where, part=part),
            self._event("response.output_item.done", output_index=where["output_index"], item=item),
        ]

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        events, at = self._end_text(), len(self._items)
        item = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": self.exchange.call_id(0, at),
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        self._items.append(item)
        where = {"item_id": item["id"], "output_index": at}
        return [
            *events,
            self._event(
                "response.output_item.added",
                output_index=at,
                item=item | {"arguments": "", "status": "in_progress"},
            ),
            self._event("response.function_call_arguments.delta", **where, delta=call.arguments),
            self._event(
                "response.function_call_arguments.done",
                **where,
                name=call.name,
                arguments=call.arguments,
            ),
            self._event("response.output_item.done", output_index=at, item=item),
        ]

    def _response(self, status: str) -> dict[str, Any]:
        asked, done = self._asked, status in ("completed", "incomplete")
        prompt = sum(map(len, self.job.prompts))
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self._sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + self._sampled,
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(self.exchange.created),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": dict(asked.metadata),
            "model": asked.model,
            "output": list(self._items) if done else [],
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": self.job.params.temperature,
            "text": {
                "format": (
                    asked.text.format.model_dump(by_alias=True, exclude_none=True)
                    if asked.text.format
                    else {"type": "text"}
                )
            },
            "tool_choice": (
                asked.tool_choice
                if isinstance(asked.tool_choice, str)
                else asked.tool_choice.model_dump()
            ),
            "tools": [tool.model_dump() for tool in asked.tools],
            "top_p": self.job.params.top_p,
            "truncation": "disabled",
            "usage": usage if done else None,
        }
