"""Audit of a recipe's environment (`sixfold audit`)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from sixfold.checks.environment import Environment
from sixfold.data.sources import load_tasks
from sixfold.data.task_set import TaskSet, drawn_tasks, prompt_key
from sixfold.environment.episode import Action
from sixfold.environment.registry import any_needs
from sixfold.environment.resource import Resource
from sixfold.files.folder import RunFolder
from sixfold.recipe.reward_models import PRM
from sixfold.recipe.schema import EnvironmentConfig, EvalConfig, Recipe, RunConfig
from sixfold.renderer.call_formats import HERMES
from sixfold.renderer.tool_calls import read_reply
from sixfold.report.loggers import read_metrics
from sixfold.run.recipe_environment import recipe_environment, strict_environment, task_rewards
from sixfold.run.tool_setup import recipe_episode
from sixfold.types import Task

from ..judge.of_recipe import RecipeJudge, recipe_judge
from .audit import audit_environment
from .finding import Finding
from .judged import INJECTIONS, PAIRWISE, check_comparisons, cost_finding
from .trials import Trials


def findings_of_recipe(
    recipe: Recipe, tried: int, step_s: float | None, model: str
) -> Iterator[Finding]:
    """Look for faults of a recipe's environment.

    Args:
        tried: number of tasks on which texts are tried.
        step_s: seconds of a training step. None: those of the recipe's run, if it exists.
        model: checkpoint, run or model whose pass rate is measured, or "".
    """
    names = recipe.environment.rewards
    rewards = task_rewards(recipe.environment, recipe.eval.strict)
    tasks = load_tasks(recipe.data, seed=recipe.run.seed, rewards=rewards)
    drawn = drawn_tasks(tasks.train, tried, recipe.run.seed)
    with ExitStack() as opened:
        judged = any_needs("judge", (*names, recipe.eval.strict))
        judge = recipe_judge(recipe, 1) if judged else None
        if judge:
            opened.callback(judge.close)
            yield cost_finding(judge.settings, names, drawn)
        if any(map(_reads_texts, names)):
            yield from _findings_of_texts(recipe, step_s, tasks, drawn, judge, opened)
        if PAIRWISE in names:
            compared = Environment([PAIRWISE], error_budget=1.0, judge=judge)
            yield check_comparisons(compared.score, drawn)
    for name in names:
        if name.startswith(PRM):
            from .process import check_process_reward

            yield check_process_reward(name, recipe.environment, drawn)
    if model:
        from .model import check_pass_rates

        yield check_pass_rates(recipe, model)


def _with_calls(action: Action, tools: Sequence[Mapping[str, Any]]) -> Action:
    """The reply with its tool calls. Worked solutions write them in the format of Hermes."""
    read = read_reply(HERMES.parser(tools), action.text)
    return replace(action, calls=read.calls, malformed=read.malformed, content=read.content)


def _findings_of_texts(
    recipe: Recipe,
    step_s: float | None,
    tasks: TaskSet,
    drawn: Sequence[Task],
    judge: RecipeJudge | None,
    opened: ExitStack,
) -> Iterator[Finding]:
    """Findings of the rewards that score a text alone.

    Args:
        step_s: seconds of a training step. None: those of the recipe's run, if it exists.
        judge: the recipe's judge, or None.
        opened: closes the environments.
    """
    config = _of_texts(recipe.environment)
    every = [*tasks.train, *tasks.heldout]
    trials = open_trials(config, recipe.eval, every, judge, opened)
    timeout_s = max(config.timeout_s, judge.settings.timeout_s) if judge else config.timeout_s
    strict = strict_environment(config, recipe.eval, judge)
    if strict:
        opened.enter_context(strict)
    yield from audit_environment(
        trials,
        every,
        drawn,
        key=prompt_key,
        timeout_s=timeout_s,
        workers=config.workers,
        per_step=recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt,
        step_s=step_s or _step_seconds(recipe.run),
        seed=recipe.run.seed,
        strict=Trials(strict) if strict else None,
        attacks=INJECTIONS if judge else (),
    )


def open_trials(
    config: EnvironmentConfig,
    evaluation: EvalConfig,
    tasks: Sequence[Task],
    judge: Resource | None,
    opened: ExitStack,
) -> Trials:
    """Scorer of texts with a recipe's rewards, in the recipe's environment.

    Args:
        config: the environment. Rewards that do not score a text alone are
            left out.
        evaluation: says what counts as solved.
        tasks: tasks that the environment checks before they are played.
        judge: the recipe's judge, or None.

    Raises:
        UserError: the environment cannot be used, or refuses a task.
    """
    config = _of_texts(config)
    episode = recipe_episode(config, None, opened)
    if episode:
        episode.check_tasks(tasks)
    environment = opened.enter_context(recipe_environment(config, evaluation, judge=judge))
    return Trials(environment, episode, config.timeout_s, _with_calls)


def _reads_texts(name: str) -> bool:
    """False for rewards that compare completions, or whose rewards are of steps alone."""
    return name != PAIRWISE and not name.startswith(PRM)


def _of_texts(config: EnvironmentConfig) -> EnvironmentConfig:
    """With the rewards that score a text alone."""
    kept = [i for i, name in enumerate(config.rewards) if _reads_texts(name)]
    if len(kept) == len(config.rewards):
        return config
    update = {
        "rewards": tuple(config.rewards[i] for i in kept),
        "weights": tuple(config.weights[i] for i in kept) if config.weights else (),
    }
    return config.model_copy(update=update)


def _step_seconds(run: RunConfig) -> float | None:
    """Median seconds of a step of the recipe's run. None if it has not run."""
    folder = RunFolder(Path(run.dir) / run.name)
    times = [
        value
        for record in read_metrics(folder.metrics)
        if isinstance(value := record.get("time/step_s"), float)
    ]
    return statistics.median(times) if times else None
