"""Only the text after the last finished thought is an answer."""

from __future__ import annotations

import pytest

from sixfold.environment.answer_part import answer_part
from sixfold.environment.arithmetic import arithmetic_reward
from sixfold.environment.gym import submitted_answer
from sixfold.environment.maths.answers import math_grade
from sixfold.environment.scorer import Environment
from sixfold.types import Group, Task, Trajectory

TASK = Task("t", "6*7?", answer="42")
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("42", "42"),
        ("<think>6*7</think>42", "42"),
        ("6*7</think>42", "42"),
        ("<think>\n42", ""),
        ("<think>a</think>b<think>42", ""),
        ("<think>a</think>b<think>c</think>42", "42"),
        ("[THINK]6*7[/THINK]42", "42"),
        ("[THINK]42", ""),
        ("<THINK>6*7</Think >42", "42"),
        ('<think type="x">42', ""),
        ("<|begin_of_thought|>6*7<|end_of_thought|>42", "42"),
        ("<scratchpad>42</scratchpad>", ""),
        (f"{ANALYSIS}6*7<|end|><|start|>assistant{FINAL}42", "42"),
        (f"{ANALYSIS}42<|end|>", ""),
        (f"{FINAL}42", "42"),
    ],
)
def test_the_answer_follows_the_last_thought(completion: str, answer: str) -> None:
    assert answer_part(completion) == answer
    assert submitted_answer(completion) == answer
    assert arithmetic_reward(completion, TASK) == float(answer == "42")
    boxed = completion.replace("42", "\\boxed{42}")
    assert math_grade(boxed, TASK).value == float(answer == "42")


def test_a_thought_that_the_prompt_opened_is_one() -> None:
    def graded(opened: str, text: str) -> float | None:
        t = Trajectory.one_turn("t", 0, [1], [2], [-1.0], [0], "length", text=text, opened=opened)
        with Environment([math_grade]) as environment:
            environment.score([Group(TASK, [t])])
        return t.reward.value if t.reward else None

    assert graded("<think>\n", "so the answer is 42") == 0.0
    assert graded("", "so the answer is 42") == 1.0
    assert graded("<think>\n", "hm</think>the answer is 42") == 1.0
