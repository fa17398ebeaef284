"""LiveCodeBench's private tests: base64 of zlib of a pickle of one text.

The pickle is not loaded. Its instructions are read as data, and only those that build one text are
accepted. So no code can run.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib

LARGEST = 256 << 20
"""Maximum number of bytes of the decompressed text."""

_TEXTS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
_HARMLESS = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}


class PackedTextError(ValueError):
    """The data is not one packed text."""


def unpacked(packed: str) -> str:
    """The text in LiveCodeBench's packed form.

    Args:
        packed: base64 of zlib of a pickle of one text.

    Raises:
        PackedTextError: if it is anything else, or larger than `LARGEST`.
    """
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(base64.b64decode(packed, validate=True), LARGEST)
        if reader.unconsumed_tail:
            raise PackedTextError(f"packed tests of more than {LARGEST:,} bytes")
        steps = list(pickletools.genops(data))
    except (binascii.Error, zlib.error, ValueError) as error:
        raise PackedTextError(f"packed tests cannot be read: {error}") from error
    texts = [argument for step, argument, _ in steps if step.name in _TEXTS]
    others = {step.name for step, _, _ in steps} - _TEXTS - _HARMLESS
    if others or len(texts) != 1 or not isinstance(texts[0], str):
        raise PackedTextError("packed tests are not one text (unpickling is disabled)")
    return texts[0]
