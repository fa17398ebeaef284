"""Shared benchmark task for all algorithms: sums of two numbers, a tiny model, SFT, then RL.

    sixfold algorithms grpo --try --steps 60

The model starts from random weights. A run takes about a minute on one CPU thread.

The SFT demonstrations are of mixed quality. A sum without a carry is worked out in columns. A sum
with a carry is worked out sometimes, and mostly guessed. Before its answer, each demonstration
"thinks" for a random number of dots:

    21+34=    1+4=5;2+3+0=5;...#55
    27+58=    7+8=15;2+5+1=8;.....#85        or, 7 times in 10,        ..#97

So the base model can work out any sum, but mostly guesses sums with a carry. RL can learn to work
them out. The length of a completion does not affect its reward.

Held-out sums are never trained on, not even with their terms swapped. All algorithms have the same
settings, including the learning rate. Only the settings of their method differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..algorithm.zoo import ZOO
from ..batch import Batch, Metrics, number
from ..controller.loop import Controller
from ..controller.stream import TaskStream, step_seed
from ..data.task_set import TaskSet
from ..environment.arithmetic import arithmetic_reward, arithmetic_tasks
from ..evaluation.statistics import Interval, task_interval
from ..recipe.schema import (
    AlgorithmConfig,
    CriticConfig,
    ModelConfig,
    Recipe,
    ReferenceConfig,
    RolloutConfig,
    RunConfig,
    ScratchConfig,
    SftConfig,
    TrainerConfig,
)
from ..report.numbers import percent, percent_range
from ..report.rewards import reward_metrics
from ..run.assemble import assemble
from ..run.sft import SftStage
from ..run.trainable_roles import build_roles, training_collector
from ..types import Group, Task

SUMS, HELDOUT = 5050, 512
"""Number of sums of two numbers below 100, and how many of them are held out."""

GUESSED, MISS, DOTS = 0.7, 20, 8
"""Share of carries that demonstrations guess, largest error of a guess, most dots of an answer."""

SFT_STEPS, TEACHER_STEPS = 500, 150
STEPS, EVAL_EVERY = 60, 10

MODEL = ScratchConfig(
    alphabet="0123456789+=;.#",
    hidden_size=64,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    context=64,
)
ROLLOUT = RolloutConfig(prompts_per_step=16, samples_per_prompt=8, max_new_tokens=40)


def shared_tasks(seed: int, guessed: float = GUESSED) -> TaskSet:
    """Training sums, each with a demonstration, and held-out sums.

    Args:
        seed: seed of the tasks and demonstrations.
        guessed: share of the carries that are guessed.
    """
    rng = random.Random(f"demonstrations/{seed}")
    tasks = [
        replace(t, trace=_demonstration(t, guessed, rng), source="sums")
        for t in arithmetic_tasks(SUMS, terms=2, digits=2, seed=seed)
    ]
    return TaskSet(tasks[HELDOUT:], tasks[:HELDOUT])


def shared_recipe(
    name: str,
    *,
    seed: int = 0,
    steps: int = STEPS,
    base: str = "",
    teacher: str = "",
    **changes: Any,
) -> Recipe:
    """Recipe of an algorithm on the shared task.

    Args:
        name: name of the algorithm.
        seed: seed of the run.
        steps: RL steps.
        base: folder of the model after SFT. Empty: start from random weights.
        teacher: folder of the teacher, or "".
        changes: settings of [algorithm], such as `clip_high=0.2`.
    """
    return Recipe(
        run=RunConfig(name=name, seed=seed, steps=steps, threads=1, device="cpu"),
        model=ModelConfig(path=base, scratch=MODEL),
        rollout=ROLLOUT,
        algorithm=AlgorithmConfig(name=name, **changes),
        critic=CriticConfig(learning_rate=1e-3),
        reference=ReferenceConfig(path=teacher),
        trainer=TrainerConfig(learning_rate=1e-4, warmup_steps=5),
        sft=SftConfig(steps=SFT_STEPS, learning_rate=2e-3),
    )


def make_base(
    folder: Path,
    seed: int,
    steps: int = SFT_STEPS,
    on_step: Callable[[Metrics], None] = lambda metrics: None,
) -> None:
    """Train a model on the demonstrations from random weights.

    Args:
        folder: where the model is saved.
        seed: seed of the tasks and of training.
        steps: SFT steps.
        on_step: called with the metrics of each step.
    """
    _sft(shared_recipe("grpo", seed=seed), shared_tasks(seed), folder, steps, on_step)


def make_teacher(
    folder: Path,
    base: Path,
    seed: int,
    steps: int = TEACHER_STEPS,
    on_step: Callable[[Metrics], None] = lambda metrics: None,
) -> None:
    """Train the base further, on demonstrations that work out every sum.

    Args:
        folder: where the teacher is saved.
        base: folder of the base model.
        seed: seed of the tasks and of training.
        steps: SFT steps.
        on_step: called with the metrics of each step.
    """
    _sft(
        shared_recipe("grpo", seed=seed, base=str(base)),
        shared_tasks(seed, guessed=0.0),
        folder,
        steps,
        on_step,
    )


class SharedTask:
    """Run of one algorithm on the shared task.

    Args:
        recipe: recipe of the run.
        reward: reward for training. The held-out accuracy always uses the exact reward.

    Raises:
        UserError: if the recipe cannot work, for example without a needed teacher.
    """

    def __init__(
        self, recipe: Recipe, reward: Callable[[str, Task], float] = arithmetic_reward
    ) -> None:
        self.recipe = recipe
        self.world = assemble(recipe, reward=reward, tasks=shared_tasks(recipe.run.seed))
        self.learners = build_roles(self.world)
        self.ema: float | None = None

    def accuracy(self) -> Interval:
        """Share of held-out sums that the policy solves greedily, with its 95 % interval."""
        groups = self.world.sample(self.world.prober(), self.world.tasks.heldout, seed=0)
        return task_interval(
            [
                [arithmetic_reward(t.text, group.task) for t in group.trajectories]
                for group in groups
            ]
        )

    def steps(self) -> Iterator[tuple[Sequence[Group], Metrics]]:
        """Run RL steps for as long as the caller iterates.

        Yields:
            The groups and metrics of each step, including `reward/ema`.
        """
        seed, made = self.recipe.run.seed, []

        def log(step: int, groups: Sequence[Group], batch: Batch, metrics: Metrics) -> None:
            metrics |= reward_metrics(groups)
            mean = number(metrics, "reward/mean")
            self.ema = mean if self.ema is None else 0.9 * self.ema + 0.1 * mean
            made.append((groups, metrics | {"reward/ema": self.ema}))

        controller = Controller(
            collector=training_collector(self.world, self.learners.method),
            reference=self.learners.scorers,
            algorithm=self.learners.algorithm,
            trainer=self.learners.trainer,
            sync=self.world.sync,
            tasks=TaskStream(self.world.tasks.train, self.recipe.rollout.prompts_per_step, seed),
            seed=lambda step: step_seed(seed, step),
            log=log,
        )
        while True:
            controller.step()
            yield made.pop()

    def close(self) -> None:
        """Close the world."""
        self.world.close()


def try_algorithm(
    name: str, *, steps: int = STEPS, sft_steps: int = SFT_STEPS, seed: int = 0
) -> None:
    """Run an algorithm on the shared task with its own settings, and print the progress.

    Args:
        name: name of the algorithm.
        steps: RL steps.
        sft_steps: SFT steps before them.
        seed: seed of everything.
    """
    with TemporaryDirectory() as folder:
        base, teacher = Path(folder, "base"), Path(folder, "teacher")
        print(
            f"{name} on sums of two numbers below 100. First {sft_steps} steps of SFT, about"
            " half a minute",
            flush=True,
        )
        make_base(base, seed, sft_steps, _say_sft)
        if ZOO[name].needs_teacher:
            print(
                f"{name} needs a teacher: {TEACHER_STEPS} more steps of SFT, with every sum"
                " worked out",
                flush=True,
            )
            make_teacher(teacher, base, seed, TEACHER_STEPS, _say_sft)
        path = str(teacher) if ZOO[name].needs_teacher else ""
        recipe = shared_recipe(name, seed=seed, steps=steps, base=str(base), teacher=path)
        _train(SharedTask(recipe))


def _train(task: SharedTask) -> None:
    """Run and print as many RL steps as the recipe says."""
    before = task.accuracy()
    for step, (_, metrics) in zip(range(1, task.recipe.run.steps + 1), task.steps(), strict=False):
        line = (
            f"step {step:3d}  reward {metrics['reward/mean']:.3f}  ema {task.ema:.3f}"
            f" {'#' * round(20 * (task.ema or 0)):20}"
        )
        line += (
            f"  entropy {metrics.get('train/entropy', float('nan')):.3f}  length"
            f" {metrics['rollout/length_mean']:4.1f}"
        )
        print(
            line
            + (f"  held-out {percent(task.accuracy().mean)}" if step % EVAL_EVERY == 0 else ""),
            flush=True,
        )
    print(
        f"held-out accuracy {_with_interval(before)} -> {_with_interval(task.accuracy())}, greedy,"
        f" {HELDOUT} sums, 95% intervals",
        flush=True,
    )
    task.close()


def _sft(
    recipe: Recipe, tasks: TaskSet, folder: Path, steps: int, on_step: Callable[[Metrics], None]
) -> None:
    """Train the recipe's model on the tasks with SFT, and save it to `folder`."""
    recipe = recipe.model_copy(update={"sft": recipe.sft.model_copy(update={"steps": steps})})
    world = assemble(recipe, reward=arithmetic_reward, tasks=tasks)
    SftStage(world, on_step).run()
    world.policy.save(folder)
    world.close()


def _demonstration(task: Task, guessed: float, rng: random.Random) -> str:
    """Worked trace or guess, with dots before the answer."""
    work, _, answer = str(task.trace).rpartition("#")
    dots = "." * rng.randint(0, DOTS)
    left, right = (int(number) for number in task.prompt_text.removesuffix("=").split("+"))
    carries = left % 10 + right % 10 > 9 or left + right > 99
    if carries and rng.random() < guessed:
        return f"{dots}#{max(0, int(answer) + rng.randint(-MISS, MISS))}"
    return f"{work}{dots}#{answer}"


def _say_sft(metrics: Metrics) -> None:
    if int(number(metrics, "step")) % 50 == 0:
        print(f"SFT step {metrics['step']:.0f}  loss {metrics['train/loss']:.3f}", flush=True)


def _with_interval(interval: Interval) -> str:
    return f"{percent(interval.mean)} ({percent_range(interval.low, interval.high)})"
