"""Several ranks, each with samplers of its own, train as ranks that sample themselves do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sixfold.backends.samplers import Samplers
from tests.rank_runs import train_on_ranks
from tests.run.processes import tiny_recipe
from tests.run.test_several_ranks import METHODS, curve, trained, weights

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


@pytest.mark.mostly_nightly(1)
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
