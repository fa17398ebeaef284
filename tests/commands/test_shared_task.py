"""The small task that compares algorithms: its sums, its loop, which is reproducible bit for bit,
and the output of `sixfold algorithms NAME --try`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sixfold.algorithm.zoo import ZOO
from sixfold.cli import main
from sixfold.commands import shared_task
from sixfold.commands.shared_task import (
    DOTS,
    GUESSED,
    HELDOUT,
    MISS,
    SUMS,
    SharedTask,
    make_base,
    make_teacher,
    shared_recipe,
    shared_tasks,
)
from sixfold.environment.arithmetic import arithmetic_reward
from sixfold.types import Task


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, as `assemble` does, and restore the number afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def small() -> Iterator[None]:
    """Few sums and samples: encoding 5050 prompts takes longer than three steps."""
    rollout = shared_task.ROLLOUT.model_copy(
        update={"prompts_per_step": 4, "samples_per_prompt": 4}
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SUMS": 400, "HELDOUT": 60, "ROLLOUT": rollout}.items():
            patch.setattr(shared_task, name, value)
        yield


@pytest.fixture
def few() -> Iterator[None]:
    with small():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model that has hardly learned the form of answers, and its teacher."""
    folder = tmp_path_factory.mktemp("models")
    with small():
        make_base(folder / "base", seed=0, steps=12)
        make_teacher(folder / "teacher", folder / "base", seed=0, steps=4)
    return folder


def even(completion: str, task: Task) -> float:
    """A reward with different values within groups of a hardly trained model."""
    return float(len(completion) % 2 == 0)


def task_of(name: str, models: Path) -> SharedTask:
    teacher = str(models / "teacher") if ZOO[name].needs_teacher else ""
    return SharedTask(
        shared_recipe(name, steps=3, base=str(models / "base"), teacher=teacher), reward=even
    )


def weights(task: SharedTask) -> list[torch.Tensor]:
    return [p.detach().clone() for p in task.world.policy.model.parameters()]


@pytest.mark.nightly
@pytest.mark.usefixtures("few")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo", "opd"])  # every kind of helper
def test_three_steps_update_the_weights_and_come_out_the_same_twice(
    name: str, models: Path
) -> None:
    ends = []
    for _ in range(2):
        task = task_of(name, models)
        before, rewards = weights(task), []
        for _, (groups, metrics) in zip(range(3), task.steps(), strict=False):
            rewards.append(
                sum(even(t.text, g.task) for g in groups for t in g.trajectories)
                / sum(len(g.trajectories) for g in groups)
            )
            assert metrics["reward/mean"] == pytest.approx(rewards[-1])
        ema = rewards[0]
        for reward in rewards[1:]:
            ema = 0.9 * ema + 0.1 * reward
        assert task.ema == metrics["reward/ema"] == pytest.approx(ema)
        after = weights(task)
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert (
            task.world.engine.version == task.learners.trainer.version == 3 * ZOO[name].updates
        ), "the sampler was not told of the new weights"
        ends.append((rewards, after))
        task.close()
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


def test_no_sum_is_trained_on_and_held_out_whatever_the_order_of_its_terms() -> None:
    tasks = shared_tasks(0)
    train, heldout = (
        {tuple(sorted(t.prompt_text.removesuffix("=").split("+"))) for t in half}
        for half in (tasks.train, tasks.heldout)
    )
    assert len(heldout) == HELDOUT >= 500 and len(train) == SUMS - HELDOUT
    assert not train & heldout


@pytest.mark.slow
def test_demonstrations_work_out_what_has_no_carry_and_guess_most_of_the_rest() -> None:
    """Worked: the columns' sums are right, so the answer is. Guessed: dots and a number within MISS
    of the answer.
    """
    form = re.compile(r"(?P<work>(?:[0-9+]+=[0-9]+;)*)(?P<dots>\.*)#(?P<answer>[0-9]+)")
    guesses, carries, dots = 0, 0, set()
    for task in shared_tasks(3).train:
        a, b = (int(n) for n in str(task.prompt)[:-1].split("+"))
        found = form.fullmatch(str(task.trace))
        assert found
        dots.add(len(found["dots"]))
        carry = a % 10 + b % 10 >= 10 or a // 10 + b // 10 + (a % 10 + b % 10) // 10 >= 10
        carries += carry
        if found["work"]:
            assert int(found["answer"]) == a + b
            columns = [column.split("=") for column in found["work"].split(";")[:-1]]
            assert all(sum(map(int, terms.split("+"))) == int(total) for terms, total in columns)
        else:
            guesses += 1
            assert carry and abs(int(found["answer"]) - (a + b)) <= MISS
    assert dots == set(range(DOTS + 1))
    assert guesses / carries == pytest.approx(GUESSED, abs=0.03)
    assert all(";" in str(t.trace) for t in shared_tasks(3, guessed=0.0).train)


@pytest.mark.usefixtures("few")
@pytest.mark.slow
def test_heldout_accuracy_is_exact_whatever_the_reward_of_training(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of("grpo", models)
    groups = task.world.sample(task.world.prober(), task.world.tasks.heldout, seed=0)
    assert (
        task.accuracy().mean
        == sum(arithmetic_reward(g.trajectories[0].text, g.task) for g in groups)
        / shared_task.HELDOUT
    )
    monkeypatch.setattr(shared_task, "arithmetic_reward", even)
    assert (
        task.accuracy().mean
        == sum(even(g.trajectories[0].text, g.task) for g in groups) / shared_task.HELDOUT
        > 0.1
    )
    task.close()


@pytest.mark.mostly_nightly(1)
@pytest.mark.usefixtures("few")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "opd"])
def test_a_try_prints_the_steps_and_accuracy_before_and_after(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_task, "EVAL_EVERY", 2)
    monkeypatch.setattr(shared_task, "TEACHER_STEPS", 2)
    flags = ["--steps", "2", "--sft-steps", "3", "--seed", "1"]
    assert main(["algorithms", name, "--try", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{name} on sums") and ("teacher" in "".join(lines)) == (
        name == "opd"
    )
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split()[1] for line in steps] == ["1", "2"]
    assert all(
        re.search(r"reward 0\.\d{3}  ema 0\.\d{3} .* entropy [\dn].* length +\d", line)
        for line in steps
    )
    assert [" held-out " in line for line in steps] == [False, True]
    assert re.fullmatch(
        r"held-out accuracy [\d.]+% \([\d.]+% to [\d.]+%\) -> [\d.]+% \([\d.]+% to [\d.]+%\),"
        r" greedy, .*",
        lines[-1],
    )


def test_a_try_needs_one_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["grpo", "--convert", "trl"]):
        assert main(["algorithms", *words, "--try"]) == 2
        assert "--try needs a NAME" in capsys.readouterr().err
    assert main(["algorithms", "grpo", "--sft-steps", "3"]) == 2
    assert "--sft-steps needs --try" in capsys.readouterr().err
