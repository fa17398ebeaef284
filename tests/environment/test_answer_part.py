"""Only the text after the last finished thought is an answer."""

from __future__ import annotations

import json
import time

import pytest

from sixfold.checks.environment import Environment
from sixfold.environment.answer_part import answer_part
from sixfold.environment.arithmetic import arithmetic_reward
from sixfold.types import Group, Task, Trajectory
from sixfold_environments.gym import submitted_answer
from sixfold_environments.maths.answers import math_grade
from sixfold_environments.text.formats import json_format, think_format

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


@pytest.mark.parametrize("tag", ["<think>", "</think>", "[THINK]", "</answer>", "<|channel|>final"])
@pytest.mark.parametrize("before", ["", "<think>hm</think>\n", "```json\n", "<think>\n[1]</think>"])
def test_a_tag_inside_a_json_value_is_text(tag: str, before: str) -> None:
    value = json.dumps({"a": [f"x {tag} y"], tag: 1})
    answer = before if "</think>" not in before else before.partition("</think>")[2]
    assert answer_part(before + value) == answer + value
    assert answer_part(f"{before}{value} so") == f"{answer}{value} so"
    assert answer_part(f"{before}{value[:-1]}<think>") == "", "not JSON, so the tag is one"
    assert answer_part(f"{before}{value}<think>") == ""
    assert json_format(before + value, TASK).value == float(not before.startswith("```"))


def test_a_json_value_does_not_close_a_thought() -> None:
    assert answer_part('<think>{"a": "</think>"} 42') == ""
    assert answer_part('<think>{"a": "</think>"}</think>42') == "42"
    assert think_format('<think>a</think>{"a": "<think></think>"}', TASK).value == 1.0


@pytest.mark.parametrize("unit", ["```[", '<answer>{"a":', "<think>[[", "<tool_call>{}"])
def test_json_is_found_in_linear_time(unit: str) -> None:
    text = unit * (300_000 // len(unit))
    start = time.process_time()
    answer_part(text)
    assert time.process_time() - start < 4.0


def test_a_thought_that_the_prompt_opened_is_one() -> None:
    def graded(opened: str, text: str) -> float | None:
        t = Trajectory.one_turn("t", 0, [1], [2], [-1.0], [0], "length", text=text, opened=opened)
        with Environment([math_grade]) as environment:
            environment.score([Group(TASK, [t])])
        return t.reward.value if t.reward else None

    assert graded("<think>\n", "so the answer is 42") == 0.0
    assert graded("", "so the answer is 42") == 1.0
    assert graded("<think>\n", "hm</think>the answer is 42") == 1.0
