"""Tasks of environments that have no data set: a task is a seed."""

from __future__ import annotations

from sixfold.environment.episode import Observation
from sixfold.errors import UserError
from sixfold.types import Message, Task

SEEDS_PER_RUN = 1_000_000
"""Distance between the first seeds of two values of run.seed."""


def seed_task(where: str, seed: int, observation: str) -> Task:
    """The task of one seed.

    Args:
        observation: the first observation, which becomes the prompt.

    Raises:
        UserError: the observation is empty.
    """
    if not observation.strip():
        raise UserError(
            f"{where}: its first observation for seed {seed} is empty. Make `reset` return text,"
            " or give prompts in a file as data.source"
        )
    return Task(
        id=f"{where}-{seed}",
        prompt=observation,
        columns={"seed": seed, "observation": observation},
        source=where,
        world=str(seed),
    )


def task_seed(task: Task) -> int | None:
    """The seed of a task. None if it has no column `seed`."""
    seed = task.columns.get("seed")
    return None if seed is None else int(seed)


def first_observation(task: Task, seen: str) -> Observation:
    """The task's prompt, with the first observation of this episode in it.

    An environment that ignores its seed may begin with another observation than the one recorded in
    the task's prompt. The new observation then replaces the recorded one. The text that the recipe
    adds around it stays.

    Args:
        task: its prompt, or its last message, begins with its column `observation`.
        seen: the first observation of this episode.
    """
    text = task.prompt_text
    recorded = str(task.columns.get("observation", text))
    if seen and recorded != seen:
        text = seen + text.removeprefix(recorded)
    if isinstance(task.prompt, str):
        return Observation(text=text)
    last = Message(role=task.prompt[-1]["role"], content=text)
    return Observation((*task.prompt[:-1], last))
