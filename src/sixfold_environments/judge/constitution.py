"""`judge_constitution`: whether an answer follows each of several principles."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sixfold.environment.grade import Grade
from sixfold.errors import UserError
from sixfold.types import Task

from .client import JudgeFailed
from .judge import Judge, answer_text, failed, question_text
from .named_texts import NamedText, named_texts
from .prompts import Question, Template, choice, listed, template
from .rubric import SingleReward

FOLLOWS, VIOLATES, NOT_APPLICABLE = "follows", "violates", "not_applicable"


def principles_of(judge: Judge) -> list[NamedText]:
    """Parse the principles in the judge's settings.

    Raises:
        UserError: if they are malformed.
    """
    setting = "environment.judge.constitution.principles"
    try:
        return named_texts(judge.settings.constitution.principles, "principle", setting)
    except ValueError as error:
        raise UserError(f"{error}. Write e.g. 'honest: The answer does not mislead'") from error


def constitution_reward(judge: Judge) -> SingleReward:
    """Make the reward `judge_constitution`: share of the principles that the answer follows.

    Principles that do not apply are left out. If none applies, the reward is 1. With
    `aggregate = "min"`, the reward is 1 only if the answer follows all principles that apply.

    Raises:
        UserError: for malformed principles, or a template with wrong placeholders.
    """
    settings = judge.settings.constitution
    prompt = template("constitution", settings.template)
    principles = principles_of(judge)

    async def judge_constitution(completion: str, task: Task) -> Grade:
        answer = answer_text(completion)
        if why := judge.refuse(answer, task, tuple(each.text for each in principles)):
            return Grade(0.0, "rejected", why)
        try:
            verdicts, reasons = await principle_verdicts(
                judge, prompt, principles, task, answer, settings.together
            )
        except JudgeFailed as error:
            return failed(error)
        applied = [each for each in principles if verdicts[each.name] != NOT_APPLICABLE]
        kept = [each for each in applied if verdicts[each.name] == FOLLOWS]
        total = sum(each.weight for each in applied)
        value = sum(each.weight for each in kept) / total if total else 1.0
        if settings.aggregate == "min":
            value = float(len(kept) == len(applied))
        said = ", ".join(f"{name} {verdict}" for name, verdict in verdicts.items())
        return judge.graded(value, answer, f"{said}. {reasons}")

    return judge_constitution


async def principle_verdicts(
    judge: Judge,
    prompt: Template,
    principles: Sequence[NamedText],
    task: Task,
    answer: str,
    together: bool,
) -> tuple[dict[str, str], str]:
    """Ask whether an answer follows each principle.

    Args:
        together: ask about all principles in one question.

    Returns:
        The verdict on each principle by name, and the judge's reasons.

    Raises:
        JudgeFailed: if the judge gives no verdict.
    """
    parts = [list(principles)] if together else [[each] for each in principles]
    data = {"question": question_text(task), "answer": judge.shown(answer)}
    meaning = "whether the answer follows this principle"
    questions = [
        Question(
            prompt,
            {"principles": listed(part)},
            data,
            {each.name: choice(meaning, FOLLOWS, VIOLATES, NOT_APPLICABLE) for each in part},
        )
        for part in parts
    ]
    replies = await asyncio.gather(*map(judge.ask, questions))
    merged = {name: str(value) for reply in replies for name, value in reply.items()}
    reasons = " ".join(str(reply.get("reason", "")) for reply in replies)
    return {each.name: merged[each.name] for each in principles}, reasons
