"""`sixfold show RUN --step N`: trajectories of a recorded step. Does not import torch."""

from __future__ import annotations

import io
import json
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..cli.parsing import (
    RUN_HELP,
    NonNegativeInt,
    PositiveInt,
    VerbParser,
    argument,
    option,
    run_folder,
)
from ..errors import UserError, nearest
from ..files.folder import RunFolder, one_stage
from ..report.recorded_step import steps_text
from ..report.rollouts import dumped_steps, read_rollouts
from ..report.trajectory import Record, advantages, figure, total_reward
from ..report.untrusted import one_line

TEXT = """\
Print trajectories of a step: the origin of each token, turns, tool calls and rewards.

Without --task it shows the trajectory with the best reward, the one with the worst reward, and one
that failed, if there is one. The trajectories of the step must be recorded (log.rollouts_every).
The run may continue meanwhile.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument(RUN_HELP)
    step: PositiveInt | None = option("step to show (default: the last recorded)")
    task: str = option("only samples of this task", "", metavar="ID")
    sample: NonNegativeInt | None = option("only this sample of each task, from 0", metavar="K")
    limit: PositiveInt | None = option(
        "maximum number of trajectories (default: at most 3, or all samples of --task)"
    )
    tokens: bool = option(
        "list the tokens one by one, with id, log-prob, probability, advantage and version", False
    )
    color: Literal["auto", "always", "never"] = option(
        "auto (default): on a terminal, unless NO_COLOR is set", "auto"
    )
    json: bool = option("print the records as JSON", False)


PARSER = VerbParser("show", TEXT, Options)


def run(arguments: Sequence[str]) -> int:
    given = PARSER.parse(arguments)
    folder = RunFolder(one_stage(run_folder(given.run)))
    recorded = dumped_steps(folder.rollouts)
    number = _step(folder, recorded, given.step)
    records = read_rollouts(folder.rollout_file(number))
    chosen = chosen_records(records, given, number)
    if given.json:
        shown = [{**record, "shown_because": why} for record, why in chosen]
        print(json.dumps({"step": number, "recorded_steps": recorded, "trajectories": shown}))
        return 0
    from ..report.terminal import Screen, legend, trajectory_rows

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not use UTF-8
    screen = Screen(sys.stdout, _coloured(given.color))
    screen.show(_headline(folder.path, number, recorded, records), legend(screen.colour), "")
    for record, why in chosen:
        screen.show(*trajectory_rows(record, why, tokens=given.tokens))
    if left := len(records) - len(chosen):
        screen.show(f"{left} more trajectories in this step: --task ID, --sample K, --limit N")
    return 0


def chosen_records(
    records: Sequence[Record], choice: Options, step: int
) -> list[tuple[Record, str]]:
    """The chosen trajectories, each with the reason why it is shown, or "".

    Without a task, the best, the worst and one that failed come first, and then the others.

    Raises:
        UserError: if the step has no such task or sample.
    """
    of_task = [r for r in records if not choice.task or r["task_id"] == choice.task]
    if not of_task:
        tasks = list(dict.fromkeys(one_line(str(r["task_id"])) for r in records))
        raise UserError(
            f"--task {choice.task}: step {step} has no such task.{nearest(choice.task, tasks)} It"
            f" has {len(tasks)} tasks, such as {', '.join(tasks[:4])}"
        )
    found = [r for r in of_task if choice.sample is None or r["sample"] == choice.sample]
    if not found:
        samples = sorted({int(r["sample"]) for r in of_task})
        raise UserError(
            f"--sample {choice.sample}: step {step} has no such sample. Choose one of"
            f" {steps_text(samples)}"
        )
    if choice.task:
        return [(record, "") for record in found[: choice.limit]]
    picked = _interesting(found)
    if choice.limit is None:
        return picked or [(found[0], "")]
    taken = {id(record) for record, _ in picked}
    return [*picked, *((r, "") for r in found if id(r) not in taken)][: choice.limit]


def _interesting(records: Sequence[Record]) -> list[tuple[Record, str]]:
    """The best record, the worst, and one that failed, with reasons. Only those that exist.

    Among records with equal rewards, the one with the largest absolute advantage is chosen.
    """
    size = {id(r): max(map(abs, advantages(r)), default=0.0) for r in records}
    known = [(value, r) for r in records if (value := total_reward(r)) is not None]
    picked: list[tuple[Record, str]] = []
    if known:
        top, best = max(known, key=lambda pair: (pair[0], size[id(pair[1])]))
        bottom, worst = max(known, key=lambda pair: (-pair[0], size[id(pair[1])]))
        picked = [(best, "all rewards are equal" if top == bottom else "best reward")]
        picked += [] if top == bottom else [(worst, "worst reward")]
    taken = {id(r) for r, _ in picked}
    for why, failed in _FAILURES:
        if one := next((r for r in records if id(r) not in taken and failed(r)), None):
            return [*picked, (one, why)]
    return picked


_FAILURES: tuple[tuple[str, Callable[[Record], bool]], ...] = (
    ("the environment failed", lambda r: r["outcome"] in ("error", "timeout")),
    ("its check failed", lambda r: bool(r["reward"]) and r["reward"].get("value") is None),
    ("a tool call failed", lambda r: any(turn["tool_errors"] for turn in r["turns"])),
    ("a limit ended it", lambda r: r["outcome"] in ("length", "turns", "context")),
)
"""Kinds of failures, the most serious first: description, and test of a record."""


def _step(run: RunFolder, recorded: Sequence[int], step: int | None) -> int:
    """The step to show.

    Raises:
        UserError: if it is not recorded. The message lists the recorded steps and the reason.
    """
    every = _rollouts_every(run)
    if not recorded:
        if every == 0:
            raise UserError(
                f"{run.path} has no trajectories: its recipe sets log.rollouts_every = 0. Resume or"
                " repeat the run with log.rollouts_every = 1"
            )
        if run.summary.is_file():
            raise UserError(
                f"{run.path} has no trajectories: it has ended, and recorded none. Only steps of RL"
                f" are recorded (log.rollouts_every = {every})"
            )
        raise UserError(
            f"{run.path} has no trajectories yet: no step of RL has ended (log.rollouts_every ="
            f" {every}). Wait for the first step"
        )
    if step is None:
        return recorded[-1]
    if step not in recorded:
        last = run.last_step() or 0
        reason = (
            f"the run has finished {last} steps"
            if step > last
            else f"log.rollouts_every = {every} leaves it out"
        )
        raise UserError(
            f"--step {step} is not recorded in {run.rollouts}: {reason}. Recorded steps:"
            f" {steps_text(recorded)}"
        )
    return step


def _rollouts_every(run: RunFolder) -> int:
    """`log.rollouts_every` of the run's recipe. 1, the default, if the recipe cannot be read."""
    try:
        log: Any = tomllib.loads(run.recipe.read_text(encoding="utf-8")).get("log", {})
        return int(log.get("rollouts_every", 1))
    except (OSError, ValueError, AttributeError, TypeError):
        return 1


def _coloured(colour: str) -> bool:
    """Whether to write colours. auto: only to a terminal, unless NO_COLOR is set."""
    if colour != "auto":
        return colour == "always"
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def _headline(folder: Path, step: int, recorded: Sequence[int], records: Sequence[Record]) -> str:
    """One line with the number of trajectories, the mean reward and the recorded steps."""
    tasks = len({r["task_id"] for r in records})
    rewards = [value for r in records if (value := total_reward(r)) is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    line = f"{folder}, step {step}: {len(records)} trajectories of {tasks} tasks"
    line += f", mean reward {figure(mean)}"
    if missing := len(records) - len(rewards):
        line += f", {missing} without a reward"
    return line + f". Recorded steps: {steps_text(recorded)}"
