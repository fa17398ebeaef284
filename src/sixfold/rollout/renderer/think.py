"""Think blocks that a prompt leaves open. The completion then begins inside a think block.

The templates of DeepSeek-R1-Distill and Qwen3-Thinking end a prompt with "<think>\\n", so a
completion only has the closing tag. Rewards must know this: otherwise an unfinished thought looks
like an answer.
"""

from __future__ import annotations

import re

_OPENED = re.compile(
    r"(?:<think>|<thinking>|<reasoning>|<thought>|\[THINK\]|<\|START_THINKING\|>|<seed:think>)\s*\Z"
)


def opened_block(prompt: str) -> str:
    """The opening think tag at the end of a rendered prompt, with the white space after it.

    Returns:
        An empty string if the prompt does not end with such a tag.
    """
    found = _OPENED.search(prompt)
    return found[0] if found else ""


def continued_block(opened: str, text: str) -> str:
    """Make `text` a completion of a prompt that ends with `opened`.

    The think block is closed, and a second opening tag is removed.
    """
    tag = opened.strip()
    if not tag:
        return text
    closing = tag.replace("START", "END") if "START" in tag else f"{tag[0]}/{tag[1:]}"
    if closing in text:
        return (
            text.lstrip().removeprefix(tag).lstrip("\n") if text.lstrip().startswith(tag) else text
        )
    return f"\n{closing}\n\n{text}"
