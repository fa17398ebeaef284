"""Limits on a request's body, checked before the body is parsed or validated.

The checks run from cheap to expensive: the announced length, the bytes held by all requests, the
number of JSON values (counted in the raw bytes), then the lengths of lists and the keys of objects.
A body that passes is small enough for pydantic and the tokenizer.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from .api_error import ApiError, bad_request

MAX_BODY = 4 << 20
"""Most bytes in the body of one request."""
MAX_BODIES = 64 << 20
"""Most bytes in all bodies that are arriving at the same time."""
MAX_VALUES = 1 << 18
"""Most JSON values in a body. A prompt of token ids needs one per token."""
MAX_ITEMS = 4096
"""Most items in a list that the server reads one by one: messages, message parts, tool calls."""
MAX_KEYS = 64
"""Most keys in an object that the server reads one by one."""
MAX_PARTS = 1 << 15
"""Most objects, lists and values in a body that are read one by one."""
MAX_DEPTH = 100
"""Deepest nesting of lists and objects."""

BULK = {"prompt", "prompt_ids", "completion_ids", "stop_token_ids"}
"""Fields with numbers or texts as items, whose types are checked in one pass."""
TOKENS = "input"
"""Field whose lists of token ids are treated as `BULK`. Its other items are read one by one."""
FREE = {"parameters", "schema", "metadata", "logit_bias", "chat_template_kwargs"}
"""Fields with arbitrary JSON, which is passed on without being read."""


class BodyReader:
    """Reads request bodies, within a limit on the memory of all bodies that are arriving."""

    def __init__(self) -> None:
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """Read the body of a request.

        Raises:
            ApiError: 413 as soon as the body is known to be too long, 503 if the bodies that are
                arriving need too much memory.
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
                    raise ApiError(
                        503,
                        "too many requests are arriving. Try again later",
                        headers={"Retry-After": "1"},
                    )
            return bytes(body)
        finally:
            self._held -= len(body)


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse the body as a JSON object and check the sizes of its lists and objects.

    Raises:
        ApiError: the body is not a JSON object, has numbers or characters that JSON does not allow,
            or has too many values.
    """
    values = 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if values > MAX_VALUES:
        message = (
            f"the body has more than {MAX_VALUES} values (counted by commas and brackets). Send"
            " fewer values per request"
        )
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
            # A lone surrogate is valid JSON but breaks tokenizers: `encode` raises an error for it.
            json.dumps(body, ensure_ascii=False).encode()
        return body
    # ValueError includes UnicodeError, and integers with more digits than Python converts.
    except (ValueError, RecursionError) as error:
        raise bad_request(
            f"the body is not valid JSON: {str(error) or type(error).__name__}", code="invalid_json"
        ) from error


class _Count:
    """Counts the values that validation would read.

    Without this check, pydantic would produce one message per item of a long list.
    """

    def __init__(self) -> None:
        self._parts = 0

    def check(self, body: dict[str, Any]) -> None:
        """Raise ApiError for a list, an object or a body with too many parts."""
        self._object(body, "", 0)

    def _object(self, value: dict[str, Any], where: str, depth: int) -> None:
        if len(value) > MAX_KEYS:
            raise bad_request(
                f"{where or 'the body'} has {len(value)} keys, but at most {MAX_KEYS} are"
                " allowed. Remove some",
                where.partition("[")[0] or None,
            )
        for key, item in value.items():
            if len(key) > 1000:
                raise bad_request(
                    f"unknown parameter '{shortened(key)}'", shortened(key), "unknown_parameter"
                )
            if key in FREE or (key in BULK and not depth):
                continue
            self._value(item, f"{where}.{key}" if where else key, depth)

    def _value(self, value: Any, where: str, depth: int) -> None:
        self._parts += 1
        field = where.partition("[")[0].partition(".")[0]
        if self._parts > MAX_PARTS:
            raise bad_request(
                f"{field} has too many parts: at most {MAX_PARTS} per request. Send fewer",
                field,
                "too_many_parts",
            )
        if depth > MAX_DEPTH:
            raise bad_request(f"{field} is nested too deeply. Flatten it", field, "invalid_value")
        if isinstance(value, dict):
            self._object(value, where, depth + 1)
        elif isinstance(value, list):
            if where.partition("[")[0] == TOKENS and all(type(item) is int for item in value):
                return
            if len(value) > MAX_ITEMS:
                raise bad_request(
                    f"{where} has {len(value)} items, but at most {MAX_ITEMS} are allowed. Send"
                    " fewer",
                    field,
                    "too_many_items",
                )
            for i, item in enumerate(value):
                self._value(item, f"{where}[{i}]", depth + 1)


def shortened(text: str) -> str:
    """A client's text shortened for a message, to at most 100 characters."""
    return text if len(text) <= 100 else f"{text[:97]}..."


def _too_long() -> ApiError:
    return ApiError(
        413,
        f"the body has more than {MAX_BODY} bytes. Send less per request",
        code="body_too_large",
    )


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number. Use a finite number")
