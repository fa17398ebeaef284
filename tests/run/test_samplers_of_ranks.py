"""Several ranks, each with samplers of its own, train as ranks that sample themselves do."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sixfold.backends.samplers import Samplers
from tests.agents.test_train import FUNCTION
from tests.rank_runs import train_on_ranks
from tests.run.processes import tiny_recipe
from tests.run.test_several_ranks import METHODS, curve, same, trained, weights

APART: dict[str, Any] = {"placement__kind": "processes"}
OF_ENGINE = {"rollout/preemptions", "rollout/recomputed_tokens", "sync/cast_bytes"}
"""Metrics that only one of the two has."""


def learned(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in OF_ENGINE} for line in curve(run)]


def kill_a_sampler(rank: int) -> None:
    """On rank 1, kill the sampler of the fifth request, before that is sent."""
    generate, asked = Samplers.generate, 0

    async def killing(self: Samplers, *given: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        if rank == 1 and asked == 5:
            process: Any = self.places[0].process
            os.kill(process.child.pid, signal.SIGKILL)
        return await generate(self, *given, **more)

    Samplers.generate = killing  # type: ignore[method-assign]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_samplers_of_ranks_change_nothing(name: str, tmp_path: Path) -> None:
    """Not even if one of them dies. R-189."""
    settings = {**METHODS[name], "model__scratch__head_dim": 16}
    here = trained(tmp_path, "here", 2, **settings)
    flags = tiny_recipe(tmp_path, **{"run__steps": 3, **settings, **APART}, run__name="apart")
    run = train_on_ranks(2, ["train", "demo", *flags], tmp_path / "errors", kill_a_sampler)
    assert run.codes() == [0, 0], run.errors()
    assert "It is replaced" in run.errors()
    assert learned(tmp_path / "apart") == learned(here)
    left, right = weights(tmp_path / "apart", 3), weights(here, 3)
    assert left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)


@pytest.mark.nightly
def test_an_adapter_is_merged_for_the_samplers_of_ranks(tmp_path: Path) -> None:
    """Equal, up to rounding, to ranks whose engines compute the adapter beside its base."""
    found = {}
    settings = {**METHODS["lora, reference with an adapter"], "model__scratch__head_dim": 16}
    for name, more in (("here", {}), ("apart", APART)):
        flags = tiny_recipe(tmp_path, **{"run__steps": 3, **settings, **more}, run__name=name)
        run = train_on_ranks(2, ["train", "demo", *flags], tmp_path / "errors")
        assert run.codes() == [0, 0], run.errors()
        found[name] = learned(tmp_path / name)
    same(found["apart"], found["here"])
    left, right = weights(tmp_path / "apart", 3), weights(tmp_path / "here", 3)
    assert left.keys() == right.keys()
    assert all((left[key] - right[key]).abs().max() < 1e-5 for key in left)


AHEAD: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"algorithm__name": "dapo"},
    "remax": {"algorithm__name": "remax"},
    "curriculum": {"data__curriculum__every": 1, "eval__every": 2},
    "agent": {"environment__agent__command": "talks.py:agent", "rollout__max_turns": 3},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", AHEAD)
def test_ranks_that_sample_ahead_train_every_group_once(name: str, tmp_path: Path) -> None:
    """With unequal shares. R-190. Dynamic sampling skips groups, and the others none. A replay on
    as many ranks has the same weights.
    """
    (tmp_path / "talks.py").write_text(FUNCTION)
    ahead = {"rollout__staleness": 1, "rollout__prompts_per_step": 5, "run__steps": 3}
    ahead["model__scratch__head_dim"] = 16  # with smaller heads, bits depend on what runs beside
    flags = tiny_recipe(tmp_path, **ahead, **AHEAD[name], **APART, run__name="run")
    run = train_on_ranks(2, ["train", "demo", *flags], tmp_path / "errors")
    assert run.codes() == [0, 0], run.errors()
    file = tmp_path / "run" / "schedule.jsonl"
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    numbers = [[group["number"] for group in step["groups"]] for step in steps]
    trained = sorted(n for step in numbers for n in step)
    assert trained == list(range(15)) or (name == "dapo" and len({*trained}) == 15)
    assert ("rollout/greedy_reward" in curve(tmp_path / "run")[0]) == (name == "remax")
    assert all(step["ranks"] == 2 for step in steps)
    assert [[n % 5 % 2 for n in step].count(0) for step in numbers] == [3, 3, 3]
    if name in ("curriculum", "agent"):
        return  # their schedules do not say all
    again = ["train", "--replay-schedule", str(tmp_path / "run")]
    replay = train_on_ranks(2, again, tmp_path / "replay")
    assert replay.codes() == [0, 0], replay.errors()
    assert "replayed: step-000003 has the weights of" in replay.errors()
    assert (tmp_path / "run-replay" / "schedule.jsonl").read_text() == file.read_text()
