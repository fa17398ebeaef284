"""Every task of a run has an id of its own, whichever list or file it comes from."""

import json
from pathlib import Path

import pytest

from sixfold.data.sources import load_tasks
from sixfold.data.task_set import (
    TaskSet,
    apart_from_heldout,
    drawn_tasks,
    few_tasks_notes,
    given_tasks,
)
from sixfold.errors import UserError
from sixfold.recipe.schema import DataConfig
from sixfold.types import Task


def tasks(*ids: str, prompt: str = "train {}") -> list[Task]:
    return [Task(i, prompt.format(i)) for i in ids]


def ids(found: list[Task]) -> list[str]:
    return [task.id for task in found]


def test_held_out_ids_that_are_also_training_ids_are_renamed() -> None:
    made = TaskSet(tasks("0", "1", "2"), tasks("0", "7", prompt="test {}"))
    assert (ids(made.train), ids(made.heldout)) == (["0", "1", "2"], ["heldout/0", "heldout/7"])
    assert [task.prompt for task in made.heldout] == ["test 0", "test 7"]
    again = TaskSet(tasks("0", "heldout/0"), tasks("0"))  # the new id is taken too
    assert ids(again.heldout) == ["heldout/heldout/0"]


def test_ids_that_do_not_collide_stay() -> None:
    train, heldout = tasks("a", "b"), tasks("c")
    made = TaskSet(train, heldout)
    assert made.train is train and made.heldout is heldout


def test_an_id_that_repeats_within_a_list_is_refused() -> None:
    for train, heldout, message in (
        (("a", "b", "a"), (), "'a': training tasks 0 and 2"),
        (("a",), ("b", "b"), "'b': held-out tasks 0 and 1"),
    ):
        with pytest.raises(UserError, match=message):
            TaskSet(tasks(*train), tasks(*heldout))


def test_files_that_both_count_from_0(tmp_path: Path) -> None:
    for name in ("train", "test"):
        rows = [{"id": n, "question": f"{name} {n}?", "answer": n} for n in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    data = DataConfig(
        source=str(tmp_path / "train.jsonl"), heldout_split=str(tmp_path / "test.jsonl")
    )
    made = load_tasks(data, seed=0, rewards=("math",))
    assert ids(made.train) == list("01234") and ids(made.heldout) == [
        f"heldout/{n}" for n in range(5)
    ]


def test_tasks_from_python_are_checked() -> None:
    with pytest.raises(UserError, match=r"tasks\[1\] is of type dict: give sixfold.Task"):
        given_tasks([Task("0", "?"), {"prompt": "?"}], [])
    with pytest.raises(UserError, match=r"heldout\[0\] has an empty prompt"):
        given_tasks(tasks("0"), [Task("1", "")])
    for bad, message in (
        (Task("0", "?", 10**5000), "'answer' holds an integer of more than 4,300 digits"),
        (Task("0", "?", "\ud800"), "surrogate"),
    ):
        with pytest.raises(UserError, match=rf"tasks\[0\]: .*{message}"):
            given_tasks([bad], [])
    with pytest.raises(UserError, match="tasks is empty"):
        given_tasks([], tasks("0"))
    numbered = given_tasks((Task(n, f"{n}?") for n in range(2)), [Task(0, "x?")])  # type: ignore[arg-type]
    assert (
        ids(numbered.train) == ["0", "1"]
        and ids(numbered.heldout) == ["heldout/0"]
        and not numbered.notes
    )
    shared = given_tasks(tasks("0", "1"), [Task("9", "train 1"), Task("8", "new")])
    assert shared.notes == [
        "1 of 2 held-out prompts are also trained on: held-out figures will be too high"
    ]


def test_sampled_rows_come_from_the_whole_list_in_any_order() -> None:
    """Files are often sorted: the first tasks stand for nothing."""
    many = tasks(*(f"{n:04}" for n in range(1000)))
    drawn = drawn_tasks(many, 100, seed=0)
    assert drawn == drawn_tasks(many[::-1], 100, seed=0) and len(set(ids(drawn))) == 100
    assert 400 < sum(int(t.id) for t in drawn) / 100 < 600
    assert drawn_tasks(many, 40, seed=0) == drawn[:40] != drawn_tasks(many, 40, seed=1)
    assert drawn_tasks(many, 0, seed=0) == many and len(drawn_tasks(many, 5000, seed=0)) == 1000


def test_fewer_tasks_than_a_step_asks_for_are_said() -> None:
    assert few_tasks_notes(TaskSet(tasks("0", "1", "2"), []), 3) == []
    assert few_tasks_notes(TaskSet(tasks("0", "1", "2"), []), 4) == [
        "rollout.prompts_per_step = 4, but there are only 3 training tasks: every step trains on"
        " all of them"
    ]
    mixed = TaskSet(
        [Task(n, "?", source=n[0]) for n in ("a0", "a1", "b0", "b1", "b2")],
        [],
        weights={"a": 1, "b": 1},
    )
    assert few_tasks_notes(mixed, 4) == []
    (note,) = few_tasks_notes(mixed, 6)
    assert "'a' has 2 training tasks and a share of 3.0" in note


def test_a_held_out_prompt_is_found_in_every_form() -> None:
    user, reply = {"role": "user", "content": "1+1= "}, {"role": "assistant", "content": "2"}
    system, more = {"role": "system", "content": "Add."}, {"role": "user", "content": "And 2+2?"}
    held = [Task("text", "1+1="), Task("chat", ({"role": "user", "content": "3+3="},), world="7")]
    train = [
        Task("text", " 1+1="),
        Task("chat", (user,)),
        Task("reply", (system, user, reply)),
        Task("turns", (user, reply, more, reply)),
        Task("other", (more, reply)),
        Task("longer", (user, more, reply)),
        Task("world", "3+3="),
        Task("same world", "3+3=", world="7"),
    ]
    kept = [task.id for task in apart_from_heldout(train, held)]
    assert kept == ["other", "longer", "world"]


def test_shared_demonstrations_are_no_held_out_prompt() -> None:
    shown = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"})

    def asked(name: str, *more: str) -> Task:
        said = tuple({"role": "user", "content": text} for text in more)
        return Task(name, (*shown, *said))

    train = [asked("a", "2+2?"), asked("b", "3+3?"), Task("c", "1+1?"), asked("d", "4+4?", "5+5?")]
    assert apart_from_heldout(train, [asked("held", "3+3?")]) == [train[0], *train[2:]]
    # A conversation is left out that answers it in a later reply.
    reply = {"role": "assistant", "content": "6"}
    later = Task("later", (*asked("b", "3+3?").prompt, reply, *asked("e", "7?").prompt[2:], reply))
    assert apart_from_heldout([later], [asked("held", "3+3?")]) == []
