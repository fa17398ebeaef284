"""Examples of a process reward model: solutions in tokens, with the tokens where steps are read."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from ..controller.stream import task_stream
from ..data.step_labels import LabelledSolution
from ..data.task_set import TaskSet
from ..errors import UserError
from ..recipe.schema import PrmConfig
from ..renderer.renderer import Renderer
from ..renderer.task_prompt import without_prefill
from ..reward_model.step_quality import UNLABELLED
from ..reward_model.step_rows import step_row
from ..steps import last_tokens, steps_of, tokenized_ends
from ..types import Group, Task


@dataclass(frozen=True)
class _Stored:
    """Tokens of a prompt and of a solution, and labels by the index where they are read."""

    prompt: array[int]
    solution: array[int]
    labels: Mapping[int, float]


class StepExamples:
    """Labelled solutions, shuffled by seed in every epoch. Fulfils `stages.examples.Examples`.

    Args:
        solutions: from `data.step_labels`.
        renderer: with the tokenizer of the policy.
        config: the recipe's [prm] section.
        context: longest prompt with a solution, in tokens.
        overlong: `data.overlong`: "error", or "drop" to leave out longer ones.
        seed: seed of the order.

    Attributes:
        heldout: held-out solutions, each a group of one.
        notes: messages for the user.
        fingerprint: hash of the tokens and labels of all solutions that are trained.
        heldout_bytes: 0.
        steps_per_epoch: steps of a pass over the solutions. 0 if sources are drawn by weight.

    Raises:
        UserError: a solution cannot be encoded or is too long, or none is left.
    """

    heldout_bytes = 0

    def __init__(
        self,
        solutions: TaskSet,
        renderer: Renderer,
        config: PrmConfig,
        *,
        context: int,
        overlong: str,
        seed: int,
    ) -> None:
        self.notes = list(solutions.notes)
        self._renderer, self._config = renderer, config
        self._context, self._overlong = context, overlong
        self._stored = self._encode(solutions.train, "training")
        heldout = self._encode(solutions.heldout, "held-out")
        self.heldout: Sequence[Group] = [
            _group(task, heldout[task.id]) for task in solutions.heldout if task.id in heldout
        ]
        kept = [task for task in solutions.train if task.id in self._stored]
        if len(kept) < config.examples_per_step and not solutions.weights:
            self.notes.append(
                f"prm.examples_per_step = {config.examples_per_step}, but there are only"
                f" {len(kept)} solutions: every step trains on all of them"
            )
        digest = hashlib.sha256()
        for one in self._stored.values():
            digest.update(one.prompt.tobytes() + one.solution.tobytes())
            digest.update(repr(sorted(one.labels.items())).encode())
        self.fingerprint = digest.hexdigest()
        self._stream = task_stream(kept, config.examples_per_step, seed, solutions.weights)
        self.steps_per_epoch = self._stream.steps_per_epoch

    def groups(self, step: int) -> list[Group]:
        """Solutions of a step, counted from 1. They depend on the seed and the step alone."""
        return [_group(task, self._stored[task.id]) for task in self._stream(step)]

    def _encode(self, tasks: Sequence[Task], which: str) -> dict[str, _Stored]:
        """Tokens of each solution by its id.

        Notes solutions that are left out, and those that `prm.ends` would divide into other steps.
        """
        made: dict[str, _Stored] = {}
        ways = steps_of(
            self._config.ends,
            partial(tokenized_ends, encode=self._renderer.plain, decode=self._decode),
        )
        dropped = other = 0
        for task in tasks:
            assert isinstance(task, LabelledSolution)
            own = task.separator
            text, ends = joined(task, self._config.separator if own is None else own)
            prompt, ids = self._renderer.encode(task), self._renderer.plain(text)
            if (length := len(prompt) + len(ids)) > self._context:
                if self._overlong != "drop":
                    raise UserError(
                        f"task {task.id}: the prompt with its solution has {length} tokens, but"
                        f" only {self._context} fit the model's context. Set data.overlong ="
                        " 'drop' to leave out such solutions"
                    )
                dropped += 1
                continue
            try:
                reads = last_tokens(ends, text, ids, self._decode)
            except ValueError as error:
                raise UserError(
                    f"task {task.id}: its steps cannot be read in the model's tokens: {error}"
                ) from error
            labels: dict[int, float] = {}
            for at in reads:  # steps may end in one token, which is as right as the worst of them
                ending = [one for read, one in zip(reads, task.labels, strict=True) if read == at]
                labels[at] = min((one for one in ending if one is not None), default=UNLABELLED)
            other += ways.ends(text) != ends
            made[task.id] = _Stored(array("i", prompt), array("i", ids), labels)
        if tasks and not made:
            raise UserError(
                f"no {which} solution is left: all have more than the {self._context} tokens of the"
                " model's context"
            )
        if dropped:
            self.notes.append(
                f"{dropped} of {len(tasks)} {which} solutions are left out: they have more than"
                f" {self._context} tokens"
            )
        if other:
            self.notes.append(
                f"prm.ends = {self._config.ends!r} divides {other} of {len(tasks)} {which}"
                " solutions into other steps than their labels do. Set it, or prm.separator, to"
                " what divides them"
            )
        return made

    def _decode(self, ids: Sequence[int]) -> str:
        return self._renderer.shown(ids, special=False)


def joined(task: LabelledSolution, separator: str) -> tuple[str, list[int]]:
    """The text of a solution without the prefill that it repeats, and where its steps end in it.

    Args:
        task: the solution.
        separator: follows every step but the last, unless the step already ends with it.
    """
    steps = [without_prefill(task.steps[0], task), *task.steps[1:]]
    texts = [
        step if last or step.endswith(separator) else step + separator
        for step, last in zip(steps, [False] * (len(steps) - 1) + [True], strict=True)
    ]
    return "".join(texts), list(accumulate(map(len, texts)))


def _group(task: Task, stored: _Stored) -> Group:
    row = step_row(
        task.id, 0, stored.prompt.tolist(), stored.solution.tolist(), dict(stored.labels)
    )
    return Group(task, [row])
