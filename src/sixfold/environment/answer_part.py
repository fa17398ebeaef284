"""The part of a completion that is its answer: the text after the last thought.

Think blocks are tags (<think>, [THINK], ...) or, for gpt-oss, channels: analysis and commentary are
thoughts, and the final channel is the answer. A completion whose last thought is not finished has
no answer. If the prompt opened the block, rewards read the completion with the opening tag before
it.
"""

from __future__ import annotations

import re

_NAME = "(?:think|thinking|thoughts?|reasoning|scratchpad|reflection|seed:think)"
# Tags are recognised in any case, with spaces or attributes: a thought does not become an answer by
# its spelling.
_OPENING = re.compile(
    rf"<\s*{_NAME}\b[^<>]*>|\[THINK\]|◁think▷|<\|START_THINKING\|>|<\|begin_of_thought\|>"
    r"|<\|channel\|>(?:analysis|commentary)(?:<\|message\|>)?",
    re.IGNORECASE,
)
_CLOSING = re.compile(
    rf"<\s*/\s*{_NAME}\s*>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>|<\|end_of_thought\|>"
    r"|<\|channel\|>final(?:<\|message\|>)?",
    re.IGNORECASE,
)


def answer_part(completion: str) -> str:
    """The text after the last finished thought; empty if a thought is still open."""
    end = max((found.end() for found in _CLOSING.finditer(completion)), default=0)
    answer = completion[end:]
    return "" if _OPENING.search(answer) else answer
