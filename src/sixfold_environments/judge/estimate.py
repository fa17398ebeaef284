"""Estimate of the judge's cost before a run."""

from __future__ import annotations

from collections.abc import Sequence

from sixfold.types import Task

from .prompts import SYSTEM
from .settings import JudgeSettings
from .spending import Cost, cost_of, estimated_tokens

REPLY_TOKENS = 80
"""Tokens of a typical reply: a few sentences and the verdict."""
PROMPT_TOKENS = 150
"""Tokens of a typical template without its placeholders."""


def questions_per_text(settings: JudgeSettings, rewards: Sequence[str]) -> int:
    """Number of questions about one completion."""
    rubric, constitution = settings.rubric, settings.constitution
    each = {
        "judge_rubric": 1 if rubric.together else len(rubric.criteria),
        "judge_reference": 1,
        "judge_constitution": 1 if constitution.together else len(constitution.principles),
        "judge_pairwise": 2 if settings.pairwise.orders == "both" else 1,
    }
    return sum(each.get(name, 0) for name in rewards)


def estimate_cost(settings: JudgeSettings, tasks: Sequence[Task], questions: int) -> Cost:
    """Estimated cost of questions about completions of tasks.

    Args:
        settings: prices, and the maximum length of a reply.
        questions: number of questions.
    """
    shown = [estimated_tokens(task.prompt_text) * 2 for task in tasks]
    prompt = sum(shown) // max(1, len(shown)) + estimated_tokens(SYSTEM) + PROMPT_TOKENS
    one = cost_of(settings, prompt, min(REPLY_TOKENS, settings.max_tokens))
    return Cost(
        questions,
        one.prompt_tokens * questions,
        one.completion_tokens * questions,
        one.usd * questions,
    )


def in_words(cost: Cost, settings: JudgeSettings) -> str:
    tokens = f"{cost.prompt_tokens:,} prompt and {cost.completion_tokens:,} reply tokens"
    priced = settings.input_price or settings.output_price
    price = f"about ${cost.usd:.2f}" if priced else "no prices set"
    return f"up to {cost.calls:,} questions, {tokens}, {price}"
