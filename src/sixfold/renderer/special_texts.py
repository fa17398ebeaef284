"""Tokenize text in which the names of special tokens stay plain text.

Otherwise "<|im_end|>" in a user's message would end the user's turn, and the text after it could
take another role.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .think import TAGS


class SpecialTexts:
    """Replaces the texts of special tokens by marks while a chat template renders a conversation.

    A mark is one private-use character per special token. The template may therefore trim, drop or
    reorder the text around it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        special = sorted(
            (t.content for t in tokenizer.added_tokens_decoder.values() if t.special),
            key=len,
            reverse=True,
        )
        self._marks = {text: chr(0xF0000 + i) for i, text in enumerate(special)}
        self._texts = {mark: text for text, mark in self._marks.items()}
        self._any_text = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self._any_mark = re.compile(f"([{chr(0xF0000)}-{chr(0xF0000 + len(special))}])")
        self._last: tuple[str, list[int]] = ("", [])

    def spelled_in(self, text: str) -> bool:
        """True if the text contains the text of a special token."""
        return self._any_text.search(text) is not None

    def mark(self, text: str) -> str:
        """The text, with a mark in place of every special token that it spells."""
        return self._any_text.sub(lambda found: self._marks[found[0]], text)

    def mark_prefill(self, text: str) -> str:
        """`mark` for the start of a reply, in which a think tag is the token of that name."""
        marked = self.mark(text)
        for tag in {*TAGS} & self._marks.keys():
            marked = marked.replace(self._marks[tag], tag)
        return marked

    def mark_all(self, value: Any) -> Any:
        """A JSON value with `mark` applied to all of its texts. Tuples become lists."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, (list, tuple)):
            return [self.mark_all(item) for item in value]
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark_all(item) for key, item in value.items()}
        return value

    def encode_plain(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text. It has no special tokens, or with `special` those that it spells."""
        split = not special
        return list(
            self._tokenizer(text, add_special_tokens=False, split_special_tokens=split)["input_ids"]
        )

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each rendered conversation.

        A special token that the template wrote becomes that token. A mark becomes the plain tokens
        of its text. The last text that was encoded alone is known: a reply follows its prompt.
        """
        known, ids = self._last
        if texts and texts[0] == known:
            return [ids.copy(), *self._encode_rendered(texts[1:])]
        encoded = self._encode_rendered(texts)
        if len(texts) == 1:
            self._last = texts[0], encoded[0].copy()
        return encoded

    def _encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        pieces = [[piece for piece in self._any_mark.split(text) if piece] for text in texts]
        plain = iter(
            self._ids([piece for parts in pieces for piece in parts if piece not in self._texts])
        )
        return [
            [
                i
                for piece in parts
                for i in (
                    self.encode_plain(self._texts[piece]) if piece in self._texts else next(plain)
                )
            ]
            for parts in pieces
        ]

    def encode_bare(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts without a chat template.

        They begin with the tokens that the tokenizer adds before a text. Those that it adds after a
        text are left out: a prompt must not end with the end token.
        """
        if not texts:
            return []
        encoded = self._tokenizer(
            list(texts), split_special_tokens=True, return_special_tokens_mask=True
        )
        return [
            self._strip_added(ids, added)
            for ids, added in zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
        ]

    def encode_shown(self, text: str) -> list[int]:
        """Token ids of a text as the model reads it: special tokens in it are special tokens.

        They begin with the tokens that the tokenizer adds before a text, unless the text has them.
        """
        (plain,) = self._ids([text])
        whole, n = list(self._tokenizer(text)["input_ids"]), len(plain)
        starts = (at for at in range(len(whole) - n + 1) if whole[at : at + n] == plain)
        before = whole[: next(starts, 0)]
        return plain if plain[: len(before)] == before else before + plain

    def _strip_added(self, ids: Sequence[int], added: Sequence[int]) -> list[int]:
        """Token ids of a text without those that the tokenizer adds after it.

        Args:
            ids: token ids.
            added: 1 for each token that is not from the text.
        """
        if all(added):  # an empty text: only the token that begins one may stay
            return [token for token in ids if token == self._tokenizer.bos_token_id][:1]
        return list(ids[: len(ids) - list(reversed(added)).index(0)])

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return list(self._tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else []

    def misses(self, ids: list[int]) -> bool:
        """True if the ids contain the unknown token: some characters of the text have no token."""
        unknown = self._tokenizer.unk_token_id
        # If the unknown token is also a boundary token (GPT-2, OLMo), the tokenizer works on bytes
        # and no character is unknown.
        return unknown in ids and unknown not in (
            self._tokenizer.bos_token_id,
            self._tokenizer.eos_token_id,
        )

    def unknown(self, text: str) -> str:
        """Characters of a text that have no token. "" if it can be tokenized."""
        if not self.misses(self.encode_plain(text)):
            return ""
        return "".join(c for c in dict.fromkeys(text) if self.misses(self.encode_plain(c)))
