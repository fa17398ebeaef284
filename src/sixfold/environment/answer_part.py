"""The part of a completion that is its answer: the text after the last thought.

Think blocks are tags (<think>, [THINK], ...) or, for gpt-oss, channels: analysis and commentary are
thoughts, and the final channel is the answer. A completion whose last thought is not finished has
no answer. If the prompt opened the block, rewards read the completion with the opening tag before
it.
"""

from __future__ import annotations

import re

_OPENING = re.compile(
    r"<(?:think|thinking|thought|reasoning|seed:think)>|\[THINK\]|<\|START_THINKING\|>|<\|channel\|>(?:analysis|commentary)(?:<\|message\|>)?"
)
_CLOSING = re.compile(
    r"</(?:think|thinking|thought|reasoning|seed:think)>|\[/THINK\]|<\|END_THINKING\|>|<\|channel\|>final(?:<\|message\|>)?"
)


def answer_part(completion: str) -> str:
    """The text after the last finished thought; empty if a thought is still open."""
    end = max((found.end() for found in _CLOSING.finditer(completion)), default=0)
    answer = completion[end:]
    return "" if _OPENING.search(answer) else answer
