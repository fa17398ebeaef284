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

from sixfold.types import (
    FinishReason,
    Group,
    Kept,
    Outcome,
    Reward,
    SamplingParams,
    Task,
    Trajectory,
    Turn,
)
from tests.made_trajectories import turns_of

WHOLE = Trajectory.one_turn(
    "t",
    2,
    [5, 6],
    [7, 8],
    [-0.5, -0.25],
    [3, 4],
    "stop",
    text="ab",
    seconds=0.5,
    reward=Reward(0.75, {"correct": 1.0, "format": -0.25}, None, 0.01),
)
EPISODE = Trajectory(
    task_id="t",
    sample=0,
    tokens=list(range(9)),
    provenance="ppsstosso",
    logp=[0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -1.0, -2.0, 0.0],
    version=[-1, -1, 3, 4, -1, -1, 5, 5, -1],
    turns=(Turn(2, 4, 0.5, seconds=0.25, tool_errors=1), Turn(6, 8, 0.0, "length", 0.5)),
    outcome="length",
    text="ab=3;cd",
    reward=Reward(0.75, steps=((2, -0.25),)),
    environment="calculator",
    events=({"kind": "tool_call", "arguments": {"text": "1+2"}},),
    started=1e9,
    ended=1e9 + 3,
)


def test_streams_of_one_turn() -> None:
    assert (WHOLE.tokens, WHOLE.provenance) == ([5, 6, 7, 8], "ppss")
    assert (WHOLE.logp, WHOLE.version) == ([0.0, 0.0, -0.5, -0.25], [-1, -1, 3, 4])
    assert WHOLE.turns == (Turn(2, 4, seconds=0.5),)
    assert WHOLE.mask == [False, False, True, True]
    assert (WHOLE.prompt_length, WHOLE.sampled_length, WHOLE.seconds) == (2, 2, 0.5)


def test_derived_values_of_two_turns() -> None:
    """Lengths and the mask count what was sampled; times are those of sampling."""
    assert EPISODE.mask == [c == "s" for c in "ppsstosso"]
    assert (EPISODE.prompt_length, EPISODE.sampled_length, EPISODE.seconds) == (2, 4, 0.75)
    assert EPISODE.step_rewards == ((3, 0.5), (2, -0.25))
    assert EPISODE.total_reward == 0.75 + 0.5 - 0.25
    assert replace(EPISODE, reward=Reward(None)).total_reward is None
    assert replace(EPISODE, reward=None).total_reward is None
    assert replace(EPISODE, reward=Reward(0.0), turns=WHOLE_TURNS).total_reward == 0.0


WHOLE_TURNS = (Turn(2, 4), Turn(6, 8))


@pytest.mark.parametrize(
    ("outcome", "last", "finish_reason", "truncated"),
    [
        ("ended", "stop", "stop", False),
        ("ended", "length", "length", True),
        ("length", "length", "length", True),
        ("turns", "stop", "stop", True),
        ("context", "stop", "stop", True),
        ("timeout", "stop", "error", False),
        ("error", "length", "error", False),
        ("aborted", "stop", "aborted", False),
    ],
)
def test_how_an_episode_ended(
    outcome: Outcome, last: FinishReason, finish_reason: FinishReason, truncated: bool
) -> None:
    """The end of the last reply, a limit, and a failure of the environment differ."""
    t = replace(EPISODE, outcome=outcome, turns=(Turn(2, 4), Turn(6, 8, finish_reason=last)))
    assert (t.finish_reason, t.truncated) == (finish_reason, truncated)


@pytest.mark.parametrize("reason", ["stop", "length", "aborted", "error"])
def test_one_turn_keeps_its_finish_reason(reason: FinishReason) -> None:
    t = Trajectory.one_turn("t", 0, [1], [2], [-1.0], [0], reason)
    assert (t.finish_reason, t.truncated) == (reason, reason == "length")


@pytest.mark.parametrize("provenance", ["", "ssss", "opss", "ppsx", "psps", "pSss"])
def test_provenance_begins_with_the_prompt_and_knows_four_letters(provenance: str) -> None:
    n = len(provenance)
    with pytest.raises(ValueError, match="provenance"):
        Trajectory("t", 0, [1] * n, provenance, [0.0] * n, [-1] * n, turns_of(provenance))


@pytest.mark.parametrize(
    "turns",
    [
        (),
        (Turn(2, 4),),
        (Turn(2, 5), Turn(6, 8)),
        (Turn(1, 4), Turn(6, 8)),
        (Turn(6, 8), Turn(2, 4)),
        (Turn(2, 4), Turn(3, 4), Turn(6, 8)),
        (Turn(2, 4), Turn(6, 9)),
        (Turn(2, 4), Turn(6, 12)),
        (Turn(2, 4), Turn(6, 8), Turn(8, 7)),
        (Turn(-7, 4), Turn(6, 8)),
        (Turn(2, 4), Turn(6, 8), Turn(9, 9, reward=1.0)),
    ],
)
def test_turns_lie_in_order_and_cover_exactly_the_sampled_tokens(turns: tuple[Turn, ...]) -> None:
    with pytest.raises(ValueError, match="turn"):
        replace(EPISODE, turns=turns)


def test_a_reply_may_be_empty_or_cut_by_another() -> None:
    for turns in ((Turn(2, 3), Turn(3, 4), Turn(6, 8)), (*EPISODE.turns, Turn(9, 9))):
        assert replace(EPISODE, turns=turns).turns == turns


@pytest.mark.parametrize("stream", ["provenance", "logp", "version"])
def test_streams_of_unlike_length_are_refused_by_name(stream: str) -> None:
    short = getattr(WHOLE, stream)[:-1]
    with pytest.raises(ValueError, match=f"'{stream}': 3"):
        replace(WHOLE, **{stream: short})


def test_a_prompt_alone_is_a_trajectory() -> None:
    empty = Trajectory.one_turn("t", 0, [1, 2], [], [], [], "aborted")
    assert (empty.prompt_length, empty.sampled_length, empty.tokens) == (2, 0, [1, 2])


@pytest.mark.parametrize("reward", [WHOLE.reward, None, Reward(None, error="timed out")])
@pytest.mark.parametrize("whole", [WHOLE, EPISODE])
def test_a_record_survives_json(whole: Trajectory, reward: Reward | None) -> None:
    before = replace(whole, reward=reward)
    record = json.loads(json.dumps(before.to_record()))
    assert Trajectory.from_record(record) == before
    assert record["sampled_length"] == whole.sampled_length
    assert record["finish_reason"] == whole.finish_reason


def test_a_record_shares_nothing_with_its_trajectory() -> None:
    record = EPISODE.to_record()
    record["tokens"].clear(), record["events"][0].clear()
    assert len(EPISODE.tokens) == 9 and EPISODE.events[0]["kind"] == "tool_call"


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
    with pytest.raises(ValueError, match="kept sets do not match the 2 sampled tokens"):
        replace(WHOLE, kept=wrong)


def test_types_do_not_import_torch() -> None:
    code = "import sys, sixfold.types; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
