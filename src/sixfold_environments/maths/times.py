"""Times of day: `3:30 PM`, `15:30`, `3 p.m.`, `noon`."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

_CLOCK = re.compile(
    r"(?P<hour>\d{1,2})(?:(?P<point>[:.])(?P<minute>\d{2})(?::(?P<second>\d{2}))?)?\s*"
    r"(?P<half>a\.?\s?m\.?|p\.?\s?m\.?|noon|midnight|in the morning|in the afternoon|in the"
    r" evening|at night|o'clock|hours|hrs|h)?",
    re.IGNORECASE,
)
_HINT = re.compile(
    r"\d\D{0,12}:|[ap]\.?\s?m|noon|midday|midnight|o'clock|in the|at night", re.IGNORECASE
)
_WORDS = {"noon": 12 * 3600, "midday": 12 * 3600, "midnight": 0}
_HALVES = {
    "am": 0,
    "inthemorning": 0,
    "pm": 12,
    "intheafternoon": 12,
    "intheevening": 12,
    "noon": 12,
    "midnight": 0,
}


class Time(NamedTuple):
    """A time of day.

    Attributes:
        seconds: seconds since midnight.
        form: "half" if the half of the day is known, "24h" for a 24-hour time, "plain" if 3:30 may
            be in either half.
    """

    seconds: int
    form: Literal["half", "24h", "plain"]


def time_of_day(text: str) -> Time | None:
    """The time that a normalised answer states, or None."""
    if not _HINT.search(text):
        return None
    text = " ".join(re.sub(r"\\text\s*|\\[!,]|[{}~]", " ", text).replace("\\", " ").split()).rstrip(
        "."
    )
    text = re.sub(r"\s*:\s*", ":", text)
    if text.casefold() in _WORDS:
        return Time(_WORDS[text.casefold()], "half")
    match = _CLOCK.fullmatch(text)
    if match is None or not (match["minute"] or match["half"]):
        return None
    half = re.sub(r"[\s.]", "", match["half"] or "").casefold()
    hour, minute, second = int(match["hour"]), int(match["minute"] or 0), int(match["second"] or 0)
    if minute > 59 or second > 59 or (match["point"] == "." and half not in _HALVES):
        return None
    if half in ("noon", "midnight") and (hour, minute) != (12, 0):
        return None
    if half in ("hours", "hrs", "h") and not match["minute"]:
        return None  # a duration
    if half in _HALVES:
        return (
            Time(((hour % 12 + _HALVES[half]) * 60 + minute) * 60 + second, "half")
            if 1 <= hour <= 12
            else None
        )
    if hour > 23:
        return None
    return Time(
        (hour * 60 + minute) * 60 + second,
        "24h" if hour > 12 or match["hour"] in ("0", "00") else "plain",
    )


def same_time(answer: str, gold: str) -> bool | None:
    """True if both are the same time of day. None if the texts need not be times.

    Two ratios such as 2:30 and 1:15 also give None. A side without its half of the day matches
    either half, like a number without a unit.
    """
    left, right = time_of_day(answer), time_of_day(gold)
    if left is None or right is None:
        other = gold if right is None else answer
        is_number = re.fullmatch(r"\d+", other) is not None
        return (
            False
            if not is_number and "half" in [time.form for time in (left, right) if time]
            else None
        )
    forms = {left.form, right.form}
    if forms == {"plain", "half"}:
        return left.seconds % 43200 == right.seconds % 43200
    equal = left.seconds == right.seconds and forms != {"plain", "24h"}
    return equal or (None if forms == {"plain"} else False)
