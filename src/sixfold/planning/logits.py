"""Memory of the logits, whole and in chunks."""

from __future__ import annotations

from . import checks


def logits_bytes(*, tokens: int, vocabulary: int, width: int) -> int:
    """Bytes of the logits of a micro-batch.

    Args:
        tokens: tokens of the micro-batch: sequences times length.
        vocabulary: number of tokens in the vocabulary.
        width: bytes per number: 2 for bfloat16.

    Raises:
        UserError: if a size is not a whole number of at least 1.
    """
    checks.whole(tokens=tokens, vocabulary=vocabulary, width=width)
    return tokens * vocabulary * width


def whole_logits_peak(*, tokens: int, vocabulary: int, width: int) -> int:
    """Peak bytes of a log-softmax over whole logits, with its gradient.

    At the peak there are the logits, their float32 copy (the log-probabilities), and the gradient
    of the logits.

    Args:
        tokens: tokens of the micro-batch.
        vocabulary: number of tokens in the vocabulary.
        width: bytes per number of the logits.

    Raises:
        UserError: if a size is not a whole number of at least 1.
    """
    return 2 * logits_bytes(tokens=tokens, vocabulary=vocabulary, width=width) + logits_bytes(
        tokens=tokens, vocabulary=vocabulary, width=4
    )


def chunked_logits_bytes(
    *, tokens: int, vocabulary: int, token_chunk: int, vocabulary_chunk: int, width: int
) -> int:
    """Bytes of the logits that exist at once if they are computed in chunks.

    Args:
        tokens: tokens of the micro-batch.
        vocabulary: number of tokens in the vocabulary.
        token_chunk: tokens per chunk. At least `tokens`: not split.
        vocabulary_chunk: vocabulary entries per chunk. At least `vocabulary`: not split.
        width: bytes per number.

    Raises:
        UserError: if a size is not a whole number of at least 1.
    """
    checks.whole(token_chunk=token_chunk, vocabulary_chunk=vocabulary_chunk)
    return logits_bytes(
        tokens=min(tokens, token_chunk), vocabulary=min(vocabulary, vocabulary_chunk), width=width
    )
