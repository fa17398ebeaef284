"""Lower bound on the number of tokens of a text, computed from its characters.

Tokenizing a prompt of 60 MB takes minutes, only to find that it is too long. The bound costs almost
nothing: no token has more characters than the longest entry of the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_UNCOUNTED = bytes(b for b in range(256) if not 0x21 <= b <= 0x7E)
"""UTF-8 bytes that are not counted: all but visible ASCII.

The normalizers below never drop visible ASCII characters and never merge two of them.
"""

_LETTERS_PER_CHARACTER = 3
"""Maximum number of non-ASCII letters that normalization merges into one: three Hangul jamo form a
syllable.
"""

_KNOWN = {
    *("Sequence", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Lowercase", "Strip"),
    *("StripAccents", "BertNormalizer", "Prepend", "ByteLevel", "Metaspace", "Whitespace"),
    *("WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation", "Split", "UnicodeScripts"),
}
"""Normalizers and pre-tokenizers that drop only blanks, accents and control characters."""


class ShortestEncoding:
    """Lower bound on the number of tokens of a text.

    Args:
        tokenizer: tokenizer of the policy. The bound is 0 if one of its steps may drop or shorten
            text in an unknown way.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._longest = longest_token(tokenizer) if keeps_characters(tokenizer) else 0

    def tokens(self, text: str) -> int:
        """Lower bound on the number of tokens of a text."""
        if not self._longest:
            return 0
        kept = len(text.encode("utf-8", "surrogatepass").translate(None, _UNCOUNTED))
        if not text.isascii():
            kept += sum(c.isalpha() for c in text if c > "\x7f") // _LETTERS_PER_CHARACTER
        return -(-kept // self._longest)


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest entry of the vocabulary."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def keeps_characters(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the tokenizer's normalizer and pre-tokenizer are known to keep visible characters."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    steps = [step for name in ("normalizer", "pre_tokenizer") for step in _steps(parts[name])]
    model = parts["model"]
    # Without any of these, a BPE model drops characters that its vocabulary does not have.
    whole = (
        model.get("unk_token")
        or model.get("byte_fallback")
        or any(step["type"] == "ByteLevel" for step in steps)
    )
    return (model["type"] != "BPE" or bool(whole)) and all(map(_keeps, steps))


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer and, recursively, its components."""
    if isinstance(part, dict):
        yield part
        for inner in part.get("normalizers") or part.get("pretokenizers") or ():
            yield from _steps(inner)


def _keeps(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":  # safe if it replaces one character with at least one
        return len(step["pattern"].get("String", "..")) == 1 and len(step["content"]) > 0
    return step["type"] in _KNOWN and step.get("behavior") != "Removed"
