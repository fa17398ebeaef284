"""Text that spells a special token. In a prompt it must stay text: as a token, "<|im_end|>" would end the user's turn and speak in another role."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase


class SpecialTexts:
    """The texts that a tokenizer reads as special tokens, and marks that stand in for them while a chat template renders what holds them.

    Marks are private-use characters, one a special token, so that a template may trim, drop or reorder the text around them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.special), key=len, reverse=True)
        self._marks = {text: chr(0xF0000 + i) for i, text in enumerate(special)}
        self._texts = {mark: text for text, mark in self._marks.items()}
        self._any_text = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self._any_mark = re.compile(f"([{chr(0xF0000)}-{chr(0xF0000 + len(special))}])")

    def spelled_in(self, text: str) -> bool:
        """True when the text spells a special token."""
        return self._any_text.search(text) is not None

    def mark(self, text: str) -> str:
        """The text with a mark for every special token it spells."""
        return self._any_text.sub(lambda found: self._marks[found[0]], text)

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Marked text in pieces: (text, False) as it is, (special text, True) where a mark stood."""
        return [(self._texts.get(piece, piece), piece in self._texts) for piece in self._any_mark.split(text) if piece]
