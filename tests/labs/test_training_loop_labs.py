"""The loop's phases (lesson 7) and the tool mask (lesson 8)."""

from __future__ import annotations

import pytest

from sixfold.environment.calculator import calculate
from sixfold_labs.catalogue import find
from sixfold_labs.controller_roles import controller_step
from sixfold_labs.controller_steps import EQUAL, MIXED, recorded_step
from sixfold_labs.tool_mask import PARTS, example

CONTROLLER, MASK = find("controller"), find("tool-mask")


@pytest.mark.parametrize("responses", [MIXED, EQUAL])
def test_recorded_step_is_that_of_the_real_controller(responses: tuple[str, ...]) -> None:
    real, recorded = controller_step(responses), recorded_step(responses)
    assert recorded.phases == real.phases
    assert recorded.rewards == real.rewards
    assert recorded.batch == real.batch
    assert recorded.advantages == pytest.approx(real.advantages, abs=1e-5)


def test_a_step_fills_in_one_column_per_role() -> None:
    known = []
    for clicks in range(9):
        row = CONTROLLER(clicks=clicks).tables[1].rows[0]
        known.append(sum(cell is not None for cell in row))
    assert known == [0, 2, 3, 3, 4, 5, 5, 5, 5]
    assert CONTROLLER(clicks=8).tables[1].rows == [
        ("12#", -2.3, 1.0, -2.0, pytest.approx(1.41, abs=5e-3)),
        ("11#", -2.1, 0.0, -2.0, pytest.approx(-0.71, abs=5e-3)),
        ("14#", -1.9, 0.0, -2.0, pytest.approx(-0.71, abs=5e-3)),
    ]


@pytest.mark.parametrize("source", ["formula", "library"])
@pytest.mark.parametrize(
    ("clicks", "phase", "step", "sampled", "updates", "syncs"),
    [
        (0, "idle", 0, 0, 0, 0),
        (1, "rollout", 1, 3, 0, 0),
        (6, "trainer", 1, 3, 1, 0),
        (7, "sync", 1, 3, 1, 1),
        (8, "log", 1, 3, 1, 1),
        (9, "rollout", 2, 6, 1, 1),
        (24, "log", 3, 9, 3, 3),
    ],
)
def test_phase_and_counters(
    source: str, clicks: int, phase: str, step: int, sampled: int, updates: int, syncs: int
) -> None:
    outcome = CONTROLLER(clicks=clicks, source=source)
    names = ("phase", "step", "trajectories_sampled", "optimizer_steps", "weight_syncs")
    assert [outcome.values[name] for name in names] == [phase, step, sampled, updates, syncs]
    working = [name for name, now in outcome.tables[0].rows if now]
    assert working == ([phase] if clicks else [])


def test_the_mask_leaves_49_of_55_tokens() -> None:
    masked, unmasked = MASK(mask=True).values, MASK(mask=False).values
    assert (masked["tokens_scored"], unmasked["tokens_scored"]) == (49, 55)
    assert [masked[f"{who}_tokens"] for who in ("prompt", "policy", "tool")] == [13, 49, 6]
    assert masked["expected_learning"] != unmasked["expected_learning"]


def test_the_mask_is_that_of_the_trajectory() -> None:
    trajectory = example()
    assert trajectory.sampled_length == MASK(mask=True).values["tokens_scored"]
    for turn in trajectory.turns:
        assert "".join(map(chr, trajectory.tokens[turn.start : turn.stop])).endswith("#")


def test_the_tool_result_is_what_the_calculator_returns() -> None:
    call = PARTS[1][1].partition("c(")[2].partition(")")[0]
    assert PARTS[2][1] == f"={calculate(call)}#"


def test_the_real_episode_masks_the_same_tokens() -> None:
    masked, unmasked = MASK(source="library"), MASK(mask=False, source="library")
    # The call ends at its bracket, and the end-of-sequence token takes the place of the last "#".
    assert (masked.values["tokens_scored"], unmasked.values["tokens_scored"]) == (48, 54)
    assert [row[0] for row in masked.tables[0].rows] == ["prompt", "policy", "tool", "policy"]
    assert masked.tables[0].rows[2][1:] == ("=1368#", 6, False)
    assert masked.tables[0].rows[1][1:] == ("let me compute c(123+456+789)", 29, True)
