"""`judge_rubric`: a score for each of several criteria."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from sixfold.environment.grade import Grade
from sixfold.errors import UserError
from sixfold.types import Task

from .client import JudgeFailed
from .judge import Judge, answer_text, failed, question_text, reference_text
from .named_texts import NamedText, named_texts
from .prompts import Question, listed, score, template

SingleReward = Callable[[str, Task], Awaitable[Grade]]
COLUMN = "criteria"
"""Column of a task whose criteria replace those of the recipe."""


def rubric_reward(judge: Judge) -> SingleReward:
    """Make the reward `judge_rubric`.

    The judge gives each criterion a score from 0 to `scale`. The reward is the weighted mean of the
    scores, or the lowest score, divided by `scale`. Criteria of weight 0 do not count.

    Raises:
        UserError: for malformed criteria, or a template with wrong placeholders.
    """
    settings = judge.settings.rubric
    prompt = template("rubric", settings.template)
    try:
        usual = named_texts(settings.criteria, "criterion", "environment.judge.rubric.criteria")
    except ValueError as error:
        raise UserError(f"{error}. Write e.g. 'correct * 2: What it states is true'") from error

    def question(task: Task, answer: str, criteria: Sequence[NamedText]) -> Question:
        return Question(
            prompt,
            {"criteria": listed(criteria), "scale": str(settings.scale)},
            {
                "question": question_text(task),
                "answer": judge.shown(answer),
                "reference": reference_text(task) or "(none)",
            },
            {each.name: score("the score of this criterion", settings.scale) for each in criteria},
        )

    async def judge_rubric(completion: str, task: Task) -> Grade:
        own = task.columns.get(COLUMN)
        source = f"task {task.id!r}, column {COLUMN!r}"
        criteria = usual if own is None else named_texts(own, "criterion", source)
        answer = answer_text(completion)
        if why := judge.refuse(answer, task, tuple(each.text for each in criteria)):
            return Grade(0.0, "rejected", why)
        parts = [criteria] if settings.together else [[each] for each in criteria]
        try:
            replies = await asyncio.gather(
                *(judge.ask(question(task, answer, part)) for part in parts)
            )
        except JudgeFailed as error:
            return failed(error)
        merged = {name: value for reply in replies for name, value in reply.items()}
        scores = {each.name: merged[each.name] / settings.scale for each in criteria}
        reasons = " ".join(str(reply.get("reason", "")) for reply in replies)
        said = ", ".join(f"{name} {value:.2g}" for name, value in scores.items())
        return judge.graded(
            _value(scores, criteria, settings.aggregate), answer, f"{said}. {reasons}"
        )

    return judge_rubric


def _value(scores: dict[str, float], criteria: Sequence[NamedText], aggregate: str) -> float:
    if aggregate == "min":
        return min(scores[each.name] for each in criteria if each.weight)
    total = sum(each.weight for each in criteria)
    return sum(each.weight * scores[each.name] for each in criteria) / total
