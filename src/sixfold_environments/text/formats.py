"""Rewards for the format of a completion: 1 if the format is exact, otherwise 0.

Each is a separate reward beside the one for the answer, so that both are logged as parts. A
completion with a forged turn (`marks`) is rejected. Tags inside a JSON value are text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sixfold.environment.answer_part import answer_part, without_json
from sixfold.environment.grade import Grade
from sixfold.types import Task

from .marks import forged_turn, visible

_THINK = re.compile(r"<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)
_THINK_ANSWER = re.compile(
    r"<think>(?P<thought>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>", re.DOTALL
)
_THINK_TAG = re.compile(r"<\s*/?\s*(?:think|thinking|thought|reasoning)\b[^<>]*>", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<\s*/?\s*answer\b[^<>]*>", re.IGNORECASE)
MAX_JSON_CHARACTERS = 1_000_000
MAX_JSON_DEPTH = 100


def think_format(completion: str, task: Task) -> Grade:
    """1 for <think>...</think> and an answer after it.

    Both must have content. The tags are written in lower case, appear once, and nothing comes
    before them.
    """
    return _grade_tags(completion, _THINK, [_THINK_TAG])


def think_answer_format(completion: str, task: Task) -> Grade:
    """1 for <think>...</think><answer>...</answer>, as in DeepSeek-R1-Zero.

    Both must have content. The tags are written in lower case, appear once and in this order, and
    nothing but white space is outside of them.
    """
    return _grade_tags(completion, _THINK_ANSWER, [_THINK_TAG, _ANSWER_TAG])


def json_format(completion: str, task: Task) -> Grade:
    """1 if the text after the last thought is a JSON object or array, and nothing else.

    No code fence, no comment, no key twice, and no NaN or Infinity.
    """
    if forged := forged_turn(without_json(completion)):
        return _reject(f"spells {forged}")
    text = answer_part(completion)
    if len(text) > MAX_JSON_CHARACTERS:
        return _reject(f"over {MAX_JSON_CHARACTERS} characters")
    try:
        value = strict_json(text)
    except ValueError as error:
        return _reject(f"not raw JSON: {error}")
    if not isinstance(value, dict | list):
        return _reject(f"a JSON {type(value).__name__}, not an object or an array")
    return Grade(1.0, "passed")


def strict_json(text: str) -> Any:
    """The value of JSON text.

    Raises:
        ValueError: if it is not JSON, has a key twice, NaN or Infinity, or is nested too deep.
    """
    if _depth(text) > MAX_JSON_DEPTH:
        raise ValueError(f"nested over {MAX_JSON_DEPTH} deep")
    return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)


def _grade_tags(completion: str, form: re.Pattern[str], tags: list[re.Pattern[str]]) -> Grade:
    text = without_json(completion.strip())
    if forged := forged_turn(text):
        return _reject(f"spells {forged}")
    for tag in tags:
        if len(tag.findall(text)) != 2:
            return _reject("a tag is missing, unknown or repeated")
    found = form.fullmatch(text)
    if found is None:
        return _reject("tags in another order, or text outside of them")
    for part in ("thought", "answer"):
        if not visible(found[part]).strip():
            return _reject(f"the {part} is empty")
    return Grade(1.0, "passed")


def _reject(detail: str) -> Grade:
    return Grade(0.0, "rejected", detail)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _depth(text: str) -> int:
    """Upper bound of the nesting: brackets in strings count too."""
    deepest = depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest
