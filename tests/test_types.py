"""The plain-Python types: what a Trajectory refuses, and that nothing is lost on the way to disk
and back.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from array import array
from dataclasses import replace

import pytest

from sixfold.types import Group, Kept, Reward, SamplingParams, Task, Trajectory

WHOLE = Trajectory(
    task_id="t",
    sample=2,
    tokens=[5, 6, 7, 8],
    prompt_length=2,
    mask=[False, False, True, True],
    logp=[0.0, 0.0, -0.5, -0.25],
    version=[-1, -1, 3, 4],
    finish_reason="stop",
    text="ab",
    turns=[2],
    seconds=0.5,
    reward=Reward(0.75, {"correct": 1.0, "format": -0.25}, None, 0.01),
)


@pytest.mark.parametrize("stream", ["mask", "logp", "version"])
def test_streams_of_unlike_length_are_refused_by_name(stream: str) -> None:
    short = getattr(WHOLE, stream)[:-1]
    with pytest.raises(ValueError, match=f"'{stream}': 3"):
        replace(WHOLE, **{stream: short})


@pytest.mark.parametrize("prompt_length", [0, -1, 5])
def test_a_prompt_has_a_token_and_lies_inside(prompt_length: int) -> None:
    with pytest.raises(ValueError, match="prompt_length"):
        replace(WHOLE, prompt_length=prompt_length)


def test_a_prompt_token_cannot_be_sampled() -> None:
    with pytest.raises(ValueError, match="no prompt token is sampled"):
        replace(WHOLE, mask=[False, True, True, True])


def test_a_prompt_alone_is_a_trajectory() -> None:
    empty = Trajectory("t", 0, [1, 2], 2, [False] * 2, [0.0] * 2, [-1] * 2, "aborted")
    assert empty.completion_length == 0
    assert WHOLE.completion_length == 2


@pytest.mark.parametrize("reward", [WHOLE.reward, None, Reward(None, error="timed out")])
def test_a_record_survives_json(reward: Reward | None) -> None:
    before = replace(WHOLE, reward=reward)
    assert Trajectory.from_record(json.loads(json.dumps(before.to_record()))) == before


def test_group_rewards_tell_failed_from_zero() -> None:
    rewards = [Reward(0.0), Reward(None, error="x"), None]
    assert Group(Task("t", "?"), [replace(WHOLE, reward=r) for r in rewards]).rewards == [
        0.0,
        None,
        None,
    ]


def test_prompt_text_of_text_and_of_a_chat() -> None:
    chat = ({"role": "system", "content": "be short"}, {"role": "user", "content": "2+2?"})
    assert Task("t", "2+2=").prompt_text == "2+2="
    assert Task("t", chat).prompt_text == "2+2?"  # type: ignore[arg-type]


@pytest.mark.parametrize("knob", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_params_that_keep_some_tokens_from_being_drawn_say_so(knob: dict[str, float]) -> None:
    plain = SamplingParams(8, temperature=0.7, repetition_penalty=1.1)
    assert not plain.truncates and not plain.is_plain
    assert replace(plain, **knob).truncates  # type: ignore[arg-type]
    assert (
        replace(plain, repetition_penalty=1.0).is_plain
        and not replace(plain, repetition_penalty=1.0, **knob).is_plain
    )  # type: ignore[arg-type]


def kept(*sets: list[int]) -> Kept:
    made = Kept()
    for n, ids in enumerate(sets):
        made.add(array("i", ids), 0.5 + n / 8)
    return made


def test_kept_sets_survive_json_and_a_record_without_them_stays_as_it_was() -> None:
    """Mass null is how a dump writes NaN."""
    before = replace(WHOLE, kept=kept([1, 7, 9], [8]))
    record = json.loads(json.dumps(before.to_record()))
    assert record["kept"] == {"ids": [1, 7, 9, 8], "counts": [3, 1], "mass": [0.5, 0.625]}
    assert Trajectory.from_record(record) == before
    assert Trajectory.from_record({**record, "pieces": ["x"]}) == before
    assert "kept" not in WHOLE.to_record()
    broken = Trajectory.from_record({**record, "kept": {**record["kept"], "mass": [None, 0.5]}})
    assert broken.kept is not None and math.isnan(broken.kept.mass[0])


@pytest.mark.parametrize(
    "wrong",
    [
        kept([7]),
        kept([7], [8], [8]),
        Kept(array("i", [7]), array("i", [1, 1]), array("d", [1.0, 1.0])),
    ],
)
def test_kept_sets_must_match_the_sampled_tokens(wrong: Kept) -> None:
    with pytest.raises(ValueError, match="kept sets do not speak of the sampled tokens"):
        replace(WHOLE, kept=wrong)


def test_types_do_not_import_torch() -> None:
    code = "import sys, sixfold.types; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
