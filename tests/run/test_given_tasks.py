"""Tasks that enter from Python: what is sampled and graded is what was given."""

from __future__ import annotations

from pathlib import Path

import pytest

import sixfold
from sixfold.assembly import build_world
from sixfold.data.task_set import given_tasks
from sixfold.errors import UserError
from sixfold.evaluation.evaluate import evaluate
from sixfold.recipe_io import parse_recipe
from sixfold.types import Task

from .processes import tiny_recipe


def test_held_out_tasks_get_their_own_prompts_and_noise_whatever_their_ids(tmp_path: Path) -> None:
    train = [Task(str(n), f"{n}+1=", n + 1) for n in range(3)]
    heldout = [Task(str(n), f"{n}+5=", n + 5) for n in range(3)]
    recipe = parse_recipe('run.name = "r"', "test", tiny_recipe(tmp_path, eval__temperature=1.0))
    world = build_world(recipe, reward=lambda completion, task: 0.0, tasks=given_tasks(train, heldout))
    try:
        world.codec.encode(world.tasks.train[0])
        groups = evaluate(world.evaluator(), world.environment, world.tasks.heldout, seed=0).groups
        assert len({t.id for t in [*world.tasks.train, *world.tasks.heldout]}) == 6  # noise is keyed by id
        for group, given in zip(groups, heldout, strict=True):
            (sampled,) = group.trajectories
            assert world.codec.shown(sampled.tokens[: sampled.prompt_length]) == f"<|user|>{given.prompt}<|assistant|>"
            assert group.task.answer == given.answer
    finally:
        world.close()


def test_held_out_tasks_without_training_tasks_are_refused() -> None:
    with pytest.raises(UserError, match="heldout is given without tasks"):
        sixfold.train(heldout=[Task("0", "?")])
