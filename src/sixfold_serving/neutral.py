"""Request fields of OpenAI and other servers that are accepted but not supported.

Clients send every field that they know. A field is ignored if no value of it could change an answer
of this server. Other fields are accepted with neutral values. With any other value, the request is
refused and the error names the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .api_error import bad_request
from .bounds import shortened

IGNORED = {
    "user",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "parallel_tool_calls",
    "reasoning_effort",
    "verbosity",
    "request_id",
    "cache_salt",
    "session_id",
}
"""Fields that never change an answer, or that are hints for other kinds of models."""

NEUTRAL: dict[str, list[Any]] = {
    "add_generation_prompt": [True],
    "add_special_tokens": [True, False],
    "best_of": [1],
    "chat_template_kwargs": [{}],
    "continue_final_message": [False],
    "documents": [[]],
    "early_stopping": [False],
    "echo": [False],
    "function_call": ["auto", "none"],
    "functions": [[]],
    "ignore_eos": [False],
    "include_stop_str_in_output": [False],
    "length_penalty": [1],
    "logit_bias": [{}],
    "logits_processors": [[]],
    "min_tokens": [0],
    "modalities": [["text"]],
    "no_repeat_ngram_size": [0],
    "no_stop_trim": [False],
    "presence_penalty": [0],
    "frequency_penalty": [0],
    "response_format": [{"type": "text"}],
    "tool_choice": ["auto", "none"],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True, False],
    "suffix": [""],
    "typical_p": [1],
    "use_beam_search": [False],
}
"""Field -> accepted values, for endpoints that have no field of that name."""

EMPTY: dict[str, list[Any]] = {"tools": [[]], "stop": [[]]}
"""Field -> values with which it counts as absent."""


def without_neutral(
    body: Mapping[str, Any], known: Mapping[str, Any], neutral: Mapping[str, list[Any]] = NEUTRAL
) -> dict[str, Any]:
    """The fields of a body that the endpoint must read. Fields that are null count as absent.

    Args:
        known: the fields of the endpoint. They are always returned, unless they are null or
            `EMPTY`.
        neutral: field -> accepted values, for fields that the endpoint does not have.

    Raises:
        ApiError: an unsupported field has a value that would change the answer.
    """
    given: dict[str, Any] = {}
    for key, value in body.items():
        if (
            value is None
            or (key in EMPTY and _is_one_of(value, EMPTY[key]))
            or (key in IGNORED and key not in known)
        ):
            continue
        if key not in neutral or key in known:
            given[key] = value
        elif not _is_one_of(value, neutral[key]):
            allowed = "".join(f" or use {json.dumps(v)}" for v in neutral[key])
            raise bad_request(
                f"{shortened(key)} has a value that is not supported. Remove it{allowed}",
                key,
                "unsupported_value",
            )
    return given


def _is_one_of(value: Any, values: list[Any]) -> bool:
    """True if the value is in the list. `True` does not equal 1 here."""
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)
