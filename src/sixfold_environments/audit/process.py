"""Texts that earn more of a process reward than the solutions that they are made from.

They add no reasoning: empty steps, filler, repeated steps, divided or joined steps, and padding. A
reward that pays for them teaches a policy to write them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from sixfold.errors import UserError
from sixfold.recipe.reward_models import reward_model_paths
from sixfold.recipe.schema import EnvironmentConfig
from sixfold.reward_model.step_reward import credits, load_process_scorer
from sixfold.types import Task

from .answers import worked_solution
from .finding import Finding, Level

NOTICED = 0.05
"""Mean gain of reward from which a trick is reported. A step's score is between 0 and 1."""
COPIES = 8

_MARKS = {"newline": "\n", "blank_line": "\n\n", "sentence": ". "}
_REMEDY = (
    "a sum of scores grows with the number of steps: set environment.prm.credit = 'gain' or 'min',"
    " lower the weight of the process reward, or watch reward/part/prm.steps"
)

Trick = Callable[[Sequence[str], str, str], str]
"""Makes a text of the steps before the last, the last step, and the mark that ends steps."""

TRICKS: Mapping[str, Trick] = {
    f"{COPIES} empty steps": lambda steps, last, mark: "".join(steps) + mark * COPIES + last,
    f"{COPIES} steps of filler": lambda steps, last, mark: (
        "".join(steps) + f"OK{mark}" * COPIES + last
    ),
    f"the first step {COPIES} times": lambda steps, last, mark: "".join(
        [*[steps[0]] * COPIES, *steps[1:], last]
    ),
    "each step twice": lambda steps, last, mark: "".join(2 * step for step in steps) + last,
    "each step divided": lambda steps, last, mark: (
        "".join(step[: len(step) // 2] + mark + step[len(step) // 2 :] for step in steps) + last
    ),
    "one step": lambda steps, last, mark: "".join(step.replace(mark, " ") for step in steps) + last,
    "padding": lambda steps, last, mark: "".join(" " * COPIES + step for step in steps) + last,
}


def check_process_reward(name: str, config: EnvironmentConfig, tasks: Sequence[Task]) -> Finding:
    """Check that a process reward pays no more for a solution with a trick than without it.

    Args:
        name: the reward, `prm:PATH`.
        config: the recipe's [environment] section.
        tasks: tasks, of which those with a worked solution of several steps are tried.

    Raises:
        UserError: if the model cannot be loaded.
    """
    scorer = load_process_scorer(
        reward_model_paths(name), config.prm, config.reward_model, "environment.rewards"
    )

    def rewards(task: Task, texts: Sequence[str]) -> list[float | None]:
        """Sum of the rewards of the steps of each text. None: it cannot be scored."""
        ends = [scorer.steps.ends(text) for text in texts]
        try:
            found = scorer.score(task, texts, ends)
        except UserError:
            if len(texts) == 1:
                return [None]
            return [reward for text in texts for reward in rewards(task, [text])]
        return [sum(credits(one, config.prm.credit, config.prm.temperature)) for one in found]

    plain: list[float] = []
    tricked: dict[str, list[tuple[float, float]]] = {trick: [] for trick in TRICKS}
    for task in tasks:
        text = worked_solution(task)
        if not isinstance(text, str) or len(ends := scorer.steps.ends(text)) < 2:
            continue
        *steps, last = (text[a:b] for a, b in zip([0, *ends], ends, strict=False))
        made = [trick(steps, last, _mark(scorer.ends)) for trick in TRICKS.values()]
        before, *after = rewards(task, [text, *made])
        if before is None:
            continue
        plain.append(before)
        for trick, reward in zip(TRICKS, after, strict=True):
            if reward is not None:
                tricked[trick].append((before, reward))
    return process_finding(name, plain, tricked)


def process_finding(
    name: str, plain: Sequence[float], tricked: Mapping[str, Sequence[tuple[float, float]]]
) -> Finding:
    """Report of the rewards with and without tricks.

    Args:
        tricked: for each trick the rewards of solutions without and with it.
    """
    check = "process reward"
    if not plain:
        return Finding(check, "skipped", f"{name}: no task has a worked solution of several steps")
    lines, gains = [], {}
    for trick, pairs in tricked.items():
        if not pairs:
            lines.append(f"{trick}: cannot be scored")
            continue
        gain = fmean(after - before for before, after in pairs)
        more = sum(after > before for before, after in pairs)
        lines.append(f"{trick}: {gain:+.2f} on average, more on {more} of {len(pairs)} tasks")
        if gain >= NOTICED:
            gains[trick] = gain
    honest = fmean(plain)
    level: Level = "ok"
    if gains:
        level = "failure" if max(gains.values()) > max(abs(honest), NOTICED) else "warning"
    said = f"raised by {', '.join(gains)}" if gains else "no trick raises it"
    result = f"{name}: {said}; {honest:.2f} for {len(plain)} worked solutions"
    return Finding(check, level, result, tuple(lines), _REMEDY if gains else "")


def _mark(ends: str) -> str:
    """Text that ends a step, by the name of the way to end steps."""
    kind, _, argument = ends.partition(":")
    if kind == "every":
        return ""
    if kind in ("token", "xml"):
        return f"</{argument}>" if kind == "xml" else argument
    return _MARKS.get(ends, "\n")
