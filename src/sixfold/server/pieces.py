"""Texts and bytes of tokens in answers. Used only by the event loop's thread."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..rollout.renderer.token_bytes import TokenBytes


class Pieces:
    """Texts and bytes of tokens.

    Args:
        tokenizer: must not be used by another thread.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """One token as text. A part of a character becomes a replacement character."""
        if token not in self._texts:
            self._texts[token] = str(self._tokenizer.decode([token]))
        return self._texts[token]

    def bytes(self, token: int) -> list[int]:
        """The token's bytes, as numbers from 0 to 255."""
        text = self.text(token)
        return list(self._bytes(token) if "\ufffd" in text else text.encode())

    def join(self, tokens: Sequence[int]) -> str:
        """Tokens as one text, including special tokens."""
        return str(self._tokenizer.decode(list(tokens)))
