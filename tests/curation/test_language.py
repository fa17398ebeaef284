"""Rows in other languages are found; formulas and short texts are not judged."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from rows_of_curation import run

from sixfold_curation.language import Language

ENGLISH = [
    "Find the sum of all integers n such that n divides 12.",
    "Let ABC be a triangle with AB = 13, BC = 14, CA = 15. Find the area.",
    "Jean-Pierre and Marie-Claire buy 12 croissants in Montpellier. How many are left?",
    "**What Is The Least Common Multiple Of 12 And 18? Show Each Step Of The Computation.**",
]
OTHER = {
    "fr": "Trouvez la somme des entiers de 1 à 10 qui sont divisibles par 3.",
    "de": "Bestimme die Summe aller ganzen Zahlen von 1 bis 100.",
    "zh": "求从1到100的所有整数的和。",
    "ru": "Сколько простых чисел между 10 и 50?",
    "pt": "Determine o valor de x na equação dada a seguir.",
}
NOT_JUDGED = [
    "What is 3 + 4?",
    "$\\forall x\\, \\exists y: x < y$",
    "x^2 = 4",
    "",
    "```\nfor a in b: c\n```",
]


def test_english_is_kept_and_other_languages_are_named() -> None:
    decisions, health = run(Language(), [*ENGLISH, *OTHER.values()])
    assert [d.kept for d in decisions] == [True] * len(ENGLISH) + [False] * len(OTHER)
    assert [d.note[:2] for d in decisions[len(ENGLISH) :]] == list(OTHER)
    assert health.value == pytest.approx(len(OTHER) / (len(ENGLISH) + len(OTHER)))


def test_an_english_instruction_does_not_make_a_problem_english() -> None:
    suffix = " Please reason step by step, and put your final answer within \\boxed{}."
    decisions, _ = run(
        Language(), [OTHER["zh"] + suffix, OTHER["fr"] + suffix, ENGLISH[0] + suffix]
    )
    assert [d.kept for d in decisions] == [False, False, True]


def test_formulas_and_short_texts_are_not_judged_but_counted() -> None:
    decisions, health = run(Language(), NOT_JUDGED)
    assert all(d.kept for d in decisions)
    assert health.figures["languages"] == {"(too short to judge)": len(NOT_JUDGED)}


def test_several_languages_can_be_kept() -> None:
    decisions, _ = run(Language(keep=("en", "fr")), [ENGLISH[0], OTHER["fr"], OTHER["de"]])
    assert [d.kept for d in decisions] == [True, True, False]


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ValidationError, match="'english' is no language that can be recognised"):
        Language(keep=("english",))


CODE = [
    "def _json(value: object) -> str:\n    return json.dumps(value, indent=2)\n",
    "def mean_entropy(logits: Tensor) -> float:\n    logp = logits.log_softmax(-1)\n"
    "    return float(-(logp.exp() * logp).sum(-1).mean())",
    "def recipe_judge(recipe: Recipe, ranks: int) -> RecipeJudge:\n\n"
    "    return RecipeJudge(judge_settings(recipe), 1 / ranks)",
    "Fix it:\ndef norm_of(module: nn.Module) -> Norm:\n"
    "    return Norm(module._parameters, module.variance_epsilon)  # type: ignore[arg-type]",
]


def test_code_without_a_fence_is_in_no_other_language() -> None:
    assert [decision.kept for decision in run(Language(), CODE)[0]] == [True] * len(CODE)


def test_a_reply_in_another_language_counts_too_unless_that_is_turned_off() -> None:
    rows = [(ENGLISH[0], OTHER["fr"]), (ENGLISH[0], ENGLISH[1]), (ENGLISH[0], "12")]
    decisions, health = run(Language(), rows)
    assert [d.kept for d in decisions] == [False, True, True] and "reply" in decisions[0].note
    assert health.figures["languages"] == {"en": 2, "fr": 1}
    assert all(d.kept for d in run(Language(replies=False), rows)[0])
