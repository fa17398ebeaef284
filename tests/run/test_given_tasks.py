"""Tasks that enter from Python: what is sampled and graded is what was given."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import sixfold
from sixfold.data.task_set import drawn_tasks, given_tasks
from sixfold.errors import UserError
from sixfold.files.folder import RunFolder
from sixfold.recipe.toml import load_recipe, parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.run.assemble import assemble
from sixfold.run.start import train_run
from sixfold.types import Task

from .processes import TINY, metrics, tiny_recipe


def test_held_out_tasks_get_their_own_prompts_and_noise_whatever_their_ids(tmp_path: Path) -> None:
    train = [Task(str(n), f"{n}+1=", n + 1) for n in range(3)]
    heldout = [Task(str(n), f"{n}+5=", n + 5) for n in range(3)]
    recipe = parse_recipe('run.name = "r"', "test", tiny_recipe(tmp_path, eval__temperature=1.0))
    assembly = assemble(
        recipe, reward=lambda completion, task: 0.0, tasks=given_tasks(train, heldout)
    )
    try:
        assembly.renderer.encode(assembly.tasks.train[0])
        groups = assembly.sample(assembly.evaluator(), assembly.tasks.heldout, seed=0, scored=True)
        assert (
            len({t.id for t in [*assembly.tasks.train, *assembly.tasks.heldout]}) == 6
        )  # noise is keyed by id
        for group, given in zip(groups, heldout, strict=True):
            (sampled,) = group.trajectories
            assert (
                assembly.renderer.shown(sampled.tokens[: sampled.prompt_length])
                == f"<|user|>{given.prompt}<|assistant|>"
            )
            assert group.task.answer == given.answer
    finally:
        assembly.close()


def test_held_out_tasks_without_training_tasks_are_refused() -> None:
    with pytest.raises(UserError, match="heldout is given without tasks"):
        sixfold.train(heldout=[Task("0", "?")])


@pytest.mark.slow
def test_subsets_are_drawn_by_seed_and_stay_the_same(tmp_path: Path) -> None:
    """Sorted lists: pre-flight and evaluations between steps do not take their beginning."""
    train = [Task(f"t{n:03}", f"{n}+1=", n + 1) for n in range(100)]
    heldout = [Task(f"h{n:03}", f"{n}+5=", n + 5) for n in range(40)]
    seen: list[str] = []

    def reward(completion: str, task: Task) -> float:
        seen.append(task.id)
        return float(len(seen) % 2)

    settings = {
        **TINY,
        "run.dir": str(tmp_path),
        "sft.steps": 0,
        "environment.preflight": 8,
        "run.steps": 2,
        "eval.every": 1,
        "eval.tasks": 10,
    }
    sixfold.train(tasks=train, heldout=heldout, reward=reward, settings=settings)
    evaluated = Counter(i for i in seen if i.startswith("h"))
    subset = {
        i for i, times in evaluated.items() if times == 4
    }  # before, after, and between steps twice
    assert len(evaluated) == 40 and subset == {t.id for t in drawn_tasks(heldout, 10, seed=0)} != {
        t.id for t in heldout[:10]
    }
    first = list(dict.fromkeys(i for i in seen if i.startswith("t")))
    assert {t.id for t in drawn_tasks(train, 2, seed=0)} <= set(first[:20]) and "t000" not in first[
        :2
    ]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_mixture_resumes_bit_for_bit(tmp_path: Path) -> None:
    for name, count in (("one", 9), ("two", 20)):
        rows = [{"question": f"{n}+{len(name)}=", "answer": n + 3} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "".join(
        f"[[data.sources]]\nsource = '{tmp_path / name}.jsonl'\nname = '{name}'\nweight = {w}\n"
        for name, w in (("one", 3), ("two", 1))
    )
    flags = tiny_recipe(tmp_path, sft__steps=0, data__heldout=4, rollout__prompts_per_step=3)
    for name, steps in (("whole", 4), ("halved", 2)):
        assert (
            train_run(
                parse_recipe(text, "test", [*flags, f"--run.name={name}", f"--run.steps={steps}"])
            )
            == 0
        )
    run = tmp_path / "halved"
    assert train_run(load_recipe(str(run / "recipe.toml"), ["--run.steps=4"]), resume=run) == 0
    assert metrics(run) == metrics(tmp_path / "whole")
    records = [r for step in range(1, 5) for r in read_rollouts(RunFolder(run).rollout_file(step))]
    asked = {
        (r["task_id"], number // 12): r["source"] for number, r in enumerate(records)
    }  # 3 tasks x 4 samples a step
    assert Counter(asked.values()) == {"one": 9, "two": 3}
    assert all(i.startswith(source) for (i, _), source in asked.items())


@pytest.mark.slow
def test_a_reward_that_rises_in_training_alone_is_called_out(tmp_path: Path) -> None:
    """From the third step on, held-out tasks are not solved any more."""
    train = [Task(f"t{n:03}", f"{n}+1=", n + 1) for n in range(20)]
    heldout = [Task(f"h{n:03}", f"{n}+5=", n + 5) for n in range(20)]
    checks = [0]

    def reward(completion: str, task: Task) -> float:
        if task.id.startswith("h"):
            return float(checks[0] < 48)
        checks[0] += 1
        return checks[0] / 1000

    settings = {
        **TINY,
        "run.name": "r",
        "run.dir": str(tmp_path),
        "sft.steps": 0,
        "run.steps": 4,
        "eval.every": 2,
        "eval.tasks": 20,
    }
    sixfold.train(tasks=train, heldout=heldout, reward=reward, settings=settings)
    run = tmp_path / "r"
    found = {m["step"]: m.get("heldout/diverged") for m in metrics(run)}
    assert found == {1: None, 2: None, 3: None, 4: 1.0}
    notes = [json.loads(line) for line in (run / "notes.jsonl").read_text().splitlines()]
    (said,) = [n for n in notes if "held-out accuracy fell by 100.0 points" in n["text"]]
    assert said["warning"] and said["step"] == 4 and "since step 2" in said["text"]
    assert "fell while the reward rose" in (run / "report.html").read_text(encoding="utf-8")
