"""A dump gives every trajectory back, and a damaged one is refused in one line."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sixfold.errors import UserError
from sixfold.report.page import render_page
from sixfold.report.rollouts import dumped_steps, read_rollouts, write_rollouts
from sixfold.report.token_view import TOKENS_SHOWN, trajectories
from sixfold.types import Group, Kept, Reward, Task, Trajectory, Turn


def group(logp: float = -0.5) -> Group:
    task = Task(
        id="t1",
        prompt=({"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2="}),
        answer=4,
        source="sums",
    )
    trajectories = [
        Trajectory.one_turn(
            "t1",
            k,
            [7, 8],
            [9 + k],
            [logp],
            [5],
            "stop",
            text="4",
            reward=Reward(1.0 - k, {"c": 1.0}),
        )
        for k in range(2)
    ]
    return Group(task, trajectories)


def test_round_trip(tmp_path: Path) -> None:
    path, written = tmp_path / "step-000003.jsonl.zst", group()
    write_rollouts(path, [written], [[0.5, [0.0, 0.0, -0.5]]], decode=lambda token: f"<{token}>")
    records = read_rollouts(path)
    assert [Trajectory.from_record(record) for record in records] == written.trajectories
    assert [record["advantage"] for record in records] == [0.5, [0.0, 0.0, -0.5]]
    assert [record["pieces"] for record in records] == [
        ["<7>", "<8>", "<9>"],
        ["<7>", "<8>", "<10>"],
    ]
    assert {(record["prompt"], record["answer"], record["source"]) for record in records} == {
        ("2+2=", 4, "sums")
    }


def episode(**fields: Any) -> Trajectory:
    """Two replies with a tool call between them; the second was sampled by newer weights."""
    return Trajectory(
        "t1",
        0,
        [7, 8, 9, 5, 6, 9, 9],
        "ppsotss",
        [0.0, 0.0, -0.5, 0.0, 0.0, -0.25, -1.0],
        [-1, -1, 4, -1, -1, 5, 5],
        (Turn(2, 3, 0.5, tool_errors=1), Turn(5, 7)),
        **{"reward": Reward(None, error="timed out"), "environment": "calculator", **fields},
    )


def test_a_dump_says_what_happened_in_an_episode(tmp_path: Path) -> None:
    """Tokens with their origin and version, turns, events, rewards, outcome and times."""
    call = {"kind": "tool_call", "name": "add", "arguments": {"a": 1}, "error": "no b"}
    written = episode(events=(call, {"kind": "reset"}), started=1e9, ended=1e9 + 2)
    lines = [Group(Task("t1", "?"), [written])]
    write_rollouts(tmp_path / "d", lines, [[0.5]], trained_version=6, reference_version=3)
    (record,) = read_rollouts(tmp_path / "d")
    assert Trajectory.from_record(record) == written
    expected = {
        "policy_version": 4,
        "stale_by_versions": 2,
        "reference_version": 3,
        "provenance": "ppsotss",
        "events": [call, {"kind": "reset"}],
        "environment": "calculator",
        "sampled_length": 3,
        "outcome": "ended",
        "finish_reason": "stop",
        "started": 1e9,
        "ended": 1e9 + 2,
    }
    assert {key: record[key] for key in expected} == expected
    assert record["reward"]["error"] == "timed out" and record["turns"][0]["reward"] == 0.5


def test_versions_are_null_where_there_are_none(tmp_path: Path) -> None:
    empty = Trajectory.one_turn("t1", 0, [7], [], [], [], "error", reward=Reward(None))
    write_rollouts(tmp_path / "d", [Group(Task("t1", "?"), [empty])], [[0.0]], trained_version=6)
    (record,) = read_rollouts(tmp_path / "d")
    names = ("policy_version", "stale_by_versions", "reference_version")
    assert [record[name] for name in names] == [None, None, None]


def test_the_page_shows_turns_their_rewards_and_who_wrote_a_token(tmp_path: Path) -> None:
    call = {"kind": "tool_call"}
    rows = [episode(events=(call, call), outcome="turns"), group().trajectories[0]]
    write_rollouts(tmp_path / "d", [Group(Task("t1", "?"), rows)], [[0.5, 0.0]])
    several, one = trajectories(3, read_rollouts(tmp_path / "d")).groups[0].samples
    assert [(part.label, part.about) for part in several.parts] == [
        ("turn 1", "reward +0.5 · 1 tokens · stop · failed tool calls: 1"),
        ("environment", ""),
        ("turn 2", "2 tokens · stop"),
    ]
    assert [[token.style for token in part.tokens] for part in several.parts] == [
        ["a4 p1"],
        ["grey observed", "grey template"],
        ["a4 p1", "a4 p2"],
    ]
    # These events do not say which reply they follow.
    assert [(e.label, e.text) for e in several.events] == [("tool call", "()")] * 2
    facts = several.about.split(" · ")
    for fact in ("3 tokens", "2 turns", "2 tool calls, 1 failed", "outcome turns"):
        assert fact in facts
    assert "environment calculator" in facts
    assert [(part.label, part.about, part.events) for part in one.parts] == [("", "", [])]
    assert not any(word in one.about for word in ("turn", "tool", "outcome", "environment"))


def test_what_truncated_sampling_kept_is_dumped_read_back_and_shown(tmp_path: Path) -> None:
    written = group()
    for trajectory in written.trajectories:
        trajectory.kept = Kept(
            array("i", [3, trajectory.tokens[-1]]), array("i", [2]), array("d", [0.75])
        )
    write_rollouts(tmp_path / "d", [written], [[0.5, -0.5]])
    records = read_rollouts(tmp_path / "d")
    assert [Trajectory.from_record(record) for record in records] == written.trajectories
    tips = [t.tip for s in trajectories(3, records).groups[0].samples for t in s.parts[0].tokens]
    assert any("one of 2 kept (p 0.75)" in tip for tip in tips)
    raw = json.dumps({**records[0], "kept": {**records[0]["kept"], "ids": [2**40, 9]}})
    (tmp_path / "d").write_bytes(zstandard.ZstdCompressor().compress(raw.encode()))
    with pytest.raises(UserError, match="line 1 is not a trajectory"):
        read_rollouts(tmp_path / "d")


def test_without_decode_there_are_no_pieces(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "d", [group()], [[0.0, 0.0]])
    assert all("pieces" not in record for record in read_rollouts(tmp_path / "d"))


def test_a_log_prob_that_is_not_finite_is_dumped_as_null(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "d", [group(logp=math.nan)], [[0.0, math.inf]])
    raw = zstandard.ZstdDecompressor().decompress((tmp_path / "d").read_bytes())
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in raw.splitlines())
    assert first["logp"] == [0.0, 0.0, None]
    assert second["advantage"] is None


def test_advantages_must_match_the_groups(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter"):
        write_rollouts(tmp_path / "d", [group()], [[0.5]])
    assert list(tmp_path.iterdir()) == []


def test_only_dumps_count_as_dumped_steps(tmp_path: Path) -> None:
    for name in (
        "step-000012.jsonl.zst",
        "step-000003.jsonl.zst",
        "step-1000000.jsonl.zst",
        ".step-000004.jsonl.zst.tmp-9",
        "notes.txt",
    ):
        (tmp_path / name).touch()
    assert dumped_steps(tmp_path) == [3, 12, 1000000]
    assert dumped_steps(tmp_path / "absent") == []


@pytest.mark.slow
def test_a_dump_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d"
    write_rollouts(path, [group()], [[0.0, 0.0]])
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match="not a readable rollout dump"):
            read_rollouts(path)


def test_json_that_is_no_trajectory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d"
    write_rollouts(path, [group()], [[0.0, 0.0]])
    good = read_rollouts(path)[0]
    for bad in (
        [],
        {},
        {**good, "provenance": "s"},
        {**good, "provenance": ["p", "p", "s"]},
        {**good, "turns": [2]},
        {**good, "turns": [{**good["turns"][0], "start": "2"}]},
        {**good, "turns": [{**good["turns"][0], "reward": "1"}]},
        {**good, "turns": [{**good["turns"][0], "tool_errors": None}]},
        {**good, "events": ["called"]},
        {**good, "reward": {"value": 1, "parts": []}},
        {**good, "tokens": "789"[:2]},
    ):
        path.write_bytes(zstandard.ZstdCompressor().compress(json.dumps(bad).encode()))
        with pytest.raises(UserError, match="line 1 is not a trajectory"):
            read_rollouts(path)


def test_a_missing_dump_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"log\.rollouts_every"):
        read_rollouts(tmp_path / "absent")


def test_the_page_shows_tool_calls_behind_their_reply(tmp_path: Path) -> None:
    """With their results and errors, escaped; at most TOKENS_SHOWN tokens of a trajectory."""
    call = {"kind": "tool_call", "tool": "add", "arguments": {"a": 1}, "seconds": 0.25}
    good, bad = {**call, "result": "<b>"}, {**call, "error": "type", "message": "no b"}
    turns = (Turn(2, 3, 0.5, tool_errors=1, events=2), Turn(5, 7))
    rows = [episode(events=({"kind": "reset", "seed": 3}, good, bad))]
    rows[0].turns = turns
    write_rollouts(tmp_path / "d", [Group(Task("t1", "?"), rows)], [[0.5]])
    view = trajectories(3, read_rollouts(tmp_path / "d"))
    ((first, between, last), events) = (lambda s: (s.parts, s.events))(view.groups[0].samples[0])
    assert [(e.text, e.failed) for e in first.events] == [
        ('add({"a": 1}) in 0.25 s → <b>', False),
        ('add({"a": 1}) failed in 0.25 s: type: no b', True),
    ]
    assert not between.events and not last.events
    assert [(e.label, e.text) for e in events] == [("reset", '{"seed": 3}')]
    page = render_page("trajectories.html", steps=[view])
    assert "→ &lt;b&gt;" in page and "<b>" not in page.replace("<b>turn", "").replace("<b>env", "")
    long = rows[0].to_record() | {"prompt": "?", "advantage": 0.5}
    n = TOKENS_SHOWN + 9
    long |= {"tokens": [1] * n, "provenance": "p" + "s" * (n - 4) + "ots", "logp": [0.0] * n}
    long |= {"version": [0] * n, "turns": [asdict(Turn(1, n - 3)), asdict(Turn(n - 1, n))]}
    shown = trajectories(3, [long | {"events": []}]).groups[0].samples[0].parts
    assert [(len(part.tokens), part.more) for part in shown] == [
        (TOKENS_SHOWN, 5),
        (0, 2),
        (0, 1),
    ]


def test_an_error_of_a_damaged_dump_is_short(tmp_path: Path) -> None:
    path = tmp_path / "step-000001.jsonl.zst"
    for content in (b"[" * 100_000, b"9" * 5000, b'{"task": "' + b"x" * 5000 + b'"}'):
        path.write_bytes(zstandard.ZstdCompressor().compress(content))
        with pytest.raises(UserError) as raised:
            read_rollouts(path)
        assert len(str(raised.value)) < 600
