"""Inputs of a run, stored in its checkpoints and compared at a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..algorithm.base import Algorithm
from ..checkpoint.checkpoint import Checkpoint
from ..errors import UserError
from ..model.turn_end import TurnEnd
from ..recipe.resume_policy import settings_of
from ..recipe.schema import AgentConfig
from ..steps import own_ends_of
from ..types import Task
from .assemble import Assembly
from .fingerprint import (
    TOKENS_ALONE,
    episode_fingerprint,
    rewards_difference,
    rewards_fingerprint,
    tasks_difference,
    tasks_fingerprint,
)


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run as JSON: recipe, tasks, rewards and tokenizer.

    If the task fingerprints are equal, a step number refers to the same tasks and an accuracy to
    the same test.

    Attributes:
        settings: the recipe, by dotted key.
        tasks: fingerprint of each split.
        rewards: name of each reward and hash of its code. The last one is the environment, if it
            has several turns.
        solved: rule by which a completion counts as solved, such as "math >= 1".
        vocabulary_hash: hash of the tokenizer's vocabulary.
        own_ends: tokens and strings that end a completion for the model itself, without those of
            the recipe. Empty if the model has none.
        own_algorithm: class of an algorithm given from Python. Empty for the recipe's own.
        examples: hash of examples that the tasks do not decide. Empty if there are none.
    """

    settings: dict[str, Any]
    tasks: dict[str, dict[str, Any]]
    rewards: list[list[str]]
    solved: str
    vocabulary_hash: str
    own_ends: dict[str, list[Any]]
    own_algorithm: str = ""
    examples: str = ""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Inputs:
        """Inputs stored in a checkpoint."""
        return cls(**checkpoint.payload.inputs)


def inputs_of(
    assembly: Assembly,
    reward: Callable[..., Any] | None,
    algorithm: Algorithm | None,
    examples: str = "",
) -> Inputs:
    """Inputs of the current process.

    Args:
        assembly: recipe, tasks, tokenizer and environment.
        reward: the reward function given from Python, or None.
        algorithm: the algorithm given from Python, or None.
        examples: hash of examples that the tasks do not decide.
    """
    rewards = [reward] if reward else assembly.recipe.environment.rewards
    splits = {"training": assembly.tasks.train, "held-out": assembly.tasks.heldout}
    # The tools of an environment are part of its code, which has a fingerprint of its own.
    own_tools = assembly.recipe.environment.several_turns

    def encode(task: Task) -> list[int]:
        return assembly.renderer.encode(replace(task, tools=()) if own_tools else task)

    ends = assembly.policy.own_ends
    environment = assembly.recipe.environment
    make = assembly.player.make
    episodes = (
        [episode_fingerprint(environment.episode, make)] if assembly.player.environment else []
    )
    return Inputs(
        settings=settings_of(assembly.recipe),
        tasks={name: tasks_fingerprint(tasks, encode) for name, tasks in splits.items()},
        rewards=[
            *rewards_fingerprint(rewards, environment.reward_model),
            *episodes,
            *rewards_fingerprint(_agent_files(environment.agent)),
            *rewards_fingerprint(own_ends_of(environment.prm.ends)),
        ],
        solved=assembly.environment.solved_rule.text,
        vocabulary_hash=assembly.policy.vocabulary_hash,
        own_ends=asdict(ends) if ends else {},
        own_algorithm=type(algorithm).__qualname__ if algorithm else "",
        examples=examples,
    )


def _agent_files(agent: AgentConfig) -> list[str]:
    """Function of the agent, or the Python files of its command, as names of functions."""
    if agent.is_function:
        return [agent.command]
    return [f"{word}:agent" for word in agent.command.split() if word.endswith(".py")]


def own_ends(checkpoint: Checkpoint | None) -> TurnEnd | None:
    """Tokens and strings that ended a completion before the recipe added its own.

    Returns:
        None if there is no checkpoint, or if it does not record them.
    """
    said = Inputs.of(checkpoint).own_ends if checkpoint else {}
    return TurnEnd(tuple(said["tokens"]), tuple(said["strings"])) if said else None


def check_same(checkpoint: Checkpoint, now: Inputs, *, evaluated: bool) -> list[str]:
    """Compare the inputs of a checkpoint with the current ones.

    Args:
        checkpoint: checkpoint to resume from.
        now: current inputs.
        evaluated: whether the run has already measured held-out accuracy.

    Returns:
        One note per difference that does not prevent a resume.

    Raises:
        UserError: if the tasks, their prompt tokens, the tokenizer or the rule for solved differ.
    """
    saved = Inputs.of(checkpoint)
    for split, tasks in now.tasks.items():
        if difference := tasks_difference(saved.tasks[split], tasks):
            if TOKENS_ALONE in difference:
                raise UserError(f"{checkpoint.path}: the {split} tasks differ: {difference}")
            raise UserError(
                f"{checkpoint.path} was trained on other {split} tasks: {difference}. Restore the"
                " dataset, or start a new run"
            )
    if saved.examples != now.examples:
        raise UserError(
            f"{checkpoint.path} was trained on other examples. Restore the dataset and its"
            " settings, or start a new run"
        )
    if saved.vocabulary_hash != now.vocabulary_hash:
        raise UserError(
            f"{checkpoint.path}: the tokenizer is not the one that the run was trained with (its"
            " vocabulary differs). Restore the checkpoint's tokenizer files, or start a new run"
        )
    if evaluated and saved.solved != now.solved:
        raise UserError(
            f"{checkpoint.path}: the rule for solved has changed from {saved.solved} to"
            f" {now.solved}. Restore eval.metric, eval.solved_at and [environment], and use"
            " sixfold eval to measure checkpoints by another rule"
        )
    return [
        f"WARNING: the code of '{name}' has changed since {checkpoint.path.name}: rewards"
        " before and after cannot be compared"
        for name in rewards_difference(saved.rewards, now.rewards)
    ]
