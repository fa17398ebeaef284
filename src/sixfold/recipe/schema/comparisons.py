"""Settings of comparisons: the form of their rows, which pairs are made, and their length."""

from __future__ import annotations

from typing import Literal

from .base import Section, knob

ComparisonForm = Literal["auto", "pair", "labelled", "best_of", "ranked", "unpaired", "scored"]


class ComparisonsConfig(Section):
    """Comparisons of completions, on which stages of kind preference and reward_model train."""

    form: ComparisonForm = knob(
        "auto",
        "form of the rows: pair (chosen and rejected), labelled (A, B and a verdict), best_of"
        " (completions of which the first num_correct are right), ranked (completions with ranks or"
        " scores), unpaired (a completion and whether it is liked), scored (a completion with a"
        " reward; those of one prompt are compared, as a stage of kind sample writes them), or auto"
        " (by the columns)",
    )
    chosen_field: str = knob(
        "chosen", "column with the better completion (form = 'labelled': with completion A)"
    )
    rejected_field: str = knob(
        "rejected", "column with the worse completion (form = 'labelled': with completion B)"
    )
    margin_field: str = knob(
        "margin", "column that says by how much the chosen one is better, a number above 0"
    )
    completion_field: str = knob(
        "completion",
        "column with one completion; in a list of completions, the field of each that has its text",
    )
    completions_field: str = knob("completions", "column with the list of completions")
    label_field: str = knob(
        "label", "column with a verdict: true or false, or A, B or tie of labelled comparisons"
    )
    score_field: str = knob(
        "",
        "column, or field of each completion, with a number that is larger for better completions"
        " (empty: reward, score or rank); one that is named rank is smaller for better ones",
    )
    pairs: Literal["all", "extremes"] = knob(
        "all",
        "pairs of a prompt with more than two completions: all (each with every worse one), or"
        " extremes (the best with the worst)",
    )
    max_tokens: int = knob(
        0,
        "longest prompt with a completion in tokens (0: the model's context); data.overlong says"
        " what happens to a comparison with a longer one",
        ge=0,
    )
    truncate: bool = knob(
        False,
        "cut the end of completions that exceed max_tokens, in place of data.overlong; the share"
        " of pairs that are cut is reported",
    )
