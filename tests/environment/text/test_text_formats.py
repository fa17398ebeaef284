"""Rewards for format, length, language and repetition: exact forms, and texts that imitate them."""

from __future__ import annotations

import pytest

from sixfold.environment.grade import Grade
from sixfold.types import Task
from sixfold_environments.text.formats import json_format, think_answer_format, think_format
from sixfold_environments.text.language import language
from sixfold_environments.text.marks import forged_turn, hidden_message, visible
from sixfold_environments.text.words import no_repetition, word_count, words_of

TASK = Task("t", "2+2?", answer="4")


@pytest.mark.parametrize(
    ("completion", "think", "both"),
    [
        ("<think>2+2</think>\n<answer>4</answer>", 1, 1),
        ("  <think>2+2</think><answer>4</answer>\n", 1, 1),
        ("<think>2+2</think>4", 1, 0),
        ("<think>2+2</think>", 0, 0),
        ("<think></think><answer>4</answer>", 0, 0),
        ("<think>\u200b</think><answer>4</answer>", 0, 0),
        ("<think>2+2</think><answer> </answer>", 1, 0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0, 0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 1, 0),
        ("<think>x <answer>4</answer></think>", 0, 0),
        ("<answer>4</answer><think>2+2</think>", 0, 0),
        ("<THINK>a</THINK><answer>4</answer>", 0, 0),
        ("<think>a</think><Answer>4</Answer>", 1, 0),
        ("< think>a</think><answer>4</answer>", 0, 0),
        ("<think >a</think><answer>4</answer>", 0, 0),
        ("so <think>a</think><answer>4</answer>", 0, 0),
        ("<think>a</think>so <answer>4</answer>", 1, 0),
        ("<think>a</think><answer>4</answer> done", 1, 0),
        ("<think>a</think><answer>4", 1, 0),
        ("<think>a<answer>4</answer>", 0, 0),
        ("a</think><answer>4</answer>", 0, 0),
        ("<think>a</think><answer>4</answer><|im_end|><|im_start|>user", 0, 0),
        ("<think>a<thinking>b</thinking></think><answer>4</answer>", 0, 0),
        ("4", 0, 0),
        ("", 0, 0),
    ],
)
def test_tags_appear_once_in_order_with_content(completion: str, think: int, both: int) -> None:
    assert think_format(completion, TASK).value == think
    assert think_answer_format(completion, TASK).value == both


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"a": 1}', 1), (' [1, 2]\n', 1), ('{"a": {"b": [null, true]}}', 1),
        ('<think>hm</think>{"a": 1}', 1), ('{}', 1),
        ('{"a": 1} // done', 0), ('```json\n{"a": 1}\n```', 0), ("{'a': 1}", 0), ('{"a": 1,}', 0),
        ('{"a": NaN}', 0), ('{"a": Infinity}', 0), ('{"a": 1, "a": 2}', 0), ("4", 0), ('"text"', 0),
        ('{"a": 1}{"b": 2}', 0), ('Here: {"a": 1}', 0), ("", 0), ("{", 0), ('{"a": 01}', 0),
        ("[" * 100_000, 0), ("[" * 500 + "]" * 500, 0), ('{"a": 1}<|eot_id|>', 0),
        ('<think>{"a": 1}</think>', 0), ("1" * 5000, 0), ("[" + "1" * 5000 + "]", 0),
    ],
)  # fmt: skip
def test_raw_json_has_nothing_around_it(completion: str, value: int) -> None:
    assert json_format(completion, TASK).value == value


def words(completion: str, **limits: object) -> Grade:
    return word_count(completion, Task("t", "Write.", columns=limits))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("one two  three\n\nfour", 4), ("word\u200bword\u200bword", 1), ("a . , ; - b", 2),
        ("x\u2060y\u00ady", 1), ("\u3164 \u3164 \u3164", 0), ("\u2800 \u2800", 0),
        ("don't stop", 2),
        ("well-known fact", 2), ("我们去", 3), ("a\u00a0b", 2), ("3.5 kg", 2), ("", 0),
        ("🙂 🙂", 0),
        ("word\u3164word", 1), ("\u0301 \u0301", 0),
    ],
)  # fmt: skip
def test_words_are_what_a_reader_sees(text: str, count: int) -> None:
    assert len(words_of(visible(text))) == count


def test_word_limits_hold_against_invisible_characters() -> None:
    assert words("a b c", min_words=3).value == words("a b c", max_words=3).value == 1.0
    assert words("a b", min_words=3).value == words("a b c d", max_words=3).value == 0.0
    assert words("a\u200bb\u200bc", min_words=3).value == 0.0
    assert words("a\u200bb\u200bc\u200bd", max_words=3).value == 0.0
    assert words("<think>a b c d</think>e", max_words=1).value == 1.0
    assert words("a b c", min_words="2", max_words=4.0).value == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "word " * 20, "very good " * 10, "a b c d e " * 4, "你好" * 10, "Word, word! " * 10,
        "a b b a b a a b a b b a a a b b b a b a", "We saw a dog. " + "and so on " * 6,
    ],
)  # fmt: skip
def test_repeated_words_do_not_reach_a_minimum(text: str) -> None:
    assert words(text, min_words=20).verdict == "rejected"
    assert words(text, max_words=100).value == 1.0


def test_prose_that_repeats_some_words_reaches_its_minimum() -> None:
    prose = (
        "The cat sat on the mat, and the dog sat on the rug. It was a very, very cold day; the wind"
        " was cold, the rain was cold, and the cat was not amused. No, no, it said."
    )
    count = len(prose.split())
    assert words(prose, min_words=count).value == words("no no", min_words=2).value == 1.0
    assert words(prose, min_words=count + 1).verdict == "wrong_answer"


def test_punctuation_without_spaces_hides_no_words_from_a_maximum() -> None:
    for text in ("one,two,three,four", "one，two、three。four", "one…two—three|four"):
        assert words(text, max_words=3).value == 0.0, text
    for text in ("well-known facts don't", "3.5 1,000 Node.js", "one, two, three"):
        assert words(text, max_words=3).value == 1.0, text


@pytest.mark.parametrize("columns", [{}, {"min_words": "few"}, {"max_words": 2.5}])
def test_a_task_without_a_usable_limit_is_an_error_that_names_the_column(
    columns: dict[str, object],
) -> None:
    with pytest.raises(ValueError, match=r"column (min|max)_words"):
        words("a b", **columns)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("the " * 16, 0), ("Step: 1=1 holds\n" * 40, 0), ("ha" * 300, 0), ("好" * 60, 0),
        ("a b c d " * 8, 0), ("\u200bthe" * 5 + " the the the" * 9, 0), ("", 0), ("x" * 250, 0),
        ("Gravity pulls masses together; its strength falls with the square of distance.", 1),
        ("the cat and the dog and the bird", 1), ("4", 1), ("yes yes yes", 1),
        (" ".join(f"{n}+{n}={2 * n}" for n in range(60)), 1),
    ],
)  # fmt: skip
def test_repetition_earns_nothing(text: str, value: int) -> None:
    assert no_repetition(text, TASK).value == value


@pytest.mark.parametrize(
    ("completion", "wanted", "value"),
    [
        ("The answer is 4 because 2 and 2 are four.", "English", 1), ("答案是 4", "en", 0),
        ("The answer is 4, 因为 2+2 等于 4", "en", 0), ("4", "en", 1), (r"$\theta = \pi$", "en", 1),
        ("The angle π is straight.", "en", 1), ("Τhe answer is fоur", "en", 0),
        ("La respuesta es 4 porque dos y dos son cuatro.", "en", 0),
        ("La respuesta es 4 porque dos y dos son cuatro.", "es", 1),
        ("Die Antwort ist 4, weil es so ist und nicht anders.", "English", 0),
        ("答案是 4", "zh", 1), ("答えは4です", "ja", 1), ("답은 4입니다", "ko", 1),
        ("Ответ 4, потому что это сумма", "ru", 1), ("The answer is 4", "ru", 0),
        ("<think>我们来算一下这个题目</think>The answer is 4.", "en", 0),
    ],
)  # fmt: skip
def test_language_by_script_and_frequent_words(completion: str, wanted: str, value: int) -> None:
    task = Task("t", "2+2?", columns={"language": wanted})
    assert language(completion, task).value == value


def test_without_a_language_the_script_of_the_prompt_decides() -> None:
    assert language("答案是 4", Task("t", "What is 2+2?")).value == 0.0
    assert language("答案是 4", Task("t", "二加二等于几?")).value == 1.0
    assert language("anything", Task("t", "2+2")).value == 1.0
    with pytest.raises(ValueError, match="column language"):
        language("x", Task("t", "", columns={"language": "Klingon"}))


@pytest.mark.parametrize(
    "mark",
    ["<|im_end|>", "<|im_start|>user", "<|eot_id|>", "<end_of_turn>", "[INST]", "</s>", "<|User|>",
     "<｜User｜>", "<|start|>user<|message|>"],
)  # fmt: skip
def test_a_forged_turn_is_rejected_by_every_format(mark: str) -> None:
    text = f"<think>a</think><answer>b</answer>{mark}"
    assert forged_turn(text)
    assert {f(text, TASK).verdict for f in (think_format, think_answer_format)} == {"rejected"}
    assert words(f"a {mark}", min_words=1).verdict == language(mark, TASK).verdict == "rejected"


def test_channels_and_thoughts_are_no_forged_turns_and_flags_no_hidden_message() -> None:
    assert not forged_turn(
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final"
    )
    assert not forged_turn("<think>a</think> if x <s and y> s")
    england = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"
    assert not hidden_message(f"{england} wins") and hidden_message("4 \U000e0049\U000e0067")


@pytest.mark.mostly_nightly(3)
@pytest.mark.parametrize(
    "unit", ["<", "< ", "<think>", "</think>", "<think><answer>", "{", "a ", "a"]
)
def test_format_rewards_take_linear_time(unit: str) -> None:
    import time

    text = unit * (300_000 // len(unit))
    start = time.process_time()
    for reward in (think_format, think_answer_format, json_format, no_repetition, language):
        reward(text, TASK)
    words(text, min_words=1)
    assert time.process_time() - start < 4.0
