"""One line of the explained plan, and how quantities are written in it."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN = "unknown until the model is loaded"


@dataclass(frozen=True)
class Fact:
    """One line of the plan.

    Attributes:
        why: settings or rule behind it. Empty if the statement needs no reason.
    """

    topic: str
    says: str
    why: str = ""


def tokens_text(count: int | None) -> str:
    return (
        f"as many tokens as the context leaves ({UNKNOWN})"
        if count is None
        else f"{count:,} tokens"
    )


def count_text(n: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if n >= size:
            return f"{n:,} ({n / size:.3g} {unit})"
    return f"{n:,}"


def bytes_text(n: int) -> str:
    power = min(4, max(0, n.bit_length() - 1) // 10)
    return f"{n / 1024**power:.3g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
