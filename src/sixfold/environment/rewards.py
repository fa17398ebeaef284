"""Reward functions: their forms, and how a name becomes a function.

Sixfold's form is `f(completion: str, task: Task) -> float`. TRL's form is `f(prompts, completions,
**columns) -> list[float | None]`. It is recognised by a parameter named `completions` and called as
TRL calls it, with one group of K completions at a time. Both may be sync or async, and may return
numpy numbers, tensors, or a `Grade` for a completion.

Sixfold's form over whole groups is `f(group: list[Member], task: Task) -> list`, see `group_form`.

The other two may also ask for the fields of `Sampled` by naming them as parameters. A TRL function
gets a list of each.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..errors import UserError
from ..types import Task
from . import callables
from .grade import Grade, plain_value
from .group_form import Member, Standing
from .named import Named
from .sampled import Sampled, asked_of
from .values import awaited, entries, number
from .versions import version_of

BUILT_IN = {
    "arithmetic": "sixfold.environment.arithmetic:arithmetic_grade",
    "code": "sixfold.environment.code.reward:code_reward",
    "code_fraction": "sixfold.environment.code.reward:code_fraction_reward",
    "diversity": "sixfold.environment.group_form:diversity",
    "math": "sixfold.environment.maths.answers:math_grade",
    "math_boxed": "sixfold.environment.maths.answers:math_boxed_grade",
    "math_strict": "sixfold.environment.maths.answers:math_strict_grade",
    "short_answer": "sixfold.environment.text.short_answers:short_answer",
    "web_answer": "sixfold.environment.text.short_answers:web_answer",
    "tool_calls": "sixfold.environment.text.tool_calls:tool_calls",
    "think_format": "sixfold.environment.text.formats:think_format",
    "think_answer_format": "sixfold.environment.text.formats:think_answer_format",
    "json_format": "sixfold.environment.text.formats:json_format",
    "word_count": "sixfold.environment.text.words:word_count",
    "no_repetition": "sixfold.environment.text.words:no_repetition",
    "language": "sixfold.environment.text.language:language",
    "judge_rubric": "sixfold.environment.judge.rubric:rubric_reward",
    "judge_reference": "sixfold.environment.judge.reference:reference_reward",
    "judge_pairwise": "sixfold.environment.judge.pairwise:pairwise_reward",
    "judge_constitution": "sixfold.environment.judge.constitution:constitution_reward",
    "reasoning_gym": "sixfold.environment.gym:gym_grade",
    "reasoning_gym_solved": "sixfold.environment.gym:gym_solved_grade",
}
NOT_VERIFIERS: frozenset[str] = frozenset(
    {
        "think_format",
        "think_answer_format",
        "json_format",
        "word_count",
        "no_repetition",
        "language",
        "diversity",
        "judge_rubric",
        "judge_pairwise",
        "judge_constitution",
    }
)
"""Names of BUILT_IN that do not tell whether a completion is right, such as rewards for its format.
They decide `solved` only if no other reward does.
"""

JUDGES = frozenset({"judge_rubric", "judge_reference", "judge_pairwise", "judge_constitution"})
"""Names of BUILT_IN for rewards of a judging model. Each names a function that takes a `Judge` and
returns the reward. The reward runs in this process.
"""

PROGRAMS = frozenset({"code", "code_fraction"})
"""Names of BUILT_IN that run programs of the model in a sandbox."""

TIME_THEMSELVES = PROGRAMS | JUDGES
"""Names of BUILT_IN whose checks keep their time limit themselves: waiting for a sandbox, or for a
free connection to a judge, does not count.
"""

MATHS = frozenset({"math", "math_boxed", "math_strict"})
"""Names of BUILT_IN that need the CAS."""

BOUNDED = (
    MATHS | NOT_VERIFIERS | frozenset({"arithmetic", "short_answer", "web_answer", "tool_calls"})
)
"""Names of BUILT_IN that need little memory: a process that runs only these is limited."""

REWARDS = Named("reward", "function", BUILT_IN)

MAX_REWARD = 1e15
"""Largest absolute reward.

Training computes in float32, where the square of a reward above 1e19 is infinite: the group would
look as if all its rewards were equal.
"""

RewardCallable = Callable[..., Any]


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its name. Calling the object scores one completion.

    Attributes:
        name: its name in logs.
        function: the function.
        built_in: True if `name` is a name of BUILT_IN.
    """

    name: str
    function: RewardCallable
    built_in: bool = False

    @cached_property
    def takes_groups(self) -> bool:
        """True for a function of whole groups: K completions of a task in, K rewards out."""
        return callables.takes_groups(self.function)

    @cached_property
    def runs_async(self) -> bool:
        """True for an async function."""
        return callables.runs_async(self.function)

    @property
    def times_itself(self) -> bool:
        """True for a built-in reward that keeps the time limit itself."""
        return self.name in TIME_THEMSELVES and self.built_in

    @property
    def asks_judge(self) -> bool:
        """True for a built-in reward of a judging model. It repeats failed requests itself."""
        return self.name in JUDGES and self.built_in

    @property
    def version(self) -> str:
        """Version of a reward whose outcomes may be reused (`cached`). "" for other rewards."""
        return "" if self.takes_groups or self.asks else version_of(self.function)

    @cached_property
    def asks(self) -> frozenset[str]:
        """Fields of `Sampled` that Sixfold-form functions name after their first two parameters."""
        return asked_of(self.function)

    def __call__(self, completion: str, task: Task) -> float | None:
        """The reward of one completion, as a number.

        None if a TRL function returns None (it does not apply), or if the check failed.
        """
        sampled = Sampled(["stop"], [[]], [], task.prompt_text)
        return plain_value(self.scores([completion], task, sampled)[0])

    def scores(
        self,
        completions: Sequence[str],
        task: Task,
        sampled: Sampled,
        standings: Sequence[Standing] = (),
    ) -> list[float | Grade | None]:
        """The rewards of completions of one task.

        Args:
            completions: texts to score.
            task: their task.
            sampled: values that the function may ask for by parameter name.
            standings: results of the other rewards, for f(group, task).

        Raises:
            ValueError: if a value is not finite, or if the number of values is wrong.
            TypeError: if a value is not a number. Errors of the function also propagate.
        """
        return self._checked(
            [awaited(r) for r in self._results(completions, task, sampled, standings)], completions
        )

    async def scores_async(
        self,
        completions: Sequence[str],
        task: Task,
        sampled: Sampled,
        standings: Sequence[Standing] = (),
    ) -> list[float | Grade | None]:
        """As `scores`, for an async function. It runs in the caller's event loop."""
        return self._checked(
            [await r for r in self._results(completions, task, sampled, standings)], completions
        )

    def _results(
        self,
        completions: Sequence[str],
        task: Task,
        sampled: Sampled,
        standings: Sequence[Standing],
    ) -> Iterator[Any]:
        """Results of the calls: one per completion, or one in all for a function of groups."""
        if callables.takes_members(self.function):
            known = standings or [Standing({}, None, None)] * len(completions)
            reasons = sampled.finish_reason
            triples = zip(completions, reasons, known, strict=True)
            yield self.function(group=[Member(t, r, *k) for t, r, k in triples], task=task)
            return
        if self.takes_groups:
            yield self.function(**trl_arguments(self.function, completions, task, sampled))
            return
        for index, text in enumerate(completions):
            given = sampled.of(index) if self.asks else {}
            more = {name: value for name, value in given.items() if name in self.asks}
            yield self.function(text, task, **more)

    def _checked(
        self, results: list[Any], completions: Sequence[str]
    ) -> list[float | Grade | None]:
        """Values of the results of the calls."""
        if not self.takes_groups:
            return [graded_value(result) for result in results]
        values = entries(results[0])
        if len(values) != len(completions):
            raise ValueError(f"returned {len(values)} rewards for {len(completions)} completions")
        return [None if value is None else graded_value(value) for value in values]


def graded_value(value: Any) -> float | Grade:
    """A result of a reward: a number as a float, or a grade whose value is a float.

    Raises:
        TypeError: if it is neither.
        ValueError: if its value cannot be trained on.
    """
    if not isinstance(value, Grade):
        return checked_value(value)
    return value if value.value is None else replace(value, value=checked_value(value.value))


def checked_value(value: Any) -> float:
    """`value` as a float.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is NaN, infinite or beyond `MAX_REWARD`: no such value can be trained on.
    """
    finite = number(value)
    if not math.isfinite(finite):
        raise ValueError(f"returned {finite}")
    if abs(finite) > MAX_REWARD:
        raise ValueError(
            f"returned {finite:g}: rewards must be between -{MAX_REWARD:g} and {MAX_REWARD:g}"
        )
    return finite


def load_reward(spec: str) -> RewardFunction:
    """Load the reward that `spec` names. This runs the module or file.

    Args:
        spec: a name of BUILT_IN, `path/to/file.py:function` or `package.module:function`.

    Raises:
        UserError: if the name, file, module or function does not exist, if the code fails to load,
            or if a judge gives the reward.
    """
    if spec in JUDGES:
        raise needs_judge(spec)
    function = REWARDS.load(spec)
    callables.check_callable(function)
    return RewardFunction(REWARDS.name(spec), function, spec in BUILT_IN)


def needs_judge(name: str) -> UserError:
    """Error for a reward of a judge without a judge."""
    return UserError(
        f"the reward '{name}' needs a judging model: set environment.judge.url and"
        " environment.judge.model in a recipe, or give Environment(..., judge=Judge(...))"
    )


def trl_arguments(
    function: RewardCallable, completions: Sequence[str], task: Task, sampled: Sampled
) -> dict[str, Any]:
    """Arguments for a TRL function, as TRL 1.16 passes them.

    Every column is a list with one entry per completion. A chat prompt gives completions as message
    lists, a text prompt gives strings. trainer_state, log_extra and log_metric belong to TRL's
    trainer and are not passed.

    Args:
        function: the reward. Only arguments that it takes by name or by `**kwargs` are passed.
        completions: completions of one task.
        task: the task.
        sampled: token ids, finish reasons and the rendered prompt.
    """
    count = len(completions)
    chat = not isinstance(task.prompt, str)
    offered: dict[str, Any] = {
        name: [value] * count
        for name, value in task.columns.items()
        if name not in ("prompt", "completion")
    }
    if "answer" not in offered and task.answer is not None:
        offered["answer"] = [task.answer] * count
    offered["prompts"] = [list(task.prompt) if chat else task.prompt for _ in completions]
    offered["completions"] = [
        [{"role": "assistant", "content": text}] if chat else text for text in completions
    ]
    each = [sampled.of(i) for i in range(count)]
    offered |= {name: [one[name] for one in each] for name in Sampled._fields}
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}
