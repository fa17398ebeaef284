"""Worked solutions of tasks as examples: what is held out, and what is too long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sixfold.data.task_set import TaskSet
from sixfold.errors import UserError
from sixfold.recipe.schema import Recipe
from sixfold.stages.examples import TaskExamples
from sixfold.types import Task


class Renderer:
    """A token per character."""

    def encode(self, task: Task) -> list[int]:
        return [ord(c) for c in task.prompt_text]

    def solution(self, task: Task) -> list[int]:
        return [ord(c) for c in str(task.worked)]


def examples(train: list[Task], heldout: list[Task], **settings: Any) -> TaskExamples:
    recipe = Recipe().with_settings({k.replace("__", "."): v for k, v in settings.items()})
    assembly: Any = SimpleNamespace(
        recipe=recipe,
        tasks=TaskSet(train, heldout),
        renderer=Renderer(),
        player=SimpleNamespace(environment=None),
        policy=SimpleNamespace(context=12),
    )
    return TaskExamples(assembly)


def ids(groups: Any) -> list[str]:
    return sorted(group.task.id for group in groups)


HELD = [
    Task("worked", "1+1=", answer="2", trace="1+1=2"),
    Task("answer", "1+2=", answer="3"),
    Task("list", "1+3=", answer=["4"]),
    Task("none", "1+4="),
]


def test_held_out_solutions_are_of_the_form_of_the_trained_ones() -> None:
    """The loss on a bare answer says nothing of a model that writes solutions."""
    assert ids(examples([Task("t", "?", answer="2", trace="so 2")], HELD).heldout) == ["worked"]
    assert ids(examples([Task("t", "?", answer="2")], HELD).heldout) == ["answer", "worked"]


def test_a_solution_that_does_not_fit_is_refused_or_left_out() -> None:
    train = [Task("short", "?" * 4, answer="2" * 8), Task("long", "?" * 4, answer="2" * 9)]
    with pytest.raises(UserError, match=r"task long: .* have 13 tokens, but only 12 fit"):
        examples(train, [])
    dropped = examples(train, [], data__overlong="drop", sft__examples_per_step=1)
    assert [ids(dropped.groups(step)) for step in (1, 2, 3)] == [["short"]] * 3
    assert dropped.notes == [
        "1 training tasks have solutions of more than 12 tokens and are left out"
    ]
    other = [Task("other", "!" * 4, answer="2" * 8), Task("longer", "!" * 4, answer="2" * 9)]
    assert ids(examples(train[:1], other).heldout) == ["other"]
    with pytest.raises(UserError, match="no training task has a solution that fits"):
        examples(train, [], data__overlong="drop", sft__max_tokens=11)
