"""Dialogues written as one text, as in Anthropic's HH: turns of "Human:" and "Assistant:"."""

from __future__ import annotations

import re

from ..types import Message

_MARKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_REPLY = "\n\nAssistant:"
_ASKED = "\n\nHuman:"


def is_dialogue(prompt: str) -> bool:
    """True if a prompt is a dialogue that ends where the assistant replies."""
    return bool(_MARKER.match(prompt)) and prompt.rstrip().endswith(_REPLY)


def split_dialogue(text: str) -> tuple[str, str] | None:
    """The dialogue up to its last "Assistant:", and the reply. None if the text is no dialogue."""
    before, marker, reply = text.rpartition(_REPLY)
    return (before + marker, reply) if marker and is_dialogue(before + marker) else None


def own_reply(text: str, stripped: bool) -> str:
    """A reply after "Assistant:", without the empty turn of Human at which a dialogue was cut.

    Args:
        stripped: remove white space around it. Otherwise the space after "Assistant:" stays, with
            which a policy continues the text of the dialogue.
    """
    if text.rstrip().endswith(_ASKED):
        text = text.rstrip().removesuffix(_ASKED)
    return text.strip() if stripped else text


def asks_again(reply: str) -> bool:
    """True if a reply goes on with a turn of Human."""
    return _ASKED in reply


def turns(prompt: str) -> list[Message]:
    """The turns of a dialogue, without the "Assistant:" at its end. A turn may be empty."""
    parts = _MARKER.split(prompt.rstrip().removesuffix(_REPLY))[1:]
    return [
        Message(role=_ROLES[name], content=said.strip())
        for name, said in zip(parts[::2], parts[1::2], strict=True)
    ]
