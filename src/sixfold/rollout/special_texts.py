"""Text that spells a special token. In a prompt it must stay text: as a token, "<|im_end|>" would end the user's turn and speak in another role.

Training's prompts and a server's are tokenized here, both by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class SpecialTexts:
    """The texts that a tokenizer reads as special tokens, and marks that stand in for them while a chat template renders what holds them.

    Marks are private-use characters, one a special token, so that a template may trim, drop or reorder the text around them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
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

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of what a chat template made of each marked text.

        They are special where the template wrote a special token, and plain where a mark stands.
        """
        pieces = [[piece for piece in self._any_mark.split(text) if piece] for text in texts]
        plain = iter(self._ids([piece for parts in pieces for piece in parts if piece not in self._texts]))
        return [[i for piece in parts for i in (self._spelled(piece) if piece in self._texts else next(plain))] for parts in pieces]

    def encode_bare(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts without a template, with the tokens that the tokenizer itself puts around one."""
        return [list(ids) for ids in self._tokenizer(list(texts), split_special_tokens=True)["input_ids"]] if texts else []

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return list(self._tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else []

    def _spelled(self, mark: str) -> list[int]:
        """Token ids of the text that a mark stands for."""
        return list(self._tokenizer(self._texts[mark], add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def misses(self, ids: list[int]) -> bool:
        """True when the text held characters that the tokenizer does not have."""
        unknown = self._tokenizer.unk_token_id
        # Where the unknown token is a boundary token too (GPT-2, OLMo), the alphabet is bytes and nothing is unknown.
        return unknown in ids and unknown not in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
