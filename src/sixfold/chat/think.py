"""Think blocks that a prompt leaves open: the completion begins inside of one.

The templates of DeepSeek-R1-Distill and Qwen3-Thinking end a prompt with "<think>\\n", so a completion has the
closing tag only. Rewards must be told, or an unfinished thought looks like an answer.
"""

from __future__ import annotations

import re

_OPENED = re.compile(r"(?:<think>|<thinking>|<reasoning>|<thought>|\[THINK\]|<\|START_THINKING\|>|<seed:think>)\s*\Z")


def opened_block(prompt: str) -> str:
    """The tag at the end of a rendered prompt that opens a think block, with the white space after it; else empty."""
    found = _OPENED.search(prompt)
    return found[0] if found else ""


def continued_block(opened: str, text: str) -> str:
    """`text` as the completion of a prompt that ended with `opened`: the block is closed, and not opened again."""
    tag = opened.strip()
    if not tag:
        return text
    closing = tag.replace("START", "END") if "START" in tag else f"{tag[0]}/{tag[1:]}"
    if closing in text:
        return text.lstrip().removeprefix(tag).lstrip("\n") if text.lstrip().startswith(tag) else text
    return f"\n{closing}\n\n{text}"
