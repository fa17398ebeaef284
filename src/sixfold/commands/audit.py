"""`sixfold audit`: look for faults of an environment before anybody trains on it."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..data.sources import load_tasks
from ..data.task_set import drawn_tasks, prompt_key
from ..environment.audit.audit import audit_environment
from ..environment.audit.finding import Finding, worst
from ..environment.audit.trials import Trials
from ..environment.episodes import load_episode
from ..files.folder import RunFolder
from ..recipe.schema import Recipe
from ..report.loggers import read_metrics
from ..run.recipe_environment import recipe_environment, strict_environment

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
        The exit code: 1 if nobody should train on it, else 0.
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
        "failure": "Do not train on this environment before its failures are mended.",
        "warning": "You can train on this environment. Look at the warnings first.",
    }.get(level, "No fault was found.")
    print(f"\n{verdict}", file=sys.stderr if options.as_json else sys.stdout)
    return 1 if level == "failure" else 0


def _findings(recipe: Recipe, options: AuditOptions) -> Iterator[Finding]:
    tasks = load_tasks(recipe.data, seed=recipe.run.seed, rewards=recipe.environment.rewards)
    config = recipe.environment
    drawn = drawn_tasks(tasks.train, options.tasks, recipe.run.seed)
    episode = load_episode(config.episode) if config.episode else None
    with ExitStack() as opened:
        environment = opened.enter_context(recipe_environment(recipe))
        strict = strict_environment(recipe)
        if strict:
            opened.enter_context(strict)
        yield from audit_environment(
            Trials(environment, episode, config.timeout_s),
            [*tasks.train, *tasks.heldout],
            drawn,
            key=prompt_key,
            timeout_s=config.timeout_s,
            workers=config.workers,
            per_step=recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt,
            step_s=options.step_s or _step_seconds(recipe),
            seed=recipe.run.seed,
            strict=Trials(strict) if strict else None,
        )
    if options.model:
        from .audit_model import check_pass_rates

        yield check_pass_rates(recipe, options.model)


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
