"""Detect forged chat turns and invisible characters in a text."""

from __future__ import annotations

import re
import unicodedata

_TURN = re.compile(
    r"<\|(?:im_start|im_end|eot_id|eom_id|start_header_id|end_header_id|begin_of_text|end_of_text"
    r"|endoftext|user|assistant|system|observation|end_of_role|start_of_role)\|>"
    r"|<\|start\|>(?:user|system|developer)"
    r"|</?start_of_turn>|</?end_of_turn>|<(?:bos|eos)>|</s>|\[/?INST\]|<</?SYS>>"
    r"|<｜(?:User|Assistant|begin▁of▁sentence|end▁of▁sentence)｜>",
    re.IGNORECASE,
)
_BLANK_LETTERS = frozenset("\u115f\u1160\u3164\uffa0\u2800\u17b4\u17b5")
"""Letters and symbols of Unicode that have no visible shape."""


def forged_turn(text: str) -> str:
    """A mark of a chat template that the text spells, such as <|im_end|>. Empty if there is none.

    The renderer removes the tokens that end a reply, so a mark that is left was written as text or
    continues after the end. The channels of gpt-oss (<|start|>assistant<|channel|>) are not marks.
    """
    found = _TURN.search(text)
    return found[0] if found else ""


def neutral_turns(text: str) -> str:
    """The text with a space in every mark of a chat template, so that none is a control token."""
    return _TURN.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)


def invisible(character: str) -> bool:
    """True for a character without a shape, such as a zero-width space. A space is not one."""
    return (
        unicodedata.category(character) in ("Cf", "Cc", "Co", "Cn", "Cs")
        and not character.isspace()
    ) or character in _BLANK_LETTERS


def visible(text: str) -> str:
    """The text without invisible characters."""
    return text if text.isascii() and text.isprintable() else _visible(text)


def hidden_message(text: str) -> bool:
    """True if the text carries Unicode tag characters, which spell ASCII that nobody sees.

    The flags of England, Scotland and Wales are written with them, after a black flag.
    """
    return bool(re.search("(?<![\U0001f3f4\U000e0000-\U000e007f])[\U000e0000-\U000e007f]", text))


def _visible(text: str) -> str:
    return "".join(character for character in text if not invisible(character))
