"""Seventeen concepts that an introductory course leaves out: where each belongs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from sixfold.pages.lab import Breaking, Control, Lab, Outcome, Table

_DATA = tomllib.loads((resources.files("sixfold_labs") / "concept_gaps.toml").read_text("utf-8"))
CHAPTERS: dict[str, str] = _DATA["chapters"]
CONCEPTS: dict[str, dict[str, Any]] = _DATA["concepts"]

LAST_CHAPTER = 28


def chapter_title(key: str) -> str:
    """`17 Process rewards and search`."""
    return f"{key} {CHAPTERS[key]}"


def missing_chapters(concept: Mapping[str, Any], read: int) -> list[str]:
    """Prerequisites, and the chapter before, that come after chapter `read`."""
    needed = sorted({*concept.get("prerequisites", ()), concept["after"]})
    return [chapter_title(key) for key in needed if int(key[:2]) > read]


def concept_gaps(*, concept: str, read: int) -> Outcome:
    """Describe one concept."""
    found = CONCEPTS[concept]
    missing = missing_chapters(found, read)
    rows = [[key, each["force"], each["after"], each["effort"]] for key, each in CONCEPTS.items()]
    return Outcome(
        values={
            "slots_after": chapter_title(found["after"]),
            "section": found.get("section"),
            "prerequisites": [chapter_title(key) for key in found.get("prerequisites", ())],
            "force": found["force"],
            "effort": found["effort"],
            "effort_is_our_estimate": found.get("rated_by_us", False),
            "text": found["text"],
            "module": found.get("module"),
            "missing_chapters": missing,
        },
        tables=(Table("Concepts", ("concept", "force", "after", "effort"), rows),),
        lines=(found["text"],),
    )


CONCEPT_GAPS = Lab(
    name="concept-gaps",
    title="Seventeen concepts beyond an introductory course: where each fits in",
    about=(
        "Each concept belongs to one force of RL training (signal, estimator or cost), follows a"
        " chapter of the course and may need others. `module` is the file of Sixfold that has it."
        " The course rates the effort of 14 concepts; those of verifier-robustness, sandbox and"
        " interconnect are our estimates. V-trace is part of off-policy-correction."
    ),
    controls=(
        Control("concept", "gae", "concept", choices=tuple(CONCEPTS)),
        Control("read", LAST_CHAPTER, "last chapter that has been read", low=0, high=LAST_CHAPTER),
    ),
    run=concept_gaps,
    breaking=Breaking(
        breaks={"concept": "mixture-of-experts", "read": 10},
        safe={"concept": "mixture-of-experts", "read": 25},
        why="Its prerequisites, chapters 22 and 25, have not been read.",
        failed=lambda outcome: bool(outcome.values["missing_chapters"]),
    ),
)

LABS = (CONCEPT_GAPS,)
