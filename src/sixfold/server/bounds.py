"""Limits on a request's body, checked before the body is parsed or validated.

The cost of a request is bounded by the cheapest test that can refuse it: its announced length, the
bytes that all requests hold, the number of JSON values (counted in the raw bytes), and then the
lengths of lists and the keys of objects. What passes is small enough for pydantic and the
tokenizer.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from .api_error import ApiError, bad_request

MAX_BODY = 4 << 20
"""Bytes of a request's body."""
MAX_BODIES = 64 << 20
"""Bytes that the bodies of all requests may hold while they arrive."""
MAX_VALUES = 1 << 18
"""JSON values in a body. A prompt of token ids needs one per token."""
MAX_ITEMS = 4096
"""Items of a list that the server reads one by one: messages, parts of a message, tool calls."""
MAX_KEYS = 64
"""Keys of an object that the server reads one by one."""
MAX_PARTS = 1 << 15
"""Objects, lists and values of a body that are read one by one."""
MAX_DEPTH = 100
"""Nesting of lists and objects."""

BULK = {"prompt", "stop_token_ids"}
"""Fields whose items are numbers or texts that are checked by type in one pass."""
FREE = {"parameters", "schema", "metadata", "logit_bias", "chat_template_kwargs"}
"""Fields that hold any JSON: they are passed on, not read."""


class BodyReader:
    """Reads bodies, and refuses when the bodies that are arriving hold too much memory together."""

    def __init__(self) -> None:
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """The body.

        Raises:
            ApiError: 413 as soon as the body is known to be too long, 503 if too many bodies
                are arriving.
        """
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and (len(announced) > 12 or int(announced) > MAX_BODY):
            raise _too_long()
        body = bytearray()
        try:
            async for piece in request.stream():
                body += piece
                self._held += len(piece)
                if len(body) > MAX_BODY:
                    raise _too_long()
                if self._held > MAX_BODIES:
                    raise ApiError(503, "too many requests are arriving: try again later", headers={"Retry-After": "1"})
            return bytes(body)
        finally:
            self._held -= len(body)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The body as an object whose lists and objects are short enough to be read one by one.

    Raises:
        ApiError: the body is not JSON, holds numbers or characters that JSON does not have, or has
            too many values.
    """
    values = 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if values > MAX_VALUES:
        message = f"the body has over {MAX_VALUES} values (counted by its commas and brackets): send fewer in one request"
        raise ApiError(413, message, code="body_too_large")
    body = _json(raw)
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    _Count().check(body)
    return body


def _json(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8-sig")
        body = json.loads(text, parse_constant=_no_constant)
        if "\\u" in text:
            json.dumps(body, ensure_ascii=False).encode()  # a lone surrogate passes as JSON and breaks tokenizers
        return body
    except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError, as is a number of more digits than Python reads
        raise bad_request(f"the body is not valid JSON: {str(error) or type(error).__name__}", code="invalid_json") from error


class _Count:
    """Counts what validation would look at, so that a long list costs one message and not one per item."""

    def __init__(self) -> None:
        self._parts = 0

    def check(self, body: dict[str, Any]) -> None:
        """Raises ApiError for a list, an object or a body with too many parts."""
        self._object(body, "", 0)

    def _object(self, value: dict[str, Any], where: str, depth: int) -> None:
        if len(value) > MAX_KEYS:
            raise bad_request(f"{where or 'the body'} has {len(value)} keys: at most {MAX_KEYS}", where.partition("[")[0] or None)
        for key, item in value.items():
            if len(key) > 1000:
                raise bad_request(f"unknown parameter '{shortened(key)}'", shortened(key), "unknown_parameter")
            if key in FREE or (key in BULK and not depth):
                continue
            self._value(item, f"{where}.{key}" if where else key, depth)

    def _value(self, value: Any, where: str, depth: int) -> None:
        self._parts += 1
        field = where.partition("[")[0].partition(".")[0]
        if self._parts > MAX_PARTS:
            raise bad_request(f"{field} has too many parts: at most {MAX_PARTS} in one request", field, "too_many_parts")
        if depth > MAX_DEPTH:
            raise bad_request(f"{field} is nested too deeply", field, "invalid_value")
        if isinstance(value, dict):
            self._object(value, where, depth + 1)
        elif isinstance(value, list):
            if len(value) > MAX_ITEMS:
                raise bad_request(f"{where} has {len(value)} items: at most {MAX_ITEMS}", field, "too_many_items")
            for i, item in enumerate(value):
                self._value(item, f"{where}[{i}]", depth + 1)


def shortened(text: str) -> str:
    """A client's text for a message: at most 100 characters."""
    return text if len(text) <= 100 else f"{text[:97]}..."


def _too_long() -> ApiError:
    return ApiError(413, f"the body has over {MAX_BODY} bytes", code="body_too_large")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
