"""Remedies against reward models that drift: what recipes with them are refused."""

from __future__ import annotations

import pytest

from sixfold.errors import UserError
from sixfold.recipe.plan import make_plan
from sixfold.recipe.toml import parse_recipe

SOURCES = """
[data]
whole_steps = true
[[data.sources]]
source = "arithmetic"
name = "a"
[[data.sources]]
source = "arithmetic"
name = "b"
"""


@pytest.mark.parametrize(
    "settings, named",
    [
        ("rollout.staleness = 1", r"rollout.staleness = 1 mixes groups.*algorithm.whiten"),
        (
            "rollout.max_failures = 2\nenvironment.error_budget = 1.0",
            r"rollout.max_failures = 2 mixes",
        ),
        ("replay.share = 0.5\nalgorithm.correction = 'decoupled'", r"replay.share = 0.5 mixes"),
    ],
)
def test_groups_of_other_steps_are_refused_in_whole_steps(settings: str, named: str) -> None:
    make_plan(parse_recipe(SOURCES, "r.toml"))
    with pytest.raises(UserError, match=named):
        make_plan(parse_recipe(settings + SOURCES, "r.toml"))


def test_one_source_has_nothing_to_keep_apart() -> None:
    with pytest.raises(UserError, match=r"whole_steps keeps several sources apart"):
        parse_recipe("data.whole_steps = true", "r.toml")


def test_a_bound_of_a_reward_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"reward_model.limit = 2.0 has no effect without a reward"):
        parse_recipe("environment.reward_model.limit = 2.0", "r.toml")
