"""An environment of several turns needs no reference answers, unless the recipe names rewards."""

from __future__ import annotations

import pytest

from sixfold.recipe.toml import parse_recipe
from sixfold.run.recipe_environment import task_rewards


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ((), ("arithmetic",)),
        (("--environment.episode", "calculator"), ()),
        (("--environment.episode", "calculator", "--environment.rewards", "math"), ("math",)),
    ],
)
def test_rewards_that_check_the_tasks(flags: tuple[str, ...], names: tuple[str, ...]) -> None:
    recipe = parse_recipe('run.name = "r"', "test", list(flags))
    assert task_rewards(recipe.environment, recipe.eval.strict) == names
