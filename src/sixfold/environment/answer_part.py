"""The part of a completion that is its answer: the text after the last thought.

Think blocks are tags (<think>, [THINK], ...) or, for gpt-oss, channels: analysis and commentary are
thoughts, and the final channel is the answer. A completion whose last thought is not finished has
no answer. If the prompt opened the block, rewards read the completion with the opening tag before
it. A tag inside a JSON value is text.
"""

from __future__ import annotations

import json
import re

_NAME = "(?:think|thinking|thoughts?|reasoning|scratchpad|reflection|seed:think)"
# Tags are recognised in any case, with spaces or attributes: a thought does not become an answer by
# its spelling.
_OPENING = re.compile(
    rf"<\s*{_NAME}\b[^<>]*>|\[THINK\]|◁think▷|<\|START_THINKING\|>|<\|begin_of_thought\|>"
    r"|<\|channel\|>(?:analysis|commentary)(?:<\|message\|>)?|<\|channel>thought",
    re.IGNORECASE,
)
_CLOSING = re.compile(
    rf"<\s*/\s*{_NAME}\s*>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>|<\|end_of_thought\|>"
    r"|<\|channel\|>final(?:<\|message\|>)?|<channel\|>",
    re.IGNORECASE,
)


_JSON = re.compile(
    rf"(?:\A|{_OPENING.pattern}|{_CLOSING.pattern}|<tool_call>|<answer>|```(?:json)?)\s*(?=[\[{{])",
    re.IGNORECASE,
)
"""Where a JSON value may begin."""
_HIDDEN = "0"
_MAX_TRIES = 64
_DECODER = json.JSONDecoder()


def answer_part(completion: str) -> str:
    """The text after the last finished thought; empty if a thought is still open."""
    seen = without_json(completion)
    end = max((found.end() for found in _CLOSING.finditer(seen)), default=0)
    return "" if _OPENING.search(seen, end) else completion[end:]


def without_json(text: str) -> str:
    """The text with zeros in place of every JSON object and list, for a search for tags.

    A value is seen at the start of the text and after the tags of thoughts, answers and tool calls.
    """
    parts: list[str] = []
    at, tries = 0, 0
    for found in _JSON.finditer(text):
        if found.end() < at:
            continue  # inside the last value
        try:
            end = _DECODER.raw_decode(text, found.end())[1]
        except (ValueError, RecursionError):
            tries += 1
            if tries == _MAX_TRIES:  # each may read the whole rest of the text
                break
            continue
        parts += [text[at : found.end()], _HIDDEN * (end - found.end())]
        at = end
    return "".join([*parts, text[at:]])
