"""How few tokens a text can have, from its characters alone.

A prompt of 60 MB takes minutes to tokenize, only to be refused as too long. Its characters say so at
once: a token stands for no more characters than the longest entry of the vocabulary has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_UNCOUNTED = bytes(b for b in range(256) if not 0x21 <= b <= 0x7E)
"""Bytes of UTF-8 other than visible ASCII, which no normalizer below drops and no two of which become one."""

_LETTERS_PER_CHARACTER = 3
"""Letters outside ASCII that normalization can join to one: three Hangul jamo make a syllable."""

_KNOWN = {
    *("Sequence", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Lowercase", "Strip", "StripAccents", "BertNormalizer", "Prepend"),
    *("ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation", "Split", "UnicodeScripts"),
}
"""Normalizers and pre-tokenizers that drop nothing but blanks, accents and control characters."""


class ShortestEncoding:
    """Lower bound of the number of tokens of a text.

    Args:
        tokenizer: of the policy. If it may drop or shorten text in other ways than the usual ones,
            the bound is 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._longest = max(map(len, tokenizer.get_vocab()), default=1) if keeps_characters(tokenizer) else 0

    def tokens(self, text: str) -> int:
        """The text has at least this many tokens."""
        if not self._longest:
            return 0
        kept = len(text.encode("utf-8", "surrogatepass").translate(None, _UNCOUNTED))
        if not text.isascii():
            kept += sum(c.isalpha() for c in text if c > "\x7f") // _LETTERS_PER_CHARACTER
        return -(-kept // self._longest)


def keeps_characters(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether all that comes before the tokenizer's model is known to keep visible characters."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    steps = [step for name in ("normalizer", "pre_tokenizer") for step in _steps(parts[name])]
    model = parts["model"]
    # A BPE model without any of these leaves characters out that its vocabulary lacks.
    whole = model.get("unk_token") or model.get("byte_fallback") or any(step["type"] == "ByteLevel" for step in steps)
    return (model["type"] != "BPE" or bool(whole)) and all(map(_keeps, steps))


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer and those that it is made of."""
    if isinstance(part, dict):
        yield part
        for inner in part.get("normalizers") or part.get("pretokenizers") or ():
            yield from _steps(inner)


def _keeps(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":  # of one character by at least one
        return len(step["pattern"].get("String", "..")) == 1 and len(step["content"]) > 0
    return step["type"] in _KNOWN and step.get("behavior") != "Removed"
