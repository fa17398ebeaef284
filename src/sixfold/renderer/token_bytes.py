"""The bytes of a token. A token may be a part of a character, which text cannot represent."""

from __future__ import annotations

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Map from token id to bytes, according to the tokenizer's decoder.

    Supported decoders are byte-level (GPT-2, Llama 3, Qwen) and byte fallback (Llama 2, Gemma). For
    other decoders, which have no partial characters, the bytes are those of the token's text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        self._decoders = _decoders(tokenizer)

    def __call__(self, token: int) -> bytes:
        """Bytes of the token inside a text. Empty for an id without a token."""
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return b""
        if "ByteLevel" in self._decoders:
            return bytes(_BYTE_OF[c] for c in name if c in _BYTE_OF)
        if "ByteFallback" in self._decoders and (found := _BYTE.fullmatch(name)):
            return bytes([int(found[1], 16)])
        if self._decoders & {"ByteFallback", "Metaspace"}:
            return name.replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token])).encode()


def _decoders(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Types of the steps of the tokenizer's decoder. Empty for a tokenizer without a decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # `backend.to_str()` would write the whole vocabulary: half a second for 150,000 tokens.
    decoder = backend.decoder if backend is not None else None
    return set(_types(json.loads(decoder.__getstate__()))) if decoder is not None else set()


def _types(decoder: Any) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    return [
        str(decoder.get("type")),
        *(name for step in decoder.get("decoders", ()) for name in _types(step)),
    ]


def _byte_of() -> dict[str, int]:
    """GPT-2's alphabet: character -> byte.

    Printable bytes are represented by themselves, all others by characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(0x100) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_of()
