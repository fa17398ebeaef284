"""Copies of a prompt are found in any layout, prompts that ask something else are kept."""

from __future__ import annotations

import random

import numpy as np
import pytest
from rows_of_curation import run

from sixfold_curation.duplicates import Duplicates
from sixfold_curation.similar import bands_of, compared, proposed
from sixfold_curation.stage import Decision
from sixfold_curation.text import answer_key, tokens
from sixfold_curation.words import Words

STORY = (
    "Tom has 12 apples and gives 5 of them to his sister Ann, who already has 7 apples in her"
    " basket. How many apples does Ann have now?"
)
SAME = [
    ("What is 3 + 4?", "what is  3+4"),
    (r"Find $\frac{1}{2} + \left(x - 3\right)$.", r"find \(\dfrac12 + (x-3)\)"),
    ("Add 1,000 and 2{,}500.", "ADD 1000 and 2500"),
    ("**Compute** ５ × 3.", "compute 5 \\cdot 3"),
    ("Take five of 12.", "Take 5 of twelve"),
    ("A two-digit number", "a two digit  number."),
    ("What\u200b is the sum of 2\u2060+2?", "\ufeffWhat is the su\u00adm of 2+2?"),
    ("# Task\nTake the letter 'a'.", 'Task: take the letter "a".'),
]
DIFFERENT = [
    ("?", ";"),
    ("What is 3 + 4?", "What is 3 + 5?"),
    ("What is 3 + 4?", "What is 3 - 4?"),
    ("Compute (3 + 4) * 5.", "Compute 3 + 4 * 5."),
    ("Compute 5!.", "Compute 5."),
    ("Let f(x) = x^3. Find f'(2).", "Let f(x) = x^3. Find f(2)."),
    ("Find y′′ if y = x^4.", "Find y′ if y = x^4."),
    ("Undo the moves R' U R F.", "Undo the moves R U R' F."),
    ("Reduce A# #B to normal form.", "Reduce #A B# to normal form."),
    ("Sort a list of words in C#.", "Sort a list of words in C."),
    ("Is ~p or q always true?", "Is p or q always true?"),
    ("Find the largest prime below 90.", "Find the smallest prime below 90."),
    (STORY, STORY.replace("5 of", "6 of")),
    (STORY, STORY.replace("12", "7").replace("already has 7", "already has 12")),
    ("Is x^2 > 3 for all real x in [0, 1]?", "Is x^2 < 3 for all real x in [0, 1]?"),
]


def dropped(decisions: list[Decision]) -> list[int]:
    return [d.record.number for d in decisions if not d.kept]


@pytest.mark.parametrize("pair", SAME)
def test_layout_does_not_make_another_prompt(pair: tuple[str, str]) -> None:
    decisions, health = run(Duplicates(), pair)
    assert [d.reason for d in decisions] == ["", "duplicate"]
    assert decisions[1].note == "same as s/0" and health.value == 0.5


@pytest.mark.parametrize("pair", DIFFERENT)
def test_prompts_that_ask_something_else_are_kept(pair: tuple[str, str]) -> None:
    assert dropped(run(Duplicates(threshold=0.5), pair)[0]) == []


def test_near_duplicates_name_the_row_that_is_kept() -> None:
    prompts = [STORY, STORY.replace("Tom", "Tim"), "Think. " + STORY, "What is 1 + 1?"]
    decisions, _ = run(Duplicates(), [(prompt, "12") for prompt in prompts])
    assert [d.reason for d in decisions] == ["", "near_duplicate", "near_duplicate", ""]
    assert decisions[1].note.endswith("with s/0")
    exact, _ = run(Duplicates(threshold=1.0), [(prompt, "12") for prompt in prompts])
    assert dropped(exact) == []
    unanswered, _ = run(Duplicates(), prompts)
    assert [d.reason for d in unanswered] == ["", "", "near_duplicate", ""]


LONG = " ".join(f"{a}{b}" for a in ("ba", "de", "fi", "go", "ku") for b in "bdfgklmnprstvz")
OTHER_WORD = [
    ("Write a short poem for my sister about the rain.", "rain", "snow", ""),
    (f"Translate the text into French: {LONG}", "French", "German", ""),
    (f"{LONG} Put this into French", "French", "German", ""),
    (f"Translate the French text below: {LONG}", "the French text", "the text", ""),
    ("Is the capital of the old kingdom of Spain in the north?", "Spain", "France", "No"),
    ("Who wrote the famous English novel that is called Emma?", "Emma", "Persuasion", "Austen"),
    ("请帮我写一首关于春天的雨的短诗，要求语言优美，感情真挚。", "雨", "雪", ""),
    ("次の文章を英語に翻訳してください。猫は庭で静かに眠っている。", "英", "仏", ""),
]


@pytest.mark.parametrize("case", OTHER_WORD)
def test_prompts_that_no_answer_joins_differ_in_one_word(case: tuple[str, str, str, str]) -> None:
    """A long text that differs in its middle is a near duplicate nevertheless."""
    prompt, word, other, answer = case
    pair = [(prompt, answer), (prompt.replace(word, other), answer)]
    assert dropped(run(Duplicates(threshold=0.5), pair)[0]) == []
    copies = [(prompt, answer), (f"Please, {prompt}", answer), (f"{prompt} Thanks", answer)]
    assert dropped(run(Duplicates(threshold=0.5), copies)[0]) == [1]


def test_long_texts_without_answers_may_differ_in_their_middle() -> None:
    middle = LONG.replace("fip", "other")
    assert middle != LONG and dropped(run(Duplicates(), [LONG, middle])[0]) == [1]


CHINESE = (
    "小明的书架上有36本故事书和24本科学书，他把其中的15本送给了图书馆。请问小明现在还有多少本书？"
)
JAPANESE = (
    "太郎さんはりんごを36個、みかんを24個持っています。"
    "15個を友達にあげると、果物は全部で何個になりますか。"
)


@pytest.mark.parametrize("text", [CHINESE, JAPANESE, f"Solve the problem below. {CHINESE}"])
def test_texts_without_spaces_are_compared_by_characters(text: str) -> None:
    near = text.replace("小明", "小华").replace("友達", "友人")
    other = text.replace("15", "16")
    decisions, _ = run(Duplicates(), [(text, "45"), (near, "45"), (other, "44"), (other, "44")])
    assert [d.reason for d in decisions] == ["", "near_duplicate", "", "duplicate"]
    spaced = text.replace("，", " ， ").replace("。", ". ").replace("36", "３６")
    assert dropped(run(Duplicates(), [text, spaced])[0]) == [1]


def test_a_similar_prompt_with_another_answer_is_kept_and_named() -> None:
    other = STORY.replace("does Ann", "does Tom")
    decisions, _ = run(Duplicates(), [(STORY, "12"), (other, "7"), (other + " Think.", "7.0")])
    assert [d.reason for d in decisions] == ["", "similar_other_answer", "near_duplicate"]
    assert decisions[1].kept and "whose answer is '12'" in decisions[1].note


CONFLICT = [("1 + 1 =", "2"), ("1+1=", "3"), ("1 + 1 =", r"so \boxed{2.0}"), ("1 + 1 =", "")]


@pytest.mark.parametrize(("conflicts", "kept"), [("drop", []), ("majority", [0]), ("first", [0])])
def test_conflicting_answers_are_settled_as_asked(conflicts: str, kept: list[int]) -> None:
    decisions, health = run(Duplicates(conflicts=conflicts), CONFLICT)  # type: ignore[arg-type]
    assert [d.record.number for d in decisions if d.kept] == kept
    assert decisions[1].reason == "conflicting_answers" and "s/0" in decisions[1].note
    assert "'3'" in decisions[1].note and "'2'" in decisions[1].note
    assert "other answer" in health.alarm or "another answer" in health.alarm


def test_a_tie_keeps_nothing_and_the_majority_may_come_later() -> None:
    assert dropped(run(Duplicates(conflicts="majority"), CONFLICT[:2])[0]) == [0, 1]
    late = [CONFLICT[1], CONFLICT[0], CONFLICT[2]]
    decisions, _ = run(Duplicates(conflicts="majority"), late)
    assert [d.reason for d in decisions] == ["conflicting_answers", "", "duplicate"]


def test_replies_of_one_prompt_are_no_duplicates_if_the_scope_has_the_answer() -> None:
    rows = [
        ("Say hello.", "Hello there"),
        ("Say hello.", "Good day"),
        ("Say  hello", "hello there!"),
    ]
    assert dropped(run(Duplicates(scope="prompt_and_answer"), rows)[0]) == [2]


def test_boilerplate_that_many_prompts_share_does_not_make_them_similar() -> None:
    wrapper = (
        "Solve the following problem step by step and write the result on the last line of your"
        " reply in the form that was agreed before. What is the capital city of {}? Remember to"
        " put your answer alone on its own line at the very end of the whole reply please."
    )
    names = ["".join(random.Random(n).choices("bcdfglmnprst", k=7)) for n in range(60)]
    decisions, _ = run(Duplicates(), [wrapper.format(name) for name in names])
    assert dropped(decisions) == []


def test_a_hundred_copies_of_each_prompt_are_reduced_to_one() -> None:
    prompts = [f"Find the number of primes between {n} and {n * n}." for n in range(10, 30)]
    copies = [p.upper() if n % 2 else p for n in range(100) for p in prompts]
    decisions, health = run(Duplicates(), copies)
    assert [d.record.number for d in decisions if d.kept] == list(range(20))
    assert health.figures["most_copies_of_a_prompt"] == 100 and "99%" in health.alarm


def test_minhash_proposes_every_pair_that_the_true_similarity_finds() -> None:
    """Against all pairs, computed slowly."""
    pick, words = (
        random.Random(0),
        [f"w{chr(97 + n)}{chr(97 + m)}" for n in range(9) for m in range(9)],
    )
    texts = []
    for _ in range(40):
        text = pick.sample(words, 30)
        texts.append(text)
        for _ in range(3):
            other = list(text)
            for _ in range(pick.randint(0, 3)):
                other[pick.randrange(30)] = pick.choice(words)
            texts.append(other)
    sets = [frozenset(text) for text in texts]
    near = {
        (b, a)
        for a in range(len(sets))
        for b in range(a + 1, len(sets))
        if len(sets[a] & sets[b]) / len(sets[a] | sets[b]) >= 0.8
    }
    read = compared(Words(" ".join(text) for text in texts))
    everyone, none = np.ones(len(texts), bool), np.zeros(len(texts), np.uint64)
    found = {tuple(pair) for pair in proposed(read, everyone, 1, 0.8, none).tolist()}
    assert len(near) > 100 and len(near - found) <= 0.01 * len(near)


def test_bands_propose_a_pair_at_the_threshold_almost_surely() -> None:
    for threshold in (0.5, 0.7, 0.8, 0.9):
        bands, rows = bands_of(threshold)
        assert bands * rows <= 128 and 1 - (1 - threshold**rows) ** bands >= 0.995


def test_equal_rows_give_equal_decisions() -> None:
    rows = [STORY, STORY.replace("Tom", "Tim"), *(p for pair in DIFFERENT for p in pair)]
    assert run(Duplicates(), rows) == run(Duplicates(), rows)


def test_no_rows_and_empty_prompts_are_no_error() -> None:
    assert run(Duplicates(), [])[0] == []
    assert dropped(run(Duplicates(), ["", " ", "?", "a"])[0]) == [1]


def test_a_fraction_in_another_spelling_is_no_conflict() -> None:
    prompt = "What part of the cake is left if Tom eats a half of it?"
    decisions, _ = run(Duplicates(), [(prompt, r"\frac{1}{2}"), (prompt, "0.5"), (prompt, "1/2")])
    assert [d.reason for d in decisions] == ["", "duplicate", "duplicate"]


def test_answers_are_compared_in_one_form() -> None:
    same = ["1", "1.0", "+1", r"\boxed{1}", "$1$", "so\n#### 1", "the answer is \\boxed{1.00}."]
    assert {answer_key(text) for text in same} == {"1"}
    assert answer_key("1,000") == answer_key("1 000") == "1000"
    halves = ["-0.50", "-.5", "-1/2", r"-\frac{1}{2}", r"$-\dfrac12$"]
    assert {answer_key(text) for text in halves} == {"-1/2"}
    bare = ["0.5", r"\(0.5\)", "(0.50)", r"\text{0.5}", "**1/2**", "½", r"\$1/2", '"\\frac{1}{2}"']
    assert {answer_key(text) for text in bare} == {"1/2"}
    assert answer_key("1½") == answer_key("1 1/2") == "3/2" != answer_key("1, 1/2")
    assert answer_key("3 4") != answer_key("34") and answer_key("1/0") != answer_key("0")
    assert answer_key(r"\frac12") == answer_key(r"\dfrac{1}{2}") != answer_key("12")
    assert answer_key("") is None and answer_key("word " * 80) is None


def test_tokens_keep_what_decides_and_leave_out_layout() -> None:
    assert tokens("(a) Is −3 ≤ x?") == ["a", "is", "-", "3", "<=", "x"]
    assert tokens("x^{10}") == tokens("x^10") == tokens("x¹⁰") == ["x", "^", "10"]
    assert tokens("3½") == tokens("3 1/2") != tokens("31/2")
    assert tokens("求x的值，使x+3=7。") == [*"求x的值使x+3=7"]
    assert tokens("ที่นี่ 5 ตัว") == ["ที่", "นี่", "5", "ตั", "ว"]  # a letter with its marks
    assert tokens("“कितने सेब” हैं?") == ["कितने", "सेब", "हैं"]
    assert tokens("5! + 3") == ["5", "!", "+", "3"] and tokens("Great!") == ["great"]
