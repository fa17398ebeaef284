"""Rows that may not be used, by their licence."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Generator
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, ClassVar, Literal, get_args

from pydantic import field_validator

from sixfold.errors import nearest

from .rejection import rejection_health
from .stage import Context, Decision, Health, Record, Rows, Stage

Trait = Literal["share_alike", "no_derivatives", "non_commercial"]
"""What a licence asks of those who train on the data."""

FIELD = "licence"
_NOISE = re.compile(
    r"https?://|www\.|opensource\.org|spdx\.org|licen[sc]es?:?|\bthe\b|\bversion\b|v\.?(?=\s*\d)"
    r"|-(?:only|or-later)\b|\+$|\.(?:html|txt|json|php)$|\binternational\b|\bunported\b"
    r"|\bsoftware\b(?=.*apache)"
)
_CREATIVE = re.compile(r"\bcc\b|\bcc(?=0|by|nc)|creative\s*commons")
_ZERO = re.compile(r"\bcc[\s_-]*0|\bzero\b|publicdomain/zero")
_OR = re.compile(r"\s+or\s+|\s*\|\|?\s*", re.IGNORECASE)
_AND = re.compile(r"\s+and\s+|\s*[,;&]\s*|\s+\+\s+|\s+with\s+", re.IGNORECASE)


class Licence(Stage):
    """Drop rows whose licence does not allow the use.

    A row's licence is its column `licence`, in any common spelling: "Apache 2.0" is Apache-2.0. A
    row under several licences must satisfy all of them, or one of them if they are joined by "or".

    Args:
        allow: the only licences that are allowed, by SPDX identifier. Empty: all but those that
            are refused.
        refuse: licences that are refused, by SPDX identifier.
        refuse_traits: kinds of licence that are refused if `allow` does not name them. The default
            allows commercial use and changed copies.
        missing: what to do with rows that state no licence, or one that is not known.
    """

    kind: ClassVar[str] = "licence"

    allow: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()
    refuse_traits: tuple[Trait, ...] = ("non_commercial", "no_derivatives")
    missing: Literal["drop", "keep"] = "drop"

    @field_validator("allow", "refuse")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not identifier(name):
                raise ValueError(
                    f"{name!r} is not a licence known here; name an SPDX identifier such as"
                    f" Apache-2.0 or CC-BY-4.0.{nearest(name, list(_table()[0]))}"
                )
        return tuple(identifier(name) for name in names)

    def decide(self, rows: Rows, context: Context) -> Generator[Decision, None, Health]:
        rejected, reasons, stated, kept = 0, Counter[str](), Counter[str](), set[str]()
        for record in rows:
            text = _stated(record)
            reason, note, names = self._verdict(text)
            drop = bool(reason) and not (
                reason in ("licence_missing", "licence_unknown") and self.missing == "keep"
            )
            stated[", ".join(names) or text or "(none)"] += 1
            reasons[reason] += 1
            rejected += drop
            if not drop:
                kept.update(names)
            yield Decision(record, not drop, reason, note)
        del reasons[""]
        figures = {**reasons, "licences": dict(stated.most_common(20))}
        what = f"the column {FIELD!r} holds licences, and that the settings refuse what they should"
        return rejection_health(rejected, len(rows), what, figures, _mixed_alarm(kept))

    def _verdict(self, text: str) -> tuple[str, str, tuple[str, ...]]:
        """Reason and note if a licence is not allowed, and the SPDX identifiers."""
        if not text:
            return "licence_missing", f"no licence in {FIELD!r}", ()
        choices = [_parts(choice) for choice in _choices(text)]
        verdicts = [self._verdict_of_all(text, parts) for parts in choices]
        return next((verdict for verdict in verdicts if not verdict[0]), verdicts[0])

    def _verdict_of_all(self, text: str, parts: list[str]) -> tuple[str, str, tuple[str, ...]]:
        names = tuple(identifier(part) for part in parts)
        refused = [name for name in names if name and not self._allows(name)]
        if refused and len(refused) < len(names):
            rest = ", ".join(name or part for name, part in zip(names, parts, strict=True))
            return "licence_clash", f"{rest}: {_why(refused[0])}", names
        if refused:
            return "licence_refused", _why(refused[0]), names
        if not all(names) and (asked := set(_asked(text)) & set(self.refuse_traits)):
            why = ", ".join(sorted(asked)).replace("_", "-")
            return "licence_refused", f"{text[:60]!r} is {why}", ()
        if not all(names):
            return "licence_unknown", f"{text[:60]!r} is not a licence known here", ()
        return "", "", names

    def _allows(self, name: str) -> bool:
        if name in self.refuse:
            return False
        if self.allow:
            return name in self.allow
        return not set(traits(name)) & set(self.refuse_traits)


_WORDS: dict[Trait, str] = {
    "non_commercial": r"non[\s_-]*commercial|(?:research|academic|educational)\s*(?:use\s*)?only",
    "no_derivatives": r"no[\s_-]*deriv",
}


def _asked(text: str) -> list[Trait]:
    """What a licence that is not known says that it asks."""
    return [trait for trait, words in _WORDS.items() if re.search(words, text, re.IGNORECASE)]


def _why(name: str) -> str:
    asks = ", ".join(trait.replace("_", "-") for trait in traits(name))
    return f"{name} is not allowed" + (f" ({asks})" if asks else "")


def _stated(record: Record) -> str:
    value: Any = record.fields.get(FIELD)
    if isinstance(value, list | tuple):
        return ", ".join(str(part) for part in value if part)
    text = "" if value is None else str(value).strip()
    return "" if text.lower() in ("none", "null", "n/a", "na", "nan", "unknown", "-") else text


def _choices(text: str) -> list[str]:
    return [text] if identifier(text) else [part for part in _OR.split(text) if part] or [text]


def _parts(text: str) -> list[str]:
    return [text] if identifier(text) else [part for part in _AND.split(text) if part] or [text]


@lru_cache(maxsize=1 << 12)
def identifier(text: str) -> str:
    """SPDX identifier of a licence in a common spelling, or "" if it is not known."""
    small = text.strip().strip("()").lower().replace("_", "-")
    if _AND.search(small) and len(_CREATIVE.findall(small)) > 1:
        return ""
    if _CREATIVE.search(small):
        return _creative(small)
    key = re.sub(r"[^a-z0-9.]", "", _NOISE.sub(" ", small)).strip(".")
    return _table()[1].get(key, "")


def _creative(small: str) -> str:
    if _ZERO.search(small):
        return "CC0-1.0"
    if _OR.search(small) or re.search(r"\b(?:mit|apache|gpl|bsd)\b", small):
        return ""
    version = re.search(r"[1-4]\.\d", small)
    letters = re.sub(r"creative\s*commons|[^a-z]", "", small)
    has = {
        "NC": "noncommercial" in letters or re.search(r"by[\s_-]*nc|cc[\s_-]*nc|-nc\b", small),
        "SA": "sharealike" in letters or re.search(r"\bsa\b|ncsa|bysa|_sa\b", small),
        "ND": "noderiv" in letters or re.search(r"\bnd\b|ncnd|bynd|_nd\b", small),
    }
    marks = [mark for mark, found in has.items() if found]
    if not marks and "by" not in letters and "attribution" not in letters:
        return ""
    return "-".join(["CC", "BY", *marks, version.group() if version else "4.0"])


def hub_id(text: str) -> str:
    """The hub's id of a licence. "" if it has none, or if the text leaves the version open."""
    name, read = identifier(text), _read()
    only = read["hub_names"].get(name)  # licences of which there is one version
    if only or not set(re.findall(r"\d+", name)) <= set(re.findall(r"\d+", text)):
        return str(only or "")
    return name.lower() if name.lower() in read["hub"].split() else ""


def traits(name: str) -> tuple[Trait, ...]:
    """What a licence asks, by its SPDX identifier."""
    if name.startswith("CC-"):
        marks: dict[str, Trait] = {
            "NC": "non_commercial",
            "ND": "no_derivatives",
            "SA": "share_alike",
        }
        return tuple(trait for mark, trait in marks.items() if f"-{mark}-" in name)
    return _table()[0].get(name, ())


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("licences.toml").read_text())


@cache
def _table() -> tuple[dict[str, tuple[Trait, ...]], dict[str, str]]:
    """Traits by identifier, and identifier by spelling."""
    asks: dict[str, tuple[Trait, ...]] = {"CC0-1.0": ()}
    spelled = {}
    for kind, licences in _read().items():
        if kind not in get_args(Trait) and kind != "permissive":
            continue
        asked = tuple(trait for trait in get_args(Trait) if trait == kind)
        for name, spellings in licences.items():
            asks[name] = asked
            for spelling in (re.sub(r"[^a-z0-9.]", "", name.lower()), *spellings):
                spelled[spelling] = name
    return asks, spelled


def _mixed_alarm(kept: set[str]) -> str:
    """Share-alike licences of different families cannot be satisfied by one work."""
    families = {
        name.rpartition("-")[0]: name for name in sorted(kept) if "share_alike" in traits(name)
    }
    if len(families) < 2:
        return ""
    return (
        "kept rows are share-alike under licences that clash:"
        f" {', '.join(sorted(families.values()))}. Publish them apart, or refuse all but one"
    )
