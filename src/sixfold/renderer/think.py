"""Think blocks that a prompt leaves open or a reply contains.

The templates of DeepSeek-R1-Distill and Qwen3-Thinking end a prompt with "<think>\\n", so a
completion has only the closing tag. Rewards need this information: otherwise an unfinished thought
looks like an answer. A tag inside the JSON value that a reply begins with is text.
"""

from __future__ import annotations

import re

from .json_calls import after_json

TAGS = (
    "<think>",
    "<thinking>",
    "<reasoning>",
    "<thought>",
    "[THINK]",
    "<|START_THINKING|>",
    "<seed:think>",
    "<|channel>thought",
)
_OPENED = re.compile(rf"(?:{'|'.join(map(re.escape, TAGS))})\s*\Z")


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
    closing = closing_tag(tag)
    if closing in text[after_json(text) :]:
        return (
            text.lstrip().removeprefix(tag).lstrip("\n") if text.lstrip().startswith(tag) else text
        )
    return f"\n{closing}\n\n{text}"


def split_thought(reply: str) -> tuple[str, str]:
    """Thought and answer of a reply that begins with a think block, without the tags.

    A reply without a closed block is all answer.
    """
    for tag in TAGS:
        if reply.lstrip().startswith(tag):
            thought, closed, answer = reply.lstrip().removeprefix(tag).partition(closing_tag(tag))
            return (thought, answer) if closed else ("", reply)
    return "", reply


def placeholder_turn(opened: str, reply: str, thought: str, answer: str) -> str:
    """An assistant's turn with the think block of a reply, if it has one, and placeholder texts.

    Args:
        opened: think tag that the prompt leaves open, with white space, or "".
        reply: the reply after that tag.
        thought: stands for the text of the thought.
        answer: stands for the text after the thought.
    """
    tag = opened.strip() or next((tag for tag in TAGS if reply.lstrip().startswith(tag)), "")
    if not tag:
        return answer
    begin = opened or f"{tag}\n"
    closing = closing_tag(tag)
    closed = closing in reply[after_json(reply) :]
    return begin + (f"{thought}\n{closing}\n\n{answer}" if closed else answer)


def without_thoughts(text: str) -> str:
    """A rendered text without think blocks, closing tags, and a block that is open at its end."""
    for pattern in _THOUGHTS:
        text = pattern.sub("", text)
    return _OPENED.sub("", text)


def closing_tag(tag: str) -> str:
    if tag == "<|channel>thought":  # Gemma 4
        return "<channel|>"
    return tag.replace("START", "END") if "START" in tag else f"{tag[0]}/{tag[1:]}"


_THOUGHTS = [
    re.compile(rf"(?:{tag}(?:(?!{tag}).)*?)?{closing}\s*", re.DOTALL)
    for tag, closing in ((re.escape(tag), re.escape(closing_tag(tag))) for tag in TAGS)
]
"""One thought each: the last opening tag before a closing tag. Some templates write only that."""
