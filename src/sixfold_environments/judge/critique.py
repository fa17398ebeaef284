"""Preference pairs by critique and revision (constitutional AI, arXiv:2212.08073).

The judge criticises and rewrites a draft that violates a principle. The revision is preferred to
the draft if it differs from the draft and is an answer, and if the judge, in a separate question,
does not find that it violates the principle.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sixfold.types import Task

from .client import JudgeFailed
from .constitution import FOLLOWS, NOT_APPLICABLE, VIOLATES, principle_verdicts
from .judge import Judge, answer_text, question_text
from .named_texts import NamedText
from .prompts import Field, Question, choice, template


class Draft(NamedTuple):
    """An answer that may need a revision."""

    task: Task
    text: str


@dataclass
class Pairs:
    """Preference pairs, and the outcomes for all drafts.

    Attributes:
        records: pairs with prompt, chosen, rejected, principle and critique.
        outcomes: outcome -> number of combinations of a draft and a principle.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)


async def preference_pairs(
    judge: Judge, drafts: Sequence[Draft], principles: Sequence[NamedText]
) -> Pairs:
    """Criticise each draft by each principle, and revise those that violate it.

    Args:
        drafts: answers, such as samples of the policy.

    Raises:
        BudgetSpent: if the judge's budget is used up. Its answers so far are stored.
    """
    made = Pairs()
    todo = [
        asyncio.ensure_future(_pair(judge, draft, principle))
        for draft in drafts
        for principle in principles
    ]
    try:
        results = await asyncio.gather(*todo)
    except BaseException:
        for task in todo:
            task.cancel()
        await judge.settled()
        raise
    for result in results:
        if isinstance(result, str):
            made.outcomes[result] += 1
        else:
            made.outcomes["revised"] += 1
            made.records.append(result)
    return made


async def _pair(judge: Judge, draft: Draft, principle: NamedText) -> dict[str, Any] | str:
    """The preference pair for a draft and a principle, or the reason why there is none."""
    answer = answer_text(draft.text).strip()
    if judge.refuse(answer, draft.task, (principle.text,)):
        return "no answer to revise"
    asked = {"question": question_text(draft.task), "answer": judge.shown(answer)}
    verdict = choice("whether it follows the principle", FOLLOWS, VIOLATES, NOT_APPLICABLE)
    words = Field("what in the answer violates the principle, and why", {"type": "string"})
    try:
        found = await judge.ask(
            Question(
                template("critique", ""),
                {"principle": principle.text},
                asked,
                {"verdict": verdict, "critique": words},
                reasoned=False,
            )
        )
        if found["verdict"] != VIOLATES:
            return str(found["verdict"])
        revision = await _ask_for_revision(judge, asked, principle, found["critique"])
        if not revision or revision == answer or judge.refuse(revision, draft.task):
            return "revision without change"
        checked, _ = await principle_verdicts(
            judge, template("constitution", ""), [principle], draft.task, revision, together=True
        )
    except JudgeFailed:
        return "no verdict"
    if checked[principle.name] == VIOLATES:
        return "revision still violates"
    prompt = draft.task.prompt
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "chosen": revision,
        "rejected": answer,
        "principle": principle.text,
        "critique": found["critique"],
    }


async def _ask_for_revision(
    judge: Judge, asked: dict[str, str], principle: NamedText, critique: str
) -> str:
    """Ask for a revision of an answer.

    Raises:
        JudgeFailed: if the judge gives no revision.
    """
    said = await judge.ask(
        Question(
            template("revision", ""),
            {"principle": principle.text},
            {**asked, "critique": judge.shown(critique)},
            {"revision": Field("the rewritten answer alone", {"type": "string"})},
            reasoned=False,
        )
    )
    return str(said["revision"]).strip()
