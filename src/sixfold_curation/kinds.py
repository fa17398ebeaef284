"""The kinds of stages, by name."""

from __future__ import annotations

STAGES: dict[str, str] = {
    "decontaminate": "sixfold_curation.decontaminate:Decontaminate",
    "duplicates": "sixfold_curation.duplicates:Duplicates",
    "language": "sixfold_curation.language:Language",
    "licence": "sixfold_curation.licence:Licence",
    "personal_data": "sixfold_curation.personal_data:PersonalData",
}
"""Name of a kind to "module:class". A module is imported when a recipe uses it."""
