"""Personal data and secrets in rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from . import personal_patterns
from .personal_patterns import Finder, Span
from .rejection import rejection_health
from .rows_on_disk import answer_text, prompt_text
from .stage import Context, Decision, Health, Record, Rows, Stage

Kind = Literal["email", "phone", "iban", "card", "national_id", "ip_address", "secret"]

_KINDS: tuple[Kind, ...] = (
    "secret", "email", "iban", "card", "national_id", "phone", "ip_address"
)  # fmt: skip
_NOT_TEXT = ("id", "source", "licence")
_RUN = ("tests", "patch", "test_patch")
"""Columns that are run. With a mark they would check something else."""


class PersonalData(Stage):
    """Find personal data and secrets in the prompt, the answer and all other columns of text.

    Args:
        kinds: what is looked for.
        action: drop such rows, or put a mark such as [EMAIL] in its place. A row of which a mark
            cannot take the place is dropped.
        regions: countries (ISO 3166) whose phone numbers are found without a country code.
    """

    kind: ClassVar[str] = "personal_data"

    kinds: tuple[Kind, ...] = Field(default=_KINDS, min_length=1)
    action: Literal["drop", "mask"] = "drop"
    regions: tuple[str, ...] = ("US", "GB")

    @field_validator("regions")
    @classmethod
    def _known(cls, regions: tuple[str, ...]) -> tuple[str, ...]:
        from phonenumbers import SUPPORTED_REGIONS

        for region in regions:
            if region not in SUPPORTED_REGIONS:
                raise ValueError(
                    f"{region!r} is no country that has phone numbers; write two capital letters"
                    " (ISO 3166), such as US or DE"
                )
        return regions

    def decide(self, rows: Rows, context: Context) -> Generator[Decision, None, Health]:
        counts: Counter[str] = Counter()
        rejected = 0
        for record in rows:
            found = {
                column: kinds
                for column, value in _columns(record)
                if (kinds := {kind for text in _texts(value) for kind, _ in self.find(text)})
            }
            if not found:
                yield Decision(record)
                continue
            rejected += 1
            counts.update({kind for kinds in found.values() for kind in kinds})
            note = "; ".join(f"{', '.join(sorted(k))} in {column}" for column, k in found.items())
            masked = self._masked(record) if self.action == "mask" else None
            if masked and (run := [column for column in _RUN if column in found]):
                note, masked = f"{note}; a mark in {run[0]} would break what is run", None
            elif masked and self._is_left(masked):
                note, masked = f"{note}; only the whole row shows what it is", None
            yield Decision(masked or record, bool(masked), "personal_data", note)
        what = "its settings name the kinds that the rows may have"
        return rejection_health(rejected, len(rows), what, {"rows_with": dict(counts)})

    def find(self, text: str) -> list[tuple[Kind, Span]]:
        """Kinds and places of what is found in a text, in order and without overlaps."""
        spans: list[tuple[Kind, Span]] = []
        for kind, finder in self._finders.items():
            for start, end in finder(text):
                if all(end <= taken[0] or taken[1] <= start for _, taken in spans):
                    spans.append((kind, (start, end)))
        return sorted(spans, key=lambda found: found[1])

    @cached_property
    def _finders(self) -> Mapping[Kind, Finder]:
        finders: dict[Kind, Finder] = {
            "email": personal_patterns.emails,
            "iban": personal_patterns.ibans,
            "card": personal_patterns.cards,
            "national_id": personal_patterns.national_ids,
            "ip_address": personal_patterns.addresses,
            "secret": personal_patterns.secrets,
        }
        if "phone" in self.kinds:
            finders["phone"] = personal_patterns.phones(self.regions)
        return {kind: finders[kind] for kind in _KINDS if kind in self.kinds}

    def _masked(self, record: Record) -> Record:
        fields = {
            column: value if column in _NOT_TEXT else self._masked_value(value)
            for column, value in record.fields.items()
        }
        return replace(
            record, prompt=prompt_text(fields), answer=answer_text(fields), fields=fields
        )

    def _is_left(self, record: Record) -> bool:
        """Whether texts together still show what no column shows alone, such as a number after the
        message that asks for a phone number.
        """
        return any(self.find(text) for text in (record.prompt, record.answer))

    def _masked_value(self, value: Any) -> Any:
        if isinstance(value, str):
            for kind, (start, end) in reversed(self.find(value)):
                value = f"{value[:start]}[{kind.upper()}]{value[end:]}"
            return value
        if isinstance(value, Mapping):
            return {key: self._masked_value(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._masked_value(part) for part in value]
        return value


def _columns(record: Record) -> Iterator[tuple[str, Any]]:
    """What is looked at. The row's text counts even if its columns hold it in another form."""
    yield "prompt", record.prompt
    yield "answer", record.answer
    for column, value in record.fields.items():
        if column not in ("prompt", "answer", *_NOT_TEXT):
            yield column, value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for part in value:
            yield from _texts(part)
