"""Rows for tests of stages, made from prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sixfold_curation.stage import Decision, Health, Record, Stage, decided


def record(
    number: int, prompt: str, answer: str = "", fields: Mapping[str, Any] | None = None
) -> Record:
    columns = {"id": f"s/{number}", "source": "s", "prompt": prompt, "answer": answer}
    return Record(
        number=number,
        id=f"s/{number}",
        source="s",
        where=f"s.jsonl: row {number + 1}",
        prompt=prompt,
        answer=answer,
        fields={**columns, **(fields or {})},
    )


def rows_of(prompts: Iterable[str | tuple[str, str]]) -> list[Record]:
    pairs = [(p, "") if isinstance(p, str) else p for p in prompts]
    return [record(number, *pair) for number, pair in enumerate(pairs)]


def run(stage: Stage, prompts: Iterable[str | tuple[str, str]]) -> tuple[list[Decision], Health]:
    return decided(stage, rows_of(prompts))
