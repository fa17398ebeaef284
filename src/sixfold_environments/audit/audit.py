"""Run all checks of an environment that need no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sixfold.types import Task

from .checks import (
    check_distractors,
    check_duplicates,
    check_hard_texts,
    check_paraphrases,
    check_reference,
    check_strict,
    check_throughput,
    check_vacuous,
    check_variants,
    exploit_finding,
    right_answers,
)
from .exploits import find_exploits
from .finding import Finding
from .trials import Trials

EXPLOIT_TASKS = 16
"""Number of tasks on which the search for exploits tries each text."""


def audit_environment(
    trials: Trials,
    tasks: Sequence[Task],
    drawn: Sequence[Task],
    *,
    key: Callable[[Task], object],
    timeout_s: float,
    workers: int,
    per_step: int,
    step_s: float | None,
    seed: int,
    strict: Trials | None = None,
    attacks: Sequence[str] = (),
) -> Iterator[Finding]:
    """Run the checks in order, and yield each finding as soon as its check has ended.

    Args:
        drawn: tasks on which texts are tried. Not empty.
        key: key of a task. Tasks with equal keys have the same prompt.
        timeout_s: time limit of a reward's check, in seconds.
        workers: number of reward processes.
        per_step: completions per training step.
        step_s: seconds of a training step, or None if unknown.
        strict: scores texts with a stricter verifier, or None.
        attacks: further texts that must earn no reward.
    """
    yield check_duplicates(tasks, key)
    rights = right_answers(trials, drawn)
    yield check_reference(trials, rights, drawn)
    if rights.found:
        yield check_paraphrases(trials, rights)
        yield check_distractors(trials, rights)
        yield check_variants(trials, rights)
        if strict:
            yield check_strict(trials, strict, rights)
    yield check_vacuous(trials, drawn)
    before = trials.checked
    few = drawn[:EXPLOIT_TASKS]
    exploits = find_exploits(trials, few, [rights.form], seed, attacks)
    yield exploit_finding(exploits, (trials.checked - before) // len(few), few)
    if rights.found:
        yield check_hard_texts(trials, rights, timeout_s)
        yield check_throughput(trials, rights, workers=workers, per_step=per_step, step_s=step_s)
