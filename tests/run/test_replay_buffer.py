"""Runs that train groups again: what is replayed, resumed, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sixfold.controller.replay_buffer import ReplayBuffer
from sixfold.errors import UserError
from sixfold.recipe.plan import make_plan
from sixfold.recipe.toml import load_recipe, parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.run.start import train_run
from tests.run.processes import metrics, tiny_recipe
from tests.run.test_placement import AHEAD, SETTINGS, bits, length, run

REPLAY: dict[str, Any] = dict(
    replay__share=0.34, replay__max_age=2, algorithm__correction="decoupled",
    trainer__learning_rate=0.01, run__steps=5,
)  # fmt: skip
WITHOUT_TIME = ("seconds", "started", "ended", "turns", "step", "advantage")


def groups(folder: Path) -> list[dict[tuple[str, int], dict[str, Any]]]:
    """Trained samples of every step, by task and sample."""
    found = []
    for file in sorted(folder.glob("rollouts/*")):
        rows = [*read_rollouts(file)]
        found.append({(row["task_id"], row["sample"]): row for row in rows})
        assert len(found[-1]) == len(rows), "no two groups of a step have one prompt"
    return found


@pytest.mark.parametrize("ahead", [{}, AHEAD])
def test_new_groups_are_trained_once_and_replayed_ones_as_they_were_sampled(
    tmp_path: Path, ahead: dict[str, Any]
) -> None:
    folder = run(tmp_path, "again", **REPLAY, **ahead)
    plain = run(tmp_path, "plain", run__steps=5, algorithm__name="grpo")
    steps, lines = groups(folder), metrics(folder)
    new: list[tuple[str, int]] = []
    for step, rows in enumerate(steps):
        seen: dict[int, list[tuple[str, int]]] = {}
        for name, row in rows.items():
            # The latest step that has it: tasks may return in a later epoch with other noise.
            earlier = [
                at for at in range(max(0, step - 2), step)
                if name in steps[at] and steps[at][name]["tokens"] == row["tokens"]
                and steps[at][name]["logp"] == row["logp"]
                and steps[at][name]["version"] == row["version"]
            ]  # fmt: skip
            seen.setdefault(bool(earlier), []).append(name)
        count = 2 * 4 if step else 0
        assert len(seen.get(True, [])) == count and len(seen[False]) == 4 * 4
        assert lines[step]["replay/frac"] == (2 / 6 if step else 0)
        new += seen[False]
    assert sorted(new) == sorted(name for rows in groups(plain) for name in rows)
    weights = [line["correction/weight"] for line in lines]
    assert weights[0] == pytest.approx(1, abs=1e-6)
    assert all(abs(weight - 1) > 1e-4 for weight in weights[1:])


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path, "whole", **REPLAY)
    draw, calls = ReplayBuffer.draw, 0

    def stopping(self: ReplayBuffer, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("stopped")
        return draw(self, *given)

    monkeypatch.setattr(ReplayBuffer, "draw", stopping)
    with pytest.raises(RuntimeError, match="stopped"):
        run(tmp_path, "run", **REPLAY)
    resumed = run(tmp_path, "run", resume=True, **REPLAY)
    assert bits(resumed) == bits(whole)
    more = {**REPLAY, "replay__max_age": 1}
    with pytest.raises(UserError, match=r"replay.max_age.*the checkpoint contains the buffer"):
        run(tmp_path, "run", resume=True, **more)


@pytest.mark.nightly
def test_the_schedule_of_a_run_with_a_buffer_is_replayed(tmp_path: Path) -> None:
    ahead = run(tmp_path, "ahead", **REPLAY, **AHEAD, engine__update_kv="recomputed")
    flags = tiny_recipe(tmp_path, **{**SETTINGS, **REPLAY, **AHEAD}, engine__update_kv="recomputed")
    again = parse_recipe("run.name = 'again'", "test", flags)
    assert train_run(again, reward=length, replayed=ahead / "schedule.jsonl") == 0
    assert bits(tmp_path / "again") == bits(ahead)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            ["--replay.share=0.3"],
            r"replay.share = 0.3 .*Set algorithm.correction, e.g. 'decoupled'",
        ),
        (
            ["--replay.share=0.3", "--algorithm.correction=negative-sequence"],
            "'negative-sequence' does not weight",
        ),
        (["--replay.gamma=0.9"], r"\[replay\] has no effect with replay.share = 0"),
        (["--replay.max_age=5"], "replay.max_age.*4"),
    ],
)
def test_a_buffer_without_importance_weights_is_refused(flags: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        make_plan(load_recipe("demo", flags))
    make_plan(load_recipe("demo", ["--replay.share=0.3", "--algorithm.correction=truncated"]))
