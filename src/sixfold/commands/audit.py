"""`sixfold audit`: look for faults of an environment before training on it."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..data.sources import load_tasks
from ..data.task_set import TaskSet, drawn_tasks, prompt_key
from ..environment.audit.audit import audit_environment
from ..environment.audit.finding import Finding, worst
from ..environment.audit.judged import INJECTIONS, PAIRWISE, check_comparisons, cost_finding
from ..environment.audit.trials import Trials
from ..environment.episode import Action
from ..environment.judge.judge import Judge
from ..environment.scorer import Environment
from ..files.folder import RunFolder
from ..recipe.schema import Recipe
from ..report.loggers import read_metrics
from ..rollout.renderer.call_formats import HERMES
from ..rollout.renderer.tool_calls import read_reply
from ..run.recipe_environment import recipe_environment, strict_environment, task_rewards
from ..run.recipe_judge import recipe_judge
from ..run.tool_setup import recipe_episode
from ..types import Task

COLOURS = {"ok": "green", "warning": "yellow", "failure": "red", "skipped": "dim"}


@dataclass(frozen=True)
class AuditOptions:
    """Options of an audit.

    Attributes:
        tasks: number of tasks on which texts are tried.
        step_s: seconds of a training step; None: those of the recipe's run, if it exists.
        model: checkpoint, run or model whose pass rates are measured, or "".
        as_json: print one JSON object per finding instead of a table.
    """

    tasks: int = 64
    step_s: float | None = None
    model: str = ""
    as_json: bool = False


def audit_command(recipe: Recipe, options: AuditOptions) -> int:
    """Audit the environment of a recipe, and print the findings.

    Returns:
        The exit code: 1 if a check failed, else 0.
    """
    console = Console(soft_wrap=True)
    findings = []
    for finding in _findings(recipe, options):
        findings.append(finding)
        if options.as_json:
            print(json.dumps(finding.to_record()), flush=True)
        else:
            console.print(_shown(finding))
    level = worst(findings)
    verdict = {
        "failure": "Do not train on this environment before its failures are fixed.",
        "warning": "You can train on this environment. Look at the warnings first.",
    }.get(level, "No fault was found.")
    print(f"\n{verdict}", file=sys.stderr if options.as_json else sys.stdout)
    return 1 if level == "failure" else 0


def _findings(recipe: Recipe, options: AuditOptions) -> Iterator[Finding]:
    names = recipe.environment.rewards
    tasks = load_tasks(recipe.data, seed=recipe.run.seed, rewards=task_rewards(recipe))
    drawn = drawn_tasks(tasks.train, options.tasks, recipe.run.seed)
    with ExitStack() as opened:
        judge = recipe_judge(recipe)
        if judge:
            opened.callback(judge.close)
            yield cost_finding(judge.settings, names, drawn)
        if any(name != PAIRWISE for name in names):
            yield from _findings_of_texts(recipe, options, tasks, drawn, judge, opened)
        if PAIRWISE in names:
            compared = Environment([PAIRWISE], error_budget=1.0, judge=judge)
            yield check_comparisons(compared.score, drawn)
    if options.model:
        from .audit_model import check_pass_rates

        yield check_pass_rates(recipe, options.model)


def _with_calls(action: Action, tools: Sequence[Mapping[str, Any]]) -> Action:
    """The reply with its tool calls. Worked solutions write them in the format of Hermes."""
    read = read_reply(HERMES.parser(tools), action.text)
    return replace(action, calls=read.calls, malformed=read.malformed, content=read.content)


def _findings_of_texts(
    recipe: Recipe,
    options: AuditOptions,
    tasks: TaskSet,
    drawn: Sequence[Task],
    judge: Judge | None,
    opened: ExitStack,
) -> Iterator[Finding]:
    """Findings of the rewards that score a text by itself.

    Args:
        recipe: the recipe.
        options: options of the audit.
        tasks: all tasks.
        drawn: tasks on which texts are tried.
        judge: the recipe's judge, or None.
        opened: closes the environments.
    """
    recipe = _without_comparisons(recipe)
    config = recipe.environment
    episode = recipe_episode(config, None, opened)
    timeout_s = max(config.timeout_s, judge.settings.timeout_s) if judge else config.timeout_s
    environment = opened.enter_context(recipe_environment(recipe, judge=judge))
    strict = strict_environment(recipe, judge)
    if strict:
        opened.enter_context(strict)
    yield from audit_environment(
        Trials(environment, episode, config.timeout_s, _with_calls),
        [*tasks.train, *tasks.heldout],
        drawn,
        key=prompt_key,
        timeout_s=timeout_s,
        workers=config.workers,
        per_step=recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt,
        step_s=options.step_s or _step_seconds(recipe),
        seed=recipe.run.seed,
        strict=Trials(strict) if strict else None,
        attacks=INJECTIONS if judge else (),
    )


def _without_comparisons(recipe: Recipe) -> Recipe:
    """The recipe without rewards that compare completions: the audit scores each text alone."""
    config = recipe.environment
    kept = [i for i, name in enumerate(config.rewards) if name != PAIRWISE]
    if len(kept) == len(config.rewards):
        return recipe
    update = {
        "rewards": tuple(config.rewards[i] for i in kept),
        "weights": tuple(config.weights[i] for i in kept) if config.weights else (),
    }
    return recipe.model_copy(update={"environment": config.model_copy(update=update)})


def _step_seconds(recipe: Recipe) -> float | None:
    """Median seconds of a step of the recipe's run. None if it has not run."""
    folder = RunFolder(Path(recipe.run.dir) / recipe.run.name)
    times = [
        value
        for record in read_metrics(folder.metrics)
        if isinstance(value := record.get("time/step_s"), float)
    ]
    return statistics.median(times) if times else None


def _shown(finding: Finding) -> Text:
    """A finding in colour: its level, its result, and its details below."""
    line = Text(f"{finding.level:<8}", style=COLOURS[finding.level])
    line.append(f" {finding.check}: ", style="bold")
    line.append(finding.result, style="default")
    for detail in finding.details:
        line.append(f"\n           {detail}", style="dim")
    if finding.remedy:
        line.append(f"\n         {finding.remedy}", style="default")
    return line
