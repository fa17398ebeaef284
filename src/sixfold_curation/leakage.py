"""Leakage test: which prompts of an evaluation a trained model solves so much more often than its
base that chance does not explain it, and which of them its training data has.

Contamination shows as a few prompts that jump. A model that has learned improves on many.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sixfold.data.files import unread_rows
from sixfold.errors import UserError

from .decontaminate import Decontaminate, distinct_prompts
from .evaluation_sets import Evaluation, EvaluationRow
from .stage import Context, Rows

LEVEL = 0.05
"""Expected share of false alarms among the prompts that are reported (Benjamini, Hochberg 1995)."""


@dataclass(frozen=True)
class Jump:
    """One prompt of the evaluation.

    Args:
        task: id of the task.
        prompt: its text.
        base: samples of the base model that are right, and all its samples.
        trained: the same for the trained model.
        p_value: probability of such a jump or a larger one if both models were equally good at it
            (Fisher's exact test, one-sided).
        adjusted: p-value after the correction for the number of prompts.
        training_rows: rows of the training data that have the prompt, with the rule.
    """

    task: str
    prompt: str
    base: tuple[int, int]
    trained: tuple[int, int]
    p_value: float
    adjusted: float
    training_rows: tuple[str, ...] = ()

    @property
    def jump(self) -> float:
        """Pass rate of the trained model minus that of the base."""
        return self.trained[0] / self.trained[1] - self.base[0] / self.base[1]


@dataclass(frozen=True)
class Leakage:
    """Result of the test.

    Args:
        jumps: all prompts, from the least likely jump to the most likely.
        note: what the test cannot see with these samples, or "".
    """

    jumps: tuple[Jump, ...]
    note: str

    @property
    def found(self) -> tuple[Jump, ...]:
        """Prompts whose jump chance does not explain."""
        return tuple(jump for jump in self.jumps if jump.adjusted <= LEVEL)

    def lines(self) -> list[str]:
        """The report, for people."""
        found = self.found
        known = sum(bool(jump.training_rows) for jump in found)
        head = f"{len(found)} of {len(self.jumps)} prompts jump more than chance explains"
        head += f" (false alarms: {LEVEL:.0%}); {known} of them are in the training data"
        lines = [head, *([self.note] if self.note else [])]
        for jump in found:
            (a, n), (b, m) = jump.base, jump.trained
            where = "; ".join(jump.training_rows[:3]) or "not found in the training data"
            lines.append(f"{jump.task}: {a}/{n} -> {b}/{m}, p = {jump.p_value:.2g}. {where}")
        overlapping = [jump for jump in self.jumps if jump.training_rows and jump not in found]
        if overlapping:
            names = ", ".join(jump.task for jump in overlapping[:10])
            lines.append(f"{len(overlapping)} more prompts are in the training data: {names}")
        return lines


def leakage(base: Path, trained: Path, rows: Rows | None = None) -> Leakage:
    """Compare pass rates per prompt.

    Args:
        base: completions-N.jsonl of the base model, as `sixfold eval` writes it.
        trained: the same of the trained model, on the same tasks.
        rows: training data, in which the prompts are looked for.

    Raises:
        UserError: a file cannot be read, or the files share no task.
    """
    texts, before = _counts(base)
    later_texts, after = _counts(trained)
    tasks = [task for task in before if task in after]
    if not tasks:
        raise UserError(f"{base} and {trained} share no task: evaluate both on the same data")
    if other := next((task for task in tasks if texts[task] != later_texts[task]), ""):
        raise UserError(
            f"task {other} has another prompt in {trained} than in {base}: evaluate both on the"
            " same data"
        )
    p_values = [fisher(*before[task], *after[task]) for task in tasks]
    in_training = _training_rows({task: texts[task] for task in tasks}, rows) if rows else {}
    jumps = [
        Jump(task, texts[task], before[task], after[task], p, q, in_training.get(task, ()))
        for task, p, q in zip(tasks, p_values, adjusted(p_values), strict=True)
    ]
    jumps.sort(key=lambda jump: (jump.p_value, -jump.jump, jump.task))
    note = _power([before[task][1] for task in tasks], [after[task][1] for task in tasks])
    if left_out := len(before) + len(after) - 2 * len(tasks):
        note += f"{' ' if note else ''}{left_out} tasks are in one file only and are left out."
    return Leakage(tuple(jumps), note)


def _counts(path: Path) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """Prompt of each task, and its right samples and all samples that were judged."""
    texts: dict[str, str] = {}
    right, judged = Counter[str](), Counter[str]()
    for read in unread_rows(path):
        sample = read()
        try:
            task, solved = str(sample.fields["task_id"]), sample.fields["solved"]
            texts[task] = str(sample.fields["prompt"])
        except KeyError as error:
            raise UserError(
                f"{sample.where} is no sample with task_id, prompt and solved; name a"
                " completions-N.jsonl of `sixfold eval`"
            ) from error
        if solved is not None:
            judged[task] += 1
            right[task] += bool(solved)
    return texts, {task: (right[task], judged[task]) for task in texts if judged[task]}


def fisher(right: int, samples: int, later_right: int, later_samples: int) -> float:
    """One-sided p-value of Fisher's exact test that the later share is larger.

    P(X >= later_right), X hypergeometric: right samples in all, drawn later_samples times (Fisher
    1922).
    """
    total, hits = samples + later_samples, right + later_right
    ways = sum(
        math.comb(hits, k) * math.comb(total - hits, later_samples - k)
        for k in range(later_right, min(hits, later_samples) + 1)
    )
    return min(1.0, ways / math.comb(total, later_samples))


def adjusted(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted so that those below q hold a share of at most q false alarms.

    Benjamini and Hochberg 1995, doi:10.1111/j.2517-6161.1995.tb02031.x.
    """
    order = sorted(range(len(p_values)), key=lambda at: p_values[at], reverse=True)
    least, found = 1.0, [0.0] * len(p_values)
    for place, at in enumerate(order):
        least = min(least, p_values[at] * len(p_values) / (len(p_values) - place))
        found[at] = least
    return found


def _power(before: Sequence[int], after: Sequence[int]) -> str:
    """A note if one prompt that goes from never to always would not be found."""
    smallest = min(1 / math.comb(a + b, b) for a, b in zip(before, after, strict=True))
    if smallest * len(before) <= LEVEL:
        return ""
    needed = next(k for k in range(1, 1000) if len(before) / math.comb(2 * k, k) <= LEVEL)
    return (
        f"With so few samples a single prompt that goes from never to always solved would not be"
        f" found among {len(before)}: take {needed} samples per prompt."
    )


def _training_rows(texts: Mapping[str, str], rows: Rows) -> dict[str, tuple[str, ...]]:
    """Training rows that have the prompt of a task, with the rule that found them."""
    prompts = distinct_prompts([EvaluationRow(task, text) for task, text in texts.items()])
    stage = Decontaminate(evaluations=(Evaluation(data="results"),))
    found, _ = stage.overlaps(prompts, rows, Context())
    named: dict[str, list[str]] = {}
    for at, record in enumerate(rows):
        if at in found:
            task = prompts[found[at].prompt].name
            named.setdefault(task, []).append(f"{record.id} ({found[at].rule})")
    return {task: tuple(names) for task, names in named.items()}
