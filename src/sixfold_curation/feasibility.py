"""Stage `feasibility`: can the recipe's verifier tell right answers of a row from wrong ones?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from sixfold.errors import UserError
from sixfold.recipe.schema import ModelConfig
from sixfold.run.recipe_environment import recipe_judge
from sixfold.types import Task
from sixfold_environments.audit.answers import (
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
from sixfold_environments.audit.checks import LEAST_ACCEPTED, right_answers
from sixfold_environments.audit.of_recipe import open_trials
from sixfold_environments.audit.trials import Answer, Trials

from .stage import Context, Decision, Health, Record, Rows, Stage
from .tasks import chunks, training_recipe, verifier_version

Fault = Literal[
    "unreadable", "template", "check_failed", "gold_refused", "distractor_accepted",
    "paraphrase_refused",
]  # fmt: skip
"""What can be wrong with a row. The first that holds, in this order.

- unreadable: the recipe cannot read it as a task, for example because its answer is empty.
- template: the prompt names a special token, or the model would not read it as it is written.
- check_failed: the check of the reference answer failed or took too long.
- gold_refused: the reference answer does not solve the task, in any form.
- distractor_accepted: a wrong answer solves it: another row's, another number, or no answer.
- paraphrase_refused: the reference answer with words around it, or in another form, does not.
"""

FAULTS: tuple[Fault, ...] = get_args(Fault)
CHUNK = 256
"""Rows that are checked together. Distractors are answers of other rows of the chunk."""
MOST_FAULTY = 0.05
"""Share of rows with a fault from which there is an alarm (lessons, stage 3)."""
REFORMATTED = ("dollar signs", "a decimal", "thousands separators")
"""Forms of an answer that mean the same in every field. A form that the verifier refuses for most
rows of the first chunk is left out: that is a rule of the verifier, and no fault of a row.
"""

_LAST_NUMBER = re.compile(r"\d+(?!.*\d)", re.DOTALL)
_SHOWN = 60


class Feasibility(Stage):
    """Give the recipe's verifier right and wrong answers of each row, and drop rows it misjudges.

    Args:
        keep: faults that are noted, but do not drop a row.
        template: check that the model reads each prompt as it is written. It needs the tokenizer of
            the recipe's model.
    """

    kind: ClassVar[str] = "feasibility"

    keep: tuple[Fault, ...] = ("paraphrase_refused",)
    template: bool = True

    def decide(self, rows: Rows, context: Context) -> Generator[Decision, None, Health]:
        (recipe, reader), counted = training_recipe(context, self.kind), _Counts()
        with ExitStack() as opened:
            judge = recipe_judge(recipe)
            if judge:
                opened.enter_context(closing(judge))
            trials = open_trials(recipe.environment, recipe.eval, (), judge, opened)
            check = _Check(trials, prompt_check(recipe.model) if self.template else None)
            for records in chunks(rows, CHUNK):
                found = check.faults(reader.read(records))
                counted.without_gold += check.without_gold
                for record, fault in zip(records, found, strict=True):
                    yield self._decision(record, fault, counted)
                context.progress(len(records))
        return counted.health(check.refused or [])

    def depends_on(self, context: Context) -> str:
        """The verifier."""
        return verifier_version(context, self.kind)

    def _decision(self, record: Record, fault: _Found | None, counted: _Counts) -> Decision:
        counted.rows += 1
        if fault is None:
            return Decision(record)
        counted.faults[fault.fault] += 1
        counted.forms[fault.form] += bool(fault.form)
        return Decision(record, fault.fault in self.keep, fault.fault, fault.note)


@dataclass(frozen=True)
class _Found:
    """A fault of a row: its kind, what was tried, and the form of the answer, or ""."""

    fault: Fault
    note: str
    form: str = ""


@dataclass
class _Counts:
    rows: int = 0
    without_gold: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    forms: Counter[str] = field(default_factory=Counter)

    def health(self, refused: Sequence[str]) -> Health:
        total = self.faults.total()
        share = total / self.rows if self.rows else 0.0
        named = ", ".join(f"{n} {name}" for name, n in self.faults.most_common())
        forms = ", ".join(f"{n} {name}" for name, n in self.forms.most_common() if name)
        alarm = ""
        if share > MOST_FAULTY:
            alarm = (
                f"{share:.1%} of {self.rows} rows have a fault ({named}"
                f"{f'; refused forms: {forms}' if forms else ''}). Correct the answers or the"
                " verifier before training: a policy learns what the verifier pays for"
            )
        figures = {
            "faults": {name: self.faults[name] for name in FAULTS},
            "refused forms": dict(self.forms.most_common()),
            "forms that the verifier does not take": [*refused],
            "rows without a reference answer": self.without_gold,
        }
        return Health("share of rows with a fault", share, alarm, figures)


class _Check:
    """Looks for the first fault of each row of a chunk.

    Args:
        trials: scores texts.
        prompt: says what is wrong with a task's prompt, or "". None: prompts are not checked.

    Attributes:
        without_gold: rows of the last chunk that have nothing to give the verifier.
        refused: forms of REFORMATTED that the verifier does not take. None: not known yet.
    """

    def __init__(self, trials: Trials, prompt: Callable[[Task], str] | None) -> None:
        self._trials = trials
        self._prompt = prompt
        self._form = ""
        self.without_gold = 0
        self.refused: list[str] | None = None

    def faults(self, read: Sequence[Task | str]) -> list[_Found | None]:
        """The fault of each row, or None.

        Args:
            read: the rows as tasks, or what is wrong with them.
        """
        found: dict[int, _Found] = {}
        tasks: dict[int, Task] = {}
        for at, one in enumerate(read):
            if isinstance(one, str):
                found[at] = _Found("unreadable", one)
            elif self._prompt and (wrong := self._prompt(one)):
                found[at] = _Found("template", wrong)
            else:
                tasks[at] = one
        known = {at: task for at, task in tasks.items() if _has_gold(task)}
        self.without_gold = len(tasks) - len(known)
        if known:
            rights = self._gold(known, found)
            self._compare(rights, _distractors, "distractor_accepted", found)
            if self.refused is None:
                self.refused = self._refused_forms(rights)
            self._compare(rights, self._same_answers, "paraphrase_refused", found)
        return [found.get(at) for at in range(len(read))]

    def _gold(self, tasks: dict[int, Task], found: dict[int, _Found]) -> dict[int, _Gold]:
        """Right answers that solve their task, in the first form that does. Others are faults."""
        if not self._form:  # of the whole data set: the first chunk decides
            self._form = right_answers(self._trials, list(tasks.values())[:16]).form
        forms = [self._form, *(form for form in FORMS if form != self._form)]
        made: dict[int, _Gold] = {}
        wrong: dict[int, _Found] = {}
        for form in forms:
            rest = [at for at in tasks if at not in made and at not in found]
            texts: list[Answer] = [worked_solution(tasks[at]) or in_form(form, answer_of(tasks[at]))
                                   for at in rest]  # fmt: skip
            rewards = self._trials.rewards(
                [(tasks[at], t) for at, t in zip(rest, texts, strict=True)]
            )
            for at, text, reward in zip(rest, texts, rewards, strict=True):
                if reward.error:
                    found[at] = _Found("check_failed", f"{reward.error}; tried {_short(text)}")
                elif reward.solved:
                    made[at] = _Gold(Right(tasks[at], answer_of(tasks[at]), text), form)
                else:
                    said = reward.detail or f"reward {reward.value}"
                    wrong.setdefault(at, _Found("gold_refused", f"{said}; tried {_short(text)}"))
        found.update({at: fault for at, fault in wrong.items() if at not in (*made, *found)})
        return made

    def _refused_forms(self, golds: dict[int, _Gold]) -> list[str]:
        """Forms that the verifier refuses for most right answers."""
        tried = [(name, gold, text) for gold in golds.values() for name, text in _reformatted(gold)]
        solved = self._trials.solved([(gold.right.task, text) for _, gold, text in tried])
        all_of = Counter(name for name, _, _ in tried)
        taken = Counter(name for (name, _, _), paid in zip(tried, solved, strict=True) if paid)
        return [name for name in REFORMATTED if taken[name] < LEAST_ACCEPTED * all_of[name]]

    def _same_answers(
        self, gold: _Gold, golds: Sequence[_Gold], place: int
    ) -> Iterator[tuple[str, Answer]]:
        yield from (("words around the answer", text) for text in paraphrases(gold.right))
        yield from (made for made in _reformatted(gold) if made[0] not in (self.refused or ()))

    def _compare(
        self, golds: dict[int, _Gold], texts: _MakeTexts, fault: Fault, found: dict[int, _Found]
    ) -> None:
        """Score texts of rows without a fault, and note the first that has another verdict."""
        tried = [
            (at, golds[at], name, text)
            for place, at in enumerate(golds)
            if at not in found
            for name, text in texts(golds[at], list(golds.values()), place)
        ]
        solved = self._trials.solved([(gold.right.task, text) for _, gold, _, text in tried])
        for (at, _, name, text), paid in zip(tried, solved, strict=True):
            if paid == (fault == "distractor_accepted"):
                form = name if fault == "paraphrase_refused" else ""
                found.setdefault(at, _Found(fault, f"{name}: {_short(text)}", form))


@dataclass(frozen=True)
class _Gold:
    """A right answer that solves its task, and the form of its final answer."""

    right: Right
    form: str


_MakeTexts = Callable[[_Gold, Sequence[_Gold], int], Iterable[tuple[str, Answer]]]
"""Makes (what it is, text) of a row, from all rows and the place of this one."""


def _has_gold(task: Task) -> bool:
    """True if the task has an answer that a reply can give. Tests of programs are none."""
    if worked_solution(task):
        return True
    scalars = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
    return bool(scalars) and all(isinstance(one, str | int | float) for one in scalars)


def _distractors(gold: _Gold, golds: Sequence[_Gold], place: int) -> Iterator[tuple[str, Answer]]:
    right, tasks = gold.right, [one.right.task for one in golds]
    yield "an empty reply", ""
    if not right.answer or not isinstance(right.text, str):
        other = next((g.right.text for g in golds if g.right.text != right.text), None)
        if other is not None:
            yield "another row's solution", other
        return
    if other := other_answer(right.task, tasks, place):
        yield "another row's answer", in_form(gold.form, other)
    for wrong in near_misses(right.answer) or perturbed(right.answer):
        yield "another number", in_form(gold.form, wrong)


def perturbed(answer: str) -> list[str]:
    """The answer with its last number raised by 1. Empty for an answer without a number."""
    found = _LAST_NUMBER.search(answer)
    if not found or len(found[0]) > 15:
        return []
    return [f"{answer[: found.start()]}{int(found[0]) + 1}{answer[found.end() :]}"]


def _reformatted(gold: _Gold) -> Iterator[tuple[str, Answer]]:
    right = gold.right
    if right.answer and not worked_solution(right.task):
        for name in REFORMATTED:
            if made := VARIANTS[name](right.answer):
                yield name, in_form(gold.form, made)


def prompt_check(model: ModelConfig) -> Callable[[Task], str]:
    """Function that says what is lost when a model reads a prompt, or "".

    The prompt is rendered by the chat template, tokenized and decoded, and each message must be
    found again, in order.

    Raises:
        UserError: the tokenizer cannot be loaded.
    """
    from sixfold.model.loading import load_tokenizer
    from sixfold.renderer.renderer import Renderer
    from sixfold.renderer.task_prompt import task_messages

    tokenizer, _ = load_tokenizer(model)
    renderer = Renderer(tokenizer)

    def check(task: Task) -> str:
        messages = [message["content"].strip() for message in task_messages(task)]
        if task.form == "rendered":
            return ""
        for text in messages:
            if renderer.has_special(text):
                return f"the prompt names a special token: {_short(text)}"
        try:
            shown, start = renderer.shown(renderer.encode(task)), 0
        except UserError as error:
            return str(error).removeprefix(f"task {task.id}: ")
        for text in messages:
            at = shown.find(text, start)
            if at < 0:
                return f"the model does not read this as it is: {_short(text)}"
            start = at + len(text)
        return ""

    return check


def _short(text: Answer) -> str:
    whole = text if isinstance(text, str) else " / ".join(text)
    return repr(whole if len(whole) <= _SHOWN else f"{whole[:_SHOWN]}...")
