"""Stage `stratify` on a policy whose pass rates are known exactly: one token per reply.

The probability of a right reply is the sum over right tokens, computed by transformers alone.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import pytest
from curated_rows import rows_of
from made_sets import write_lines

from sixfold.data.profile import Measurement, TaskProfile, read_profile, task_key
from sixfold.environment.pass_rate import degenerate_probability
from sixfold.errors import UserError
from sixfold.model.loading import Policy
from sixfold.types import Group, Reward, Task, Trajectory, Turn
from sixfold_curation.stage import Context, Record, decided
from sixfold_curation.stratify import BLOCK, Stratify, measurement, signal

RECIPE = """
[model]
path = "{model}"

[data]
source = "unused.jsonl"

[environment]
rewards = ["{verifier}:says_one_of"]

[rollout]
max_new_tokens = 1
temperature = {temperature}

[run]
threads = 1
"""
VERIFIER = """
def says_one_of(completion, task):
    return float(len(completion) == 1 and completion in task.answer)
"""
DIGITS = "0123456789"


@pytest.fixture(scope="module")
def folder(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with peaked distributions, a verifier, and a recipe that names both."""
    import torch

    folder = tmp_path_factory.mktemp("stratify")
    model = deepcopy(policy.model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    model.save_pretrained(folder / "model")
    policy.tokenizer.save_pretrained(folder / "model")
    (folder / "verifier.py").write_text(VERIFIER)
    write_recipe(folder, 1.0)
    return folder


def write_recipe(folder: Path, temperature: float) -> Path:
    path = folder / f"train-{temperature}.toml"
    made = {"model": folder / "model", "verifier": folder / "verifier.py"}
    path.write_text(RECIPE.format(**made, temperature=temperature))
    return path


def context(folder: Path, temperature: float = 1.0) -> Context:
    return Context(recipe=str(write_recipe(folder, temperature)))


def sums(count: int, answers: Callable[[int], str]) -> list[Record]:
    return rows_of(
        [{"prompt": f"{n // 10}{n % 10}+{n % 7}=", "answer": answers(n)} for n in range(count)]
    )


def exact_rates(folder: Path, rows: list[Record]) -> list[float]:
    """Probability of a right reply, by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    found = []
    for row in rows:
        turns = [{"role": "user", "content": row.prompt}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(str(text), add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            chances = model(ids.input_ids).logits[0, -1].double().softmax(-1)
        right = tokenizer.convert_tokens_to_ids([*row.answer])
        found.append(float(chances[right].sum()))
    return found


@pytest.mark.nightly
@pytest.mark.slow
def test_signal_of_real_rollouts_is_that_of_the_formulas(folder: Path, tmp_path: Path) -> None:
    """E[A^2] = p (1 - p), and p^K + (1 - p)^K of the groups are wasted, at the exact p."""
    tokens = "0123456789+-*/=()#.; abcdefghijklmnopqrstuvwxyz"
    rows = sums(400, lambda n: tokens[: 4 * (n % 10) + 1])
    stage = Stratify(hard_until=0, easy_from=1, profiles=str(tmp_path))  # one round of 8 for all
    decisions, health = decided(stage, rows, context(folder))
    exact = exact_rates(folder, rows)
    assert min(exact) < 0.1 and max(exact) > 0.5, "the policy must be informative"
    powers = [p * (1 - p) for p in exact]
    wasted = [degenerate_probability(p, 8) for p in exact]
    # Variance of the sample variance of K values: mu4 / K - sigma^4 (K - 3) / (K (K - 1)).
    power_spread = [v * (1 - 3 * v) / 8 - v * v * 5 / 56 for v in powers]
    found = health.figures["signal"]
    for value, exactly, spread in (
        (mean([float(d.record.fields["pass_rate"]) for d in decisions]), exact,
         [v / 8 for v in powers]),
        (found["E[A^2], measured"], powers, power_spread),
        (found["wasted groups, measured"], wasted, [w * (1 - w) for w in wasted]),
    ):  # fmt: skip
        assert abs(value - mean(exactly)) < 3 * math.sqrt(sum(spread)) / 400
    assert found["p (1 - p)"] == pytest.approx(found["E[A^2], measured"])
    assert found["p^K + (1 - p)^K"] > found["wasted groups, measured"]


def test_signal_by_hand() -> None:
    """Groups 1100, 1111 and 2000 (a reward of 2): variances 1/3, 0 and 1."""
    made = [
        Measurement("a", "a", 0, 2, (1.0, 1.0, 0.0, 0.0)),
        Measurement("b", "b", 0, 4, (1.0, 1.0, 1.0, 1.0)),
        Measurement("c", "c", 0, 1, (2.0, 0.0, 0.0, 0.0)),
        Measurement("d", "d", 0, 1, (1.0,), failed=3),
    ]
    found = signal([TaskProfile((one,)) for one in made])
    assert found["E[A^2], measured"] == pytest.approx((1 / 3 + 0 + 1) / 3)
    # 4/3 of 1/4, 0 and 3/16.
    assert found["p (1 - p)"] == pytest.approx((1 / 3 + 0 + 1 / 4) / 3)
    assert found["wasted groups, measured"] == pytest.approx(1 / 3)
    assert found["p^K + (1 - p)^K"] == pytest.approx((2 / 16 + 1 + (1 + 81) / 256) / 3)
    assert signal([]) == {}


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Rows, decisions, health and profile of one whole stage. Row 90 repeats row 0; row 91 has its
    prompt and another answer; row 92 is too long, row 93 has no prompt, row 94 is always solved.
    """
    work = tmp_path_factory.mktemp("work")
    rows = sums(90, lambda n: DIGITS[: n % 10 + 1] if n % 3 else "!")
    more = [
        {"prompt": rows[0].prompt, "answer": rows[0].answer, "id": "again"},
        {"prompt": rows[0].prompt, "answer": DIGITS, "id": "other"},
        {"prompt": "1+" * 200, "answer": "1", "id": "long"},
        {"prompt": " ", "answer": "1", "id": "empty"},
    ]
    rows = [*rows, *rows_of(more)]
    return rows, *decided(Stratify(profiles=str(work)), rows, context(folder)), next(work.iterdir())


@pytest.mark.nightly
def test_buckets_by_the_stored_counts(made: tuple[Any, ...]) -> None:
    rows, decisions, health, path = made
    profile = read_profile(path)
    buckets: Counter[str] = Counter()
    for row, decision in zip(rows[:92], decisions, strict=False):
        known = profile.tasks[task_key(Task("any", row.prompt, row.answer))]
        n, solved = known.samples, known.solved
        assert known.prompt_tokens == len(row.prompt) + 2
        rate, votes = solved / n, known.rival[1]
        bucket = {(0, 64): "held_hard", (64, 64): "easy"}.get((solved, n), "train")
        if bucket == "held_hard" and votes >= 40:  # Wilson's lower end is above 1/2
            bucket = "held_conflict"
        assert bucket != "train" or 0 < solved < n
        buckets[bucket] += 1
        assert decision.reason == ("" if bucket == "train" else bucket)
        assert decision.kept == (bucket == "train")
        assert f"{solved} of {n} rollouts" in decision.note
        assert solved or not votes or f"{votes} rollouts answer" in decision.note
        assert decision.record.fields["pass_rate"] == rate
    assert buckets["train"] and buckets["held_hard"]
    again = decisions[90].kept  # a second row of the first task
    reasons = [one.reason for one in decisions[92:]]
    assert reasons == ["too_long", "unreadable"]
    figures = health.figures
    assert figures["buckets"] == {**buckets, "too_long": 1, "unreadable": 1}
    assert sum(figures["pass rates"].values()) == 92
    pool = figures["pool"]
    assert (pool["all"]["tasks"], pool["kept"]["tasks"]) == (91, buckets["train"] - again)
    assert pool["kept"]["signal per 100 rollouts"] > pool["all"]["signal per 100 rollouts"]
    outside = (92 - buckets["train"]) / 92
    assert health.value == pytest.approx(outside) and bool(health.alarm) == (outside > 0.4)


def test_equal_tasks_share_rollouts_and_another_answer_has_its_own(made: tuple[Any, ...]) -> None:
    rows, decisions, _, path = made
    assert decisions[90].note == decisions[0].note
    assert len(read_profile(path).tasks) == 91
    key = task_key(Task("other", rows[91].prompt, rows[91].answer))
    assert decisions[91].record.fields["pass_rate"] == read_profile(path).rate(key)


def test_every_impossible_task_is_held(made: tuple[Any, ...]) -> None:
    """No reply has the token "!": the pass rate is exactly 0."""
    rows, decisions, _, _ = made
    impossible = [d for r, d in zip(rows, decisions, strict=True) if r.answer == "!"]
    reasons = {one.reason for one in impossible}
    assert len(impossible) == 31 and reasons <= {"held_hard", "held_conflict"}


def test_other_answers_are_those_of_whole_rollouts_that_miss_the_reference() -> None:
    def rollout(text: str, solved: bool = False, end: str = "stop") -> Trajectory:
        turn = Turn(1, 2, finish_reason=end)  # type: ignore[arg-type]
        reward = Reward(float(solved), {}, solved=solved)
        return Trajectory("t", 0, [1, 2], "ps", [0, 0], [-1, 0], (turn,), text=text, reward=reward)

    texts = ["Add.\n#### 117.", "The answer is 117.0", "so 117", "no number", "answer: 1,250", ""]
    group = Group(Task("t", "?", "1250"), [rollout(text) for text in texts])
    group.trajectories += [rollout("#### 9", end="length"), rollout("right", solved=True)]
    # "1,250" is the reference in a form that the verifier refuses, and "#### 9" was cut.
    assert measurement(group, "k", 3).others == {"117": 3, "no number": 1}
    group = replace(group, task=Task("t", "?", {"tests": []}))
    assert measurement(group, "k", 3).others == {}


def test_a_reference_that_the_rollouts_contradict_is_held(
    made: tuple[Any, ...], folder: Path, tmp_path: Path
) -> None:
    """The stored rollouts of row 0, of which none solves it, get answers."""
    rows, _, _, path = made
    key = task_key(Task("any", rows[0].prompt, rows[0].answer))
    for others, reason in (({"117": 39}, "held_hard"), ({"117": 40}, "held_conflict")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        next(line for line in lines if line.get("task") == key)["others"] = others
        write_lines(tmp_path / path.name, lines)
        ((decision,), health) = decided(Stratify(profiles=str(tmp_path)), rows[:1], context(folder))
        assert (decision.reason, decision.kept) == (reason, False)
        assert decision.note.startswith("0 of 64 rollouts")
        assert f"; {others['117']} rollouts answer '117'" in decision.note
    agreed = health.figures["tasks whose rollouts agree"]
    assert agreed == {"on the reference": 0, "on another answer": 1} and health.value == 1


@pytest.mark.nightly
def test_a_kill_between_blocks_loses_none_and_changes_nothing(
    made: tuple[Any, ...], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, decisions, health, path = made
    sampled = []

    def stop(count: int) -> None:
        sampled.append(count)
        if len(sampled) == 1:
            raise KeyboardInterrupt

    start, stage = replace(context(folder), progress=stop), Stratify(profiles=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        decided(stage, rows, start)
    stored = tmp_path / path.name
    assert len(sampled) == 1 and len(read_profile(stored).tasks) == BLOCK
    stored.write_bytes(stored.read_bytes()[:-20])  # the last line is torn as well
    again, state = decided(stage, rows, start)
    assert sum(sampled) in (91, 92)  # the task of the torn line may count twice
    assert (again, state) == (decisions, health)
    assert Counter(stored.read_bytes().splitlines()) == Counter(path.read_bytes().splitlines())
    resumed, _ = decided(stage, rows, start)
    assert resumed == decisions and sum(sampled) in (91, 92)


def test_other_ids_and_another_order_use_the_stored_rollouts(
    made: tuple[Any, ...], folder: Path, tmp_path: Path
) -> None:
    rows, decisions, _, path = made
    profile = tmp_path / path.name
    profile.write_bytes(path.read_bytes())
    before = profile.read_bytes()
    some = rows_of([{"prompt": r.prompt, "answer": r.answer} for r in rows[9::-1]], "renamed")
    again, _ = decided(Stratify(profiles=str(tmp_path)), some, context(folder))
    assert profile.read_bytes() == before
    assert [one.note for one in again] == [one.note for one in decisions[9::-1]]


def test_another_temperature_has_a_file_of_its_own(
    made: tuple[Any, ...], folder: Path, tmp_path: Path
) -> None:
    rows, _, _, path = made
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    decided(Stratify(profiles=str(tmp_path)), rows[:2], context(folder, temperature=0.5))
    (other,) = (file for file in tmp_path.iterdir() if file != copy)
    assert copy.read_bytes() == path.read_bytes()
    keys = read_profile(copy).key, read_profile(other).key
    assert keys[0].difference(keys[1]) == "sampling.temperature"
    other.replace(copy)
    with pytest.raises(UserError, match=r"sampling\.temperature"):
        decided(Stratify(profiles=str(tmp_path)), rows[:2], context(folder))


def test_strata_of_length(made: tuple[Any, ...], folder: Path, tmp_path: Path) -> None:
    """Prompts have 7 tokens: two marks of turns, and five characters. Replies have one token."""
    rows, _, _, path = made
    stage = Stratify(lengths=(1, 7, 8), profiles=str(path.parent))
    decisions, health = decided(stage, rows[:10], context(folder))
    assert {one.record.fields["length_stratum"] for one in decisions} == {"8-8"}
    assert health.figures["prompt tokens"] == {"0-1": 0, "2-7": 10, "8-8": 0, "over 8": 0}
    assert health.figures["completion tokens"]["0-1"] == 10


def test_more_rollouts_are_added_to_those_that_are_there(
    made: tuple[Any, ...], folder: Path, tmp_path: Path
) -> None:
    rows, before, _, path = made
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    some = [row for row, one in zip(rows, before, strict=True) if "of 8 rollouts" in one.note][:3]
    decisions, _ = decided(Stratify(samples=12, profiles=str(tmp_path)), some, context(folder))
    assert len(some) == 3 and all("of 20 rollouts" in one.note for one in decisions)


def test_the_stage_depends_on_the_weights_and_the_verifier(folder: Path, tmp_path: Path) -> None:
    """Equal files give one version, a changed byte of one, or of the template, another."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = write_recipe(copy, 1.0)
    stage = Stratify(model=str(copy / "model"))
    versions = [stage.depends_on(Context(recipe=str(path))) for _ in range(2)]
    (copy / "verifier.py").write_text(VERIFIER + "# changed\n")
    versions.append(stage.depends_on(Context(recipe=str(path))))
    weights = copy / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    versions.append(stage.depends_on(Context(recipe=str(path))))
    (copy / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    versions.append(stage.depends_on(Context(recipe=str(path))))
    assert versions[0] == versions[1] and len(set(versions)) == 4


def test_a_model_from_scratch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text('[data]\nsource = "arithmetic"\n')
    with pytest.raises(UserError, match="runs/NAME"):
        decided(Stratify(), sums(2, str), Context(recipe=str(path)))


@pytest.mark.parametrize(
    "wrong", [{"hard_until": 0.9, "easy_from": 0.5}, {"lengths": [9, 3]}, {"lengths": [0]}]
)
def test_settings_that_leave_no_order_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"hard_until|lengths"):
        Stratify(**wrong)
