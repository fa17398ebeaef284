"""Leaks of an evaluation are found by the rule that fits, and lookalikes are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_sets import curate, read_rows, source_text, write_lines, write_recipe
from pydantic import ValidationError
from rows_of_curation import run

from sixfold.errors import UserError
from sixfold_curation.decontaminate import Decontaminate

# Prompts of public evaluations: GSM8K (arXiv:2110.14168), and two of the form of AIME.
EGGS = (
    "Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes"
    " muffins for her friends every day with four. She sells the remainder at the farmers' market"
    " daily for $2 per fresh duck egg. How much in dollars does she make every day there?"
)
PAIRS = "Find the number of ordered pairs $(m,n)$ of positive integers such that $m^2n = 20^{20}$."
CIRCLE = "A circle of radius 7 is tangent to each of the three sides of a triangle. Find its area."
SHORT = "What is 17 * 23?"
FAIR = (
    "At the fair Tim buys 12 pens for 3 dollars, 14 books for 9 dollars and 2 bags for 25 dollars."
    " What does he pay?"
)
EVALUATION = [EGGS, PAIRS, CIRCLE, SHORT, FAIR]
BOX = " Please reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture
def stage(tmp_path: Path) -> Decontaminate:
    file = tmp_path / "made.jsonl"
    file.write_text("".join(json.dumps({"question": text}) + "\n" for text in EVALUATION))
    return Decontaminate(evaluations=({"data": str(file)},))  # type: ignore[arg-type]


OTHERS = [
    f"{name} grows {n} {thing} on a field and {verb} {m} of them in {season}. How many are left?"
    for n, (name, thing, verb, season, m) in enumerate(
        zip(
            ["Ann", "Bob", "Cid", "Dan", "Eve", "Fay"] * 5,
            ["beets", "melons", "roses", "pears", "leeks"] * 6,
            ["gives away", "loses", "cooks"] * 10,
            ["spring", "autumn"] * 15,
            range(31, 61),
            strict=True,
        ),
        start=70,
    )
]

LEAKS = {
    EGGS.upper(): ("same_text", 0),
    f"Here is a task for you: {EGGS} Show your work.": ("n_gram", 0),
    EGGS[:130]: ("n_gram", 0),
    SHORT.lower(): ("same_text", 3),
    f"Please tell me {SHORT}": ("contained", 3),
    FAIR.translate(str.maketrans("1234", "5678")): ("number_swap", 4),
    "Determine how many ordered pairs (m, n) of positive integers satisfy m^2 n = 20^20.": (
        "paraphrase", 1,
    ),
    "Each of a triangle's three sides is tangent to a circle whose radius is 7. What is the area"
    " of the triangle's circle?": ("paraphrase", 2),
}  # fmt: skip

KEPT = [
    "What is 17 * 23 + 5?",
    "What is 18 * 23?",
    "Find the number of ordered pairs (a,b) of positive integers such that a + b = 30.",
    "Tom has 16 apples, eats 3 of them and sells 4 at the market. How many apples has he?",
    "A square of side 7 is inscribed in a semicircle. Find the radius of the semicircle.",
]


def test_each_leak_is_found_by_its_rule_and_names_the_prompt(stage: Decontaminate) -> None:
    decisions, health = run(stage, [*OTHERS, *LEAKS])
    leaks = decisions[len(OTHERS) :]
    assert [(d.reason, d.note.split(":")[0]) for d in leaks] == [
        (rule, f"made/{prompt}") for rule, prompt in LEAKS.values()
    ]
    assert all(d.kept for d in decisions[: len(OTHERS)])
    assert "8 rows had prompts of the evaluations (5 of 5)" in health.alarm
    assert health.value == pytest.approx(8 / 38)


def test_lookalikes_are_kept(stage: Decontaminate) -> None:
    decisions, health = run(stage, [*OTHERS, *KEPT])
    assert [d.record.prompt for d in decisions if not d.kept] == []
    assert not health.alarm


CHINESE = (
    "小明的书架上有36本故事书和24本科学书，他把其中的15本送给了图书馆。请问小明现在还有多少本书？"
)
JAPANESE = (
    "太郎さんはりんごを36個、みかんを24個持っています。"
    "15個を友達にあげると、果物は全部で何個になりますか。"
)
STOCK = "如图所示，在平面直角坐标系中，点A"  # 14 characters that begin many problems
UNSPACED_LEAKS = {
    CHINESE.replace("，", " , "): ("same_text", 0),
    f"Solve this: {CHINESE} Show your work.": ("n_gram", 0),
    f"请认真思考。{JAPANESE[:-12]}答えは？": ("n_gram", 1),
    "ペン17本を4円、本16冊を8円、箱5個を26円で買うといくら？": ("number_swap", 4),
}
UNSPACED_KEPT = [
    STOCK + "与点B关于原点对称，求点B到直线的距离。",
    "用代入法解方程组，并检验所得的结果是否正确。",
    "小明的书架上有12本漫画书，他又买了8本，请问小明一共有多少本漫画书？",
    "花子さんは鉛筆を12本持っています。5本を妹にあげました。残りは何本ですか。",
]


def test_leaks_are_found_in_scripts_without_spaces(tmp_path: Path) -> None:
    file = tmp_path / "made.jsonl"
    prompts = [CHINESE, JAPANESE, STOCK + "的坐标是(3, 4)，求线段OA的长度。", "解方程组"]
    prompts.append("ペン12本を3円、本14冊を9円、箱2個を25円で買うといくら？")
    file.write_text("".join(json.dumps({"question": text}) + "\n" for text in prompts))
    stage = Decontaminate(evaluations=({"data": str(file)},))  # type: ignore[arg-type]
    decisions, _ = run(stage, [*UNSPACED_LEAKS, *UNSPACED_KEPT])
    found = [(d.reason, int(d.note.split(":")[0][5:])) for d in decisions if not d.kept]
    assert found == list(UNSPACED_LEAKS.values())


def test_boilerplate_of_evaluation_and_training_flags_nothing(tmp_path: Path) -> None:
    file = tmp_path / "boxed.jsonl"
    file.write_text("".join(json.dumps({"problem": t + BOX}) + "\n" for t in EVALUATION))
    stage = Decontaminate(evaluations=({"data": str(file)},))  # type: ignore[arg-type]
    decisions, _ = run(stage, [text + BOX for text in [*OTHERS, *KEPT]])
    assert [d.record.prompt for d in decisions if not d.kept] == []
    decisions, _ = run(stage, [*(text + BOX for text in OTHERS), PAIRS + BOX, PAIRS, CIRCLE])
    assert [d.kept for d in decisions[len(OTHERS) :]] == [False] * 3


def test_a_template_of_many_rows_is_no_number_swap(tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text(
        json.dumps({"prompt": "Find the remainder when 91 is divided by the number 4."})
    )
    stage = Decontaminate(evaluations=({"data": str(file)},))  # type: ignore[arg-type]
    sums = [f"Find the remainder when {n} is divided by the number 7." for n in range(100, 140)]
    assert all(d.kept for d in run(stage, sums)[0])
    assert [d.reason for d in run(stage, sums[:1])[0]] == ["number_swap"]


@pytest.mark.parametrize(
    ("prompt", "answer", "found"),
    [
        ("What is 2 + 2? Answer: 4", "4", True),
        ("The answer is \\boxed{4.0}. What is 2 + 2?", "4", True),
        ("What is 2 + 2? [ans: 4]", "4", True),
        ("What is 2 + 2?\n#### 4", "#### 4", True),
        ("Is 3 right? Give the answer: yes or no", "yes", False),
        ("Write Answer: $Answer. What is 2 + 2?", "4", False),
        ("The answer is 5 more than what?", "4", False),
        ("1 + 3? Answer: 4\n5 + 5? Answer: 10\n2 + 2? Answer:", "4", False),
    ],
)
def test_a_prompt_that_states_its_answer(
    stage: Decontaminate, prompt: str, answer: str, found: bool
) -> None:
    decision = run(stage, [(prompt, answer)])[0][0]
    assert decision.reason == ("answer_in_prompt" if found else "")


def test_rules_can_be_turned_off(stage: Decontaminate) -> None:
    off = stage.model_copy(update={"number_swaps": False, "paraphrases": False, "answers": False})
    decisions, _ = run(off, [*OTHERS, *LEAKS, ("1 + 1? Answer: 2", "2")])
    assert [d.reason for d in decisions[-4:]] == ["", "", "", ""]


def test_chat_messages_and_missing_columns(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    message = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": EGGS}]
    chat.write_text(json.dumps({"messages": message}))
    stage = Decontaminate(evaluations=({"data": str(chat)},))  # type: ignore[arg-type]
    assert [d.reason for d in run(stage, [EGGS])[0]] == ["same_text"]
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"aufgabe": EGGS}))
    with pytest.raises(UserError, match=r"other\.jsonl:1.*aufgabe.*prompt_field"):
        run(Decontaminate(evaluations=({"data": str(other)},)), [EGGS])  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"absent\.jsonl"):
        absent = tmp_path / "absent.jsonl"
        run(Decontaminate(evaluations=({"data": str(absent)},)), [EGGS])  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="evaluations"):
        Decontaminate(evaluations=())


@pytest.mark.parametrize("form", ["parts", "image", "empty", "json", "sharegpt"])
def test_messages_of_an_evaluation_have_the_forms_of_those_of_rows(
    tmp_path: Path, form: str
) -> None:
    made = {
        "parts": [{"role": "user", "content": [{"type": "text", "text": EGGS}]}],
        "image": [{"role": "user", "content": [{"type": "image"}, {"text": EGGS}]}],
        "empty": [{"role": "user", "content": None}, {"role": "user", "content": EGGS}],
        "json": json.dumps([{"role": "user", "content": EGGS}]),
        "sharegpt": [{"from": "human", "value": EGGS}],
    }
    chat = write_lines(tmp_path / "chat.jsonl", [{"prompt": made[form]}])
    stage = Decontaminate(evaluations=({"data": str(chat)},))  # type: ignore[arg-type]
    assert [d.reason for d in run(stage, [EGGS])[0]] == ["same_text"]


def test_an_evaluation_is_a_folder_and_a_change_of_its_files_runs_the_stage_again(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "evaluation"
    folder.mkdir()
    question = "How many sheep are left on the meadow if nine of the twenty run into the wood?"
    write_lines(folder / "train.jsonl", [{"problem": "Another text"}])
    write_lines(folder / "test-0.jsonl", [{"problem": "Something else that nobody asks here"}])
    rows = [{"question": text, "answer": "1"} for text in (question, "What is 1 + 1?")]
    stages = '[[stages]]\nkind = "decontaminate"\n'
    stages += f'evaluations = [{{ data = "{folder}", name = "sheep" }}]\n'
    source = source_text(write_lines(tmp_path / "a.jsonl", rows))
    recipe = write_recipe(tmp_path, source, stages=stages)
    assert curate(recipe) == 0
    assert len(read_rows(tmp_path / "out" / "train.jsonl")) == 2
    write_lines(folder / "test-0.jsonl", [{"problem": question}])
    assert curate(recipe) == 0
    (left,) = read_rows(tmp_path / "out" / "train.jsonl")
    assert left["prompt"] == "What is 1 + 1?"


def test_prompts_of_an_evaluation_are_found_in_replies_and_on_both_sides_of_a_comparison(
    stage: Decontaminate,
) -> None:
    ask = "Make up a problem for my class."
    rows = [(ask, EGGS), (ask, f"Fine.\n\nHere it is: {FAIR}"), (ask, "2 + 2?"), (ask, "")]
    decisions, health = run(stage, rows)
    assert [d.reason for d in decisions] == ["n_gram", "n_gram", "", ""]
    assert decisions[0].note.endswith("in a reply") and health.value == 0.5
    without = stage.model_copy(update={"replies": False})
    assert all(d.kept for d in run(without, rows)[0])


@pytest.mark.parametrize("column", ["question_content", "problem_statement"])
def test_columns_of_code_benchmarks_are_known(tmp_path: Path, column: str) -> None:
    (tmp_path / "e.jsonl").write_text(json.dumps({column: EGGS, "input": "x"}))
    made = Decontaminate(evaluations=({"data": str(tmp_path / "e.jsonl")},))  # type: ignore[arg-type]
    assert [d.reason for d in run(made, [EGGS])[0]] == ["same_text"]
