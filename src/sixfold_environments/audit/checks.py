"""Checks of an audit that need no model. Each returns a `Finding`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from sixfold.types import Reward, Task

from .answers import (
    FORMS,
    VARIANTS,
    Right,
    answer_of,
    in_form,
    near_misses,
    other_answer,
    paraphrases,
    worked_solution,
)
from .exploits import EXPLOIT_FROM, Exploit
from .finding import Finding, Level
from .trials import Answer, Trials

SHOWN = 5
"""Maximum number of examples in a finding."""

SHOWN_CHARACTERS = 70
"""A finding quotes at most this many characters of a text."""

MOST_WRONG = 0.02
"""Largest share of tasks that may be wrong. A larger share fails; a smaller one gives a warning."""

MOST_GAP = 0.05
"""Largest share of texts that a stricter verifier may refuse without a warning."""

LEAST_ACCEPTED = 0.5
"""A form counts as refused if a smaller share of its right answers is accepted."""


class Rights(NamedTuple):
    """The right answers of the tasks.

    Attributes:
        form: the form of a final answer, one of FORMS.
    """

    found: list[Right]
    form: str


def right_answers(trials: Trials, tasks: Sequence[Task]) -> Rights:
    """The right answer of each task that has one.

    A worked solution is used unchanged. A reference answer is written in the form with the highest
    reward.
    """
    answered = [task for task in tasks if answer_of(task)]
    form = FORMS[0]
    if answered:
        sample = answered[:16]
        ranks = {
            form: _form_rank(trials, [(t, in_form(form, answer_of(t))) for t in sample])
            for form in FORMS
        }
        form = max(FORMS, key=lambda f: ranks[f])
    found = []
    for task in tasks:
        answer = answer_of(task)
        text = worked_solution(task) or (in_form(form, answer) if answer else "")
        if text:
            found.append(Right(task, answer, text))
    return Rights(found, form)


def check_reference(trials: Trials, rights: Rights, tasks: Sequence[Task]) -> Finding:
    """Check that the reference answer earns full marks."""
    if not rights.found:
        return Finding(
            "reference answer",
            "failure",
            f"none of {len(tasks)} tasks has a reference answer or a worked solution",
            remedy="give each task an answer (data.answer_field) or a solution (data.trace_field)",
        )
    rewards = trials.rewards([(right.task, right.text) for right in rights.found])
    wrong = [
        f"{right.task.id}: {_in_words(reward)}; tried {_short(right.text)}"
        for right, reward in zip(rights.found, rewards, strict=True)
        if not reward.solved
    ]
    absent = len(tasks) - len(rights.found)
    without = f"; {absent} tasks have none" if absent else ""
    share = len(wrong) / len(rights.found)
    level = _level(share)
    return Finding(
        "reference answer",
        "warning" if level == "ok" and absent else level,
        f"solves {1 - share:.1%} of {len(rights.found)} tasks{without}",
        tuple(wrong[:SHOWN]),
        "correct or drop these tasks: nothing can be learned from them" if wrong else "",
    )


def check_paraphrases(trials: Trials, rights: Rights) -> Finding:
    """Check that the same answer with other words around it earns full marks."""
    answers = [(right.task, text) for right in rights.found for text in paraphrases(right)]
    if not answers:
        return Finding("paraphrase", "skipped", "replies of an episode cannot be paraphrased")
    refused = [
        f"{task.id}: {_in_words(reward)}; tried {_short(text)}"
        for (task, text), reward in zip(answers, trials.rewards(answers), strict=True)
        if not reward.solved
    ]
    share = len(refused) / len(answers)
    return Finding(
        "paraphrase",
        _level(share),
        f"{1 - share:.1%} of {len(answers)} accepted",
        tuple(refused[:SHOWN]),
        "the verifier refuses right answers: look at how it finds the answer in a text"
        if refused
        else "",
    )


def check_distractors(trials: Trials, rights: Rights) -> Finding:
    """Check that wrong answers in the right form earn nothing."""
    tasks = [right.task for right in rights.found]
    answers: list[tuple[Task, Answer]] = []
    for i, right in enumerate(rights.found):
        if right.answer:
            other = other_answer(right.task, tasks, i)
            wrong = [*near_misses(right.answer), *([other] if other else [])]
            answers += [(right.task, in_form(rights.form, text)) for text in wrong]
        else:
            others = [r.text for r in rights.found if r.text != right.text]
            answers += [(right.task, others[i % len(others)])] if others else []
    if not answers:
        return Finding("distractor", "skipped", "no wrong answers can be derived from the tasks")
    accepted = [
        f"{task.id}: accepted {_short(text)}; the answer is {_short(answer_of(task))}"
        for (task, text), paid in zip(answers, trials.solved(answers), strict=True)
        if paid
    ]
    share = len(accepted) / len(answers)
    return Finding(
        "distractor",
        _level(share),
        f"{share:.1%} of {len(answers)} wrong answers accepted",
        tuple(accepted[:SHOWN]),
        "the verifier accepts wrong answers: training would teach them" if accepted else "",
    )


def check_variants(trials: Trials, rights: Rights) -> Finding:
    """Find the forms of a right answer that are accepted. A refused form is a warning.

    Long answers and programs have no such forms.
    """
    lines, refused = [], []
    for name, made in _variants(rights):
        share = _share(trials.solved(made))
        lines.append(f"{name}: {share:.0%} of {len(made)} accepted, e.g. {_short(made[0][1])}")
        if share < LEAST_ACCEPTED:
            refused.append(name)
    if not lines:
        return Finding("format variants", "skipped", "no task has a short final answer")
    return Finding(
        "format variants",
        "warning" if refused else "ok",
        f"refused: {', '.join(refused)}" if refused else "all accepted",
        tuple(lines),
        "tell the model the form in the prompt, or accept these forms" if refused else "",
    )


def check_strict(trials: Trials, strict: Trials, rights: Rights) -> Finding:
    """Check that the stricter held-out verifier accepts the texts that earn training rewards.

    Args:
        strict: scores texts with `eval.strict`.
        rights: right answers. They are tried unchanged, paraphrased and in other forms.
    """
    answers: list[tuple[Task, Answer]] = [(right.task, right.text) for right in rights.found]
    answers += [(right.task, text) for right in rights.found for text in paraphrases(right)]
    answers += [answer for _, made in _variants(rights) for answer in made]
    pairs = zip(answers, trials.solved(answers), strict.solved(answers), strict=True)
    refused = [(task, text) for (task, text), paid, sure in pairs if paid and not sure]
    gap = len(refused) / len(answers)
    return Finding(
        "stricter verifier",
        "warning" if gap > MOST_GAP else "ok",
        f"refuses {gap:.1%} of {len(answers)} texts that the training rewards accept",
        tuple(f"{task.id}: {_short(text)}" for task, text in refused[:SHOWN]),
        "look at these texts: one of the verifiers is wrong" if gap > MOST_GAP else "",
    )


def exploit_finding(exploits: Sequence[Exploit], tried: int, tasks: Sequence[Task]) -> Finding:
    """Check that texts without knowledge of the task earn almost nothing.

    Args:
        exploits: texts that earn something, the best first.
        tried: number of texts that were scored.
    """
    lines = tuple(
        f"{exploit.earned:.0%} of full marks, {exploit.solved} of {len(tasks)} tasks solved:"
        f" {_short(exploit.text)}"
        for exploit in exploits[:SHOWN]
    )
    best = f"; the best earns {exploits[0].earned:.0%}" if exploits else ""
    return Finding(
        "uninformed answers",
        "failure" if exploits else "ok",
        f"{len(exploits)} of {tried} texts earn over {EXPLOIT_FROM:.0%} of full marks{best}",
        lines,
        "make the verifier stricter, or balance the answers of the tasks" if exploits else "",
    )


def check_hard_texts(trials: Trials, rights: Rights, timeout_s: float) -> Finding:
    """Check that long and deeply nested texts earn nothing, within the time limit."""
    form, task = rights.form, rights.found[0].task
    hard = {
        "100,000 characters": "a" * 100_000,
        "20,000 open braces": in_form(form, "{" * 20_000),
        "5,000 nested brackets": in_form(form, "(" * 5_000 + "1" + ")" * 5_000),
        "a tower of powers": in_form(form, "9^{9^{9^{9^{9}}}}"),
        "Python powers": in_form(form, "9**9**9**9"),
        "20,000 digits": in_form(form, "7" * 20_000),
        "10,000 boxes": "\\boxed{1} " * 10_000,
        "control characters": in_form(form, "\x00\x1b[2J\u202e1"),
    }
    rewards = trials.rewards([(task, text) for text in hard.values()])
    lines = []
    for name, reward in zip(hard, rewards, strict=True):
        if reward.error:
            lines.append(f"{name}: the check failed: {reward.error}")
        elif reward.seconds > timeout_s:
            lines.append(f"{name}: took {reward.seconds:.1f} s")
        elif reward.solved:
            lines.append(f"{name}: solves task {task.id}")
    slowest = max(reward.seconds for reward in rewards)
    return Finding(
        "hard texts",
        "failure" if lines else "ok",
        f"the slowest of {len(hard)} took {slowest:.2f} s (limit {timeout_s:g} s)",
        tuple(lines),
        "bound the verifier's input: a policy will find texts on which it fails" if lines else "",
    )


def check_throughput(
    trials: Trials, rights: Rights, *, workers: int, per_step: int, step_s: float | None
) -> Finding:
    """Check that the rewards of a step are computed in less time than the step takes.

    Args:
        rights: right answers, whose checks take longest.
        workers: number of reward processes.
        per_step: completions per training step.
        step_s: seconds of a training step, or None if unknown.
    """
    answers = [
        (r.task, f"{r.text}{' ' * i}" if isinstance(r.text, str) else r.text)
        for i in range(3)
        for r in rights.found
    ]
    before = trials.seconds
    rewards = trials.rewards(answers)
    rate = len(answers) / max(trials.seconds - before, 1e-9)
    latency = sorted(reward.seconds for reward in rewards)
    step = per_step / rate
    middle, tail = statistics.median(latency), latency[int(0.99 * (len(latency) - 1))]
    text = (
        f"{rate:,.0f} checks per second with {workers} workers (median {1e3 * middle:.1f} ms, 99 %"
        f" {1e3 * tail:.0f} ms): {step:.1f} s for the {per_step} completions of a step"
    )
    if step_s is None:
        return Finding("throughput", "ok", text)
    slow = step > step_s
    return Finding(
        "throughput",
        "warning" if slow else "ok",
        f"{text}; a step takes {step_s:.1f} s",
        remedy="raise environment.workers, or training waits for the verifier" if slow else "",
    )


def check_duplicates(tasks: Sequence[Task], key: Callable[[Task], object]) -> Finding:
    """Check that no prompt occurs twice, or with different answers."""
    groups: dict[object, list[Task]] = {}
    for task in tasks:
        groups.setdefault(key(task), []).append(task)
    repeated = [group for group in groups.values() if len(group) > 1]
    mixed = [g for g in repeated if len({answer_of(t) for t in g}) > 1]
    extra = sum(len(group) - 1 for group in repeated)
    lines = [f"different answers: {', '.join(t.id for t in g[:4])}" for g in mixed]
    lines += [f"repeated: {', '.join(t.id for t in g[:4])}" for g in repeated if g not in mixed]
    level: Level = "failure" if mixed else "warning" if extra > MOST_WRONG * len(tasks) else "ok"
    return Finding(
        "duplicates",
        level,
        f"{extra} of {len(tasks)} tasks repeat a prompt;"
        f" {len(mixed)} prompts have different answers",
        tuple(lines[:SHOWN]),
        "drop the repeated tasks" if level != "ok" else "",
    )


def check_vacuous(trials: Trials, tasks: Sequence[Task]) -> Finding:
    """Check that no task is solved by an empty answer."""
    empty = ("", "no answer at all", "```python\npass\n```")
    solved = trials.solved([(task, text) for task in tasks for text in empty])
    free = [
        task.id
        for i, task in enumerate(tasks)
        if any(solved[i * len(empty) : (i + 1) * len(empty)])
    ]
    blank = [task.id for task in tasks if not task.prompt_text.strip()]
    lines = [f"solved by an empty answer: {name}" for name in free]
    lines += [f"empty prompt: {name}" for name in blank]
    share = len(set(free + blank)) / len(tasks)
    return Finding(
        "vacuous tasks",
        _level(share),
        f"{len(free)} of {len(tasks)} tasks are solved by an empty answer,"
        f" {len(blank)} have an empty prompt",
        tuple(lines[:SHOWN]),
        "drop these tasks, or give them tests" if lines else "",
    )


def _variants(rights: Rights) -> Iterator[tuple[str, list[tuple[Task, Answer]]]]:
    """Each form by name, with the tasks and texts that have it. Long answers are left out."""
    for name, variant in VARIANTS.items():
        made: list[tuple[Task, Answer]] = [
            (right.task, in_form(rights.form, text))
            for right in rights.found
            if 0 < len(right.answer) <= SHOWN_CHARACTERS
            and "\n" not in right.answer
            and (text := variant(right.answer)) is not None
        ]
        if made:
            yield name, made


def _level(share: float) -> Level:
    return "failure" if share > MOST_WRONG else "warning" if share else "ok"


def _share(flags: Iterable[bool]) -> float:
    found = list(flags)
    return sum(found) / len(found)


def _form_rank(trials: Trials, answers: Sequence[tuple[Task, Answer]]) -> tuple[float, int]:
    """Rank of a form: total score of its answers, then how many were not rejected."""
    rewards = trials.rewards(answers)
    earned = sum(reward.score or 0.0 for reward in rewards)
    return earned, sum(reward.verdict != "rejected" for reward in rewards)


def _in_words(reward: Reward) -> str:
    if reward.not_applicable:
        return reward.error or ""
    if reward.error:
        return f"the check failed: {reward.error}"
    verdict = f", {reward.verdict}" if reward.verdict else ""
    detail = f" ({reward.detail})" if reward.detail else ""
    return f"earned {0.0 if reward.score is None else reward.score:g}{verdict}{detail}"


def _short(text: Answer) -> str:
    shown = repr(text)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS - 3]}..."
