"""A dump gives every trajectory back, and a damaged one is refused in one line."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path

import pytest
import zstandard

from sixfold.errors import UserError
from sixfold.report.rollouts import dumped_steps, read_rollouts, write_rollouts
from sixfold.report.token_view import trajectories
from sixfold.types import Group, Kept, Reward, Task, Trajectory


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


def test_what_truncated_sampling_kept_is_dumped_read_back_and_shown(tmp_path: Path) -> None:
    written = group()
    for trajectory in written.trajectories:
        trajectory.kept = Kept(
            array("i", [3, trajectory.tokens[-1]]), array("i", [2]), array("d", [0.75])
        )
    write_rollouts(tmp_path / "d", [written], [[0.5, -0.5]])
    records = read_rollouts(tmp_path / "d")
    assert [Trajectory.from_record(record) for record in records] == written.trajectories
    tips = [t.tip for s in trajectories(3, records).groups[0].samples for t in s.tokens]
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
        {**good, "turns": [{"start": "2", "stop": 3}]},
        {**good, "reward": {"value": 1, "parts": []}},
        {**good, "tokens": "789"[:2]},
    ):
        path.write_bytes(zstandard.ZstdCompressor().compress(json.dumps(bad).encode()))
        with pytest.raises(UserError, match="line 1 is not a trajectory"):
            read_rollouts(path)


def test_a_missing_dump_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"log\.rollouts_every"):
        read_rollouts(tmp_path / "absent")
