"""`judge_reference`: whether an answer agrees with the task's reference answer."""

from __future__ import annotations

from sixfold.environment.grade import Grade
from sixfold.types import Task

from .client import JudgeFailed
from .judge import Judge, answer_text, failed, question_text, reference_text
from .prompts import Question, choice, template
from .rubric import SingleReward

RIGHT, WRONG = "right", "wrong"


def reference_reward(judge: Judge) -> SingleReward:
    """Make the reward `judge_reference`: 1 if the answer agrees with `task.answer`, else 0.

    Raises:
        UserError: for a template with wrong placeholders.
    """
    prompt = template("reference", judge.settings.reference.template)
    fields = {"verdict": choice("whether the answer is right", RIGHT, WRONG)}

    async def judge_reference(completion: str, task: Task) -> Grade:
        reference = reference_text(task)
        if not reference:
            raise ValueError(
                f"judge_reference: task {task.id!r} has no reference answer. Set data.answer_field,"
                " or use judge_rubric"
            )
        answer = answer_text(completion)
        if why := judge.refuse(answer, task):
            return Grade(0.0, "rejected", why)
        data = {
            "question": question_text(task),
            "reference": reference,
            "answer": judge.shown(answer),
        }
        try:
            reply = await judge.ask(Question(prompt, {}, data, fields))
        except JudgeFailed as error:
            return failed(error)
        right = float(reply["verdict"] == RIGHT)
        return judge.graded(right, answer, str(reply.get("reason", "")))

    return judge_reference
