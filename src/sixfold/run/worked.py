"""Worked solutions of tasks as training examples, and the trainer that imitates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from ..errors import UserError
from ..recipe.schema import (
    PreferenceConfig,
    PretrainConfig,
    PrmConfig,
    RewardModelConfig,
    SftConfig,
    TrainerConfig,
)
from ..rollout.worked_episode import worked_episodes
from ..trainer.logprobs import Root
from ..trainer.neftune import EmbeddingNoise
from ..trainer.packing import PackedRow
from ..trainer.sft import example
from ..trainer.trainer import Trainer
from ..types import Group, Task
from .assemble import Assembly

OptimizerSettings = PretrainConfig | SftConfig | PreferenceConfig | RewardModelConfig | PrmConfig
"""Section of a stage that trains on examples."""


def solved_tasks(tasks: Sequence[Task]) -> list[Task]:
    """Tasks with a solution to imitate: a trace, or otherwise the answer."""
    return [task for task in tasks if task.trace or task.answer is not None]


def training_tasks(assembly: Assembly) -> list[Task]:
    """Training tasks with a solution.

    Raises:
        UserError: if there are none.
    """
    tasks = solved_tasks(assembly.tasks.train)
    if not tasks:
        raise UserError(
            "sft.steps > 0, but no task has a worked solution or an answer: set"
            " data.trace_field to a column of solutions, or sft.steps = 0"
        )
    return tasks


def worked_groups(assembly: Assembly, tasks: Sequence[Task]) -> list[Group]:
    """The solution of each task as a trajectory, as the environment and the renderer make it."""
    if assembly.player.environment:
        played = assembly.loop.run(worked_episodes(assembly.player, tasks))
        return [Group(task, [one]) for task, one in zip(tasks, played, strict=True)]
    renderer = assembly.renderer
    return [example(task, renderer.encode(task), renderer.solution(task)) for task in tasks]


def stage_trainer_config(trainer: TrainerConfig, own: OptimizerSettings) -> TrainerConfig:
    """Settings of the trainer in a stage that has a learning rate of its own."""
    return trainer.model_copy(
        update={
            "learning_rate": own.learning_rate,
            "warmup_steps": own.warmup_steps,
            "weight_decay": own.weight_decay,
            "schedule": own.schedule,
        }
    )


def supervised_trainer(
    assembly: Assembly,
    config: TrainerConfig,
    steps: int,
    neftune_alpha: float = 0.0,
    frozen: Callable[[PackedRow], Tensor] | None = None,
    other: Root | None = None,
) -> Trainer:
    """Trainer of the policy, or of another model, on given texts.

    They were not sampled from the policy, so it trains at temperature 1 and not the rollout's.

    Args:
        assembly: the policy and its settings.
        config: settings of the trainer.
        steps: length of the learning-rate schedule.
        neftune_alpha: scale of the noise on the embeddings. 0: none.
        frozen: as for `Trainer`.
        other: model that is trained in place of the policy.
    """
    root, seed = assembly.root(), assembly.recipe.run.seed
    trainer = Trainer(
        other or root,
        config,
        replace(assembly.scoring, temperature=1.0),
        steps,
        frozen=frozen,
        seed=seed,
        ranks=assembly.data_ranks,
    )
    if neftune_alpha:
        root.noise = EmbeddingNoise(neftune_alpha, seed, lambda: trainer.steps)
    return trainer
