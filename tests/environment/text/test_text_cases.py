"""The built-in reward that checks each case of a file of adversarial cases."""

from __future__ import annotations

from typing import Any

import pytest

from sixfold.environment.registry import REWARDS
from sixfold.environment.rewards import load_reward
from sixfold_environments.text.cases import text_case


def verdict(**case: Any) -> float | None:
    found = text_case(case)
    assert found is not None
    reward = load_reward(found.reward)
    return found.value([reward.function(text, found.task) for text in found.completions])


@pytest.mark.parametrize(
    ("kind", "sub", "prompt", "gold", "policy", "reward", "columns"),
    [
        ("math", "nobox", "", "4", "strict boxed; lenient elsewhere", "math_boxed", {}),
        ("math", "nobox", "", "4", "lenient: the answer is", "math", {}),
        ("format", "tags", "Use <think>...</think>.", None, None, "think_format", {}),
        ("format", "tags", "<think>..</think><answer>..</answer>", "4", None,
         "think_answer_format", {}),
        ("format", "json", "Output only raw JSON.", None, None, "json_format", {}),
        ("format", "count", "At least 10 words.", None, None, "word_count", {"min_words": 10}),
        ("format", "count", "fewer than 10 words", None, None, "word_count", {"max_words": 9}),
        ("format", "count", "Exactly 5 words.", None, None, "word_count",
         {"min_words": 5, "max_words": 5}),
        ("format", "count", "between 5 and 9 words", None, None, "word_count",
         {"min_words": 5, "max_words": 9}),
        ("format", "lang", "Answer in French.", None, None, "language", {"language": "French"}),
        ("format", "eos", "2+2?", "4", None, "math_boxed", {}),
        ("format", "repeat", "Explain.", None, None, "no_repetition", {}),
        ("web", "ok", "Capital?", "Rome", None, "web_answer", {}),
        ("judge", "ok", "Capital?", "Rome", None, "short_answer", {}),
    ],
)  # fmt: skip
def test_the_reward_that_a_user_would_choose(
    kind: str,
    sub: str,
    prompt: str,
    gold: str | None,
    policy: str | None,
    reward: str,
    columns: dict[str, Any],
) -> None:
    case = {"id": "1", "kind": kind, "sub": sub, "prompt": prompt, "gold": gold, "policy": policy}
    found = text_case(case | {"completion": "x"})
    assert found is not None and found.reward == reward and reward in REWARDS
    assert found.task.answer == gold and dict(found.task.columns) == columns


def test_tools_are_read_from_the_prompt() -> None:
    case = {"kind": "tool", "prompt": "Tools: f(city: str, n: int = 2, unit: 'C'|'F'='C').",
            "gold": [{"name": "f", "arguments": {"city": "Rome"}}]}  # fmt: skip
    call = '<tool_call>{"name": "f", "arguments": {"city": "Rome"%s}}</tool_call>'
    assert verdict(**case, completion=call % ', "n": 2, "unit": "C"') == 1.0
    assert verdict(**case, completion=call % ', "n": "2"') == 0.0
    assert verdict(**case, completion=call % ', "unit": "K"') == 0.0
    assert verdict(**(case | {"gold": None}), completion="It is warm.") == 1.0


def test_a_pairwise_case_needs_exactly_one_right_text() -> None:
    case = {"kind": "judge", "sub": "position", "prompt": "Capital of Italy?", "gold": "Rome"}
    assert verdict(**case, completion="A: Rome / B: Milan, then swapped") == 1.0
    assert verdict(**case, completion="A: Rome / B: Rome, then swapped") == 0.0
    assert verdict(**case, completion="A: Turin / B: Milan") == 0.0


def test_attacks_on_the_maths_verifier_use_the_strict_form() -> None:
    attack = {
        "name": "a",
        "lang": "text",
        "code": r"\boxed{٣}",
        "tests": {"type": "math", "gold": "3"},
    }
    assert verdict(**attack) == 0.0 and verdict(**(attack | {"code": r"\boxed{3}"})) == 1.0
    assert text_case(attack | {"tests": {"type": "log"}}) is None
    assert text_case({"kind": "code", "completion": "x"}) is None
