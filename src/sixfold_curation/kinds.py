"""The kinds of stages, by name."""

from __future__ import annotations

STAGES: dict[str, str] = {
    "decontaminate": "sixfold_curation.decontaminate:Decontaminate",
    "duplicates": "sixfold_curation.duplicates:Duplicates",
    "language": "sixfold_curation.language:Language",
    "licence": "sixfold_curation.licence:Licence",
    "personal_data": "sixfold_curation.personal_data:PersonalData",
    "feasibility": "sixfold_curation.feasibility:Feasibility",
    "gold": "sixfold_curation.gold:Gold",
    "mix": "sixfold_curation.mix:Mix",
    "recycle": "sixfold_curation.recycle:Recycle",
    "stratify": "sixfold_curation.stratify:Stratify",
}
"""Name of a kind to "module:class". A module is imported when a recipe uses it."""
