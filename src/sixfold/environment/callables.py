"""Reward functions given as Python objects.

They may be functions, lambdas, partials, bound methods or callable objects. The names of their
parameters tell which form they have: Sixfold's, TRL's, verl's or OpenRLHF's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from ..errors import UserError
from .sampled import extra_arguments

Form = Literal["single", "members", "trl", "verl", "verl_batch", "openrlhf"]
"""How a reward is called.

- single: Sixfold's f(completion, task).
- members: Sixfold's f(group, task).
- trl: TRL's f(prompts=, completions=, completion_ids=, **columns).
- verl: verl's f(data_source=, solution_str=, ground_truth=, extra_info=).
- verl_batch: the same with lists, whose names end in "s".
- openrlhf: OpenRLHF's f(queries, prompts, labels).
"""

FOREIGN: frozenset[Form] = frozenset({"trl", "verl", "verl_batch", "openrlhf"})
"""Forms of other frameworks. They get the completion as their framework decodes it."""

FORMS = (
    "f(completion, task) -> float, f(group, task) -> list, TRL's"
    " f(prompts, completions, **columns) -> list, verl's f(data_source, solution_str,"
    " ground_truth, extra_info) or OpenRLHF's f(queries, prompts, labels)"
)
GROUP = "group"
"""Parameter of a reward over a whole group in Sixfold's form."""
TRL_KEYWORDS = frozenset(
    {
        *("prompts", "completions", "completion_ids", "environments"),
        *("trainer_state", "log_extra", "log_metric"),
    }
)
"""Names of the arguments, besides columns, that TRL passes to every reward."""

_NO_TASK = re.compile(
    r"(?:^|_)(?:answer|solution|truth|gt|gold|label|target|reference|expected|test|case|prompt|"
    r"question|query|querie|completion|response|reply|output|prediction|pred|text|string|str|id|"
    r"score|info|source|kwarg|state|column|message|token)s?(?:_|$)"
)
"""Names of second parameters that expect a value of the row or a text, and no `Task`."""
_PLAIN_TYPES = frozenset(
    {"str", "bool", "int", "float", "list", "List", "dict", "Dict", "Sequence"}
)


def form_of(reward: Callable[..., Any]) -> Form:
    """The form of a reward, told by the names of its parameters.

    A name that only one framework uses decides. Otherwise two positional parameters are a
    completion and its task. A function that has fewer and takes `**kwargs` is TRL's, which passes
    everything by keyword.
    """
    try:
        parameters = inspect.signature(reward).parameters
    except ValueError:  # a C function without a signature
        return "single"
    kinds = {parameter.kind for parameter in parameters.values()}
    first = _positional(reward)[:2]
    if "completions" in parameters:
        return "trl"
    if GROUP in parameters:
        return "members"
    if "queries" in parameters:
        return "openrlhf"
    if "solution_strs" in parameters:
        return "verl_batch"
    if "solution_str" in parameters or "ground_truth" in first[1:]:
        return "verl"
    if "prompts" in parameters or TRL_KEYWORDS.intersection(first):
        return "trl"
    by_keyword = inspect.Parameter.VAR_KEYWORD in kinds
    if by_keyword and len(first) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return "trl"
    return "single"


def _positional(reward: Callable[..., Any]) -> list[str]:
    """Names of the parameters that take positional arguments."""
    return [
        name
        for name, parameter in inspect.signature(reward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def check_callable(reward: Any) -> None:
    """Raise UserError if `reward` cannot be called as a reward function."""
    if isinstance(reward, str):
        raise UserError(
            f"reward = {reward!r} is text. Name rewards in settings:"
            f" settings={{'environment.rewards': [{reward!r}]}}"
        )
    if isinstance(reward, list | tuple):
        raise UserError(
            f"reward is a {type(reward).__name__}. Give one function, or name several in settings"
            " under 'environment.rewards'"
        )
    if isinstance(reward, type) or not callable(reward):
        shown = f"the class {reward.__name__}" if isinstance(reward, type) else repr(reward)[:60]
        raise UserError(f"reward = {shown} is not a function. Use {FORMS}")
    form = form_of(reward)
    if form in FOREIGN:
        return
    try:
        if form == "members":
            inspect.signature(reward).bind(**{GROUP: ()}, task=None)
        else:
            extra = dict.fromkeys(extra_arguments(reward))
            inspect.signature(reward).bind("completion", None, **extra)
            _check_task(reward)
    except TypeError as error:
        raise UserError(
            f"reward {callable_name(reward)} cannot be called with a completion and a task"
            f" ({error}). Use {FORMS}"
        ) from error
    except ValueError:  # a C function without a signature
        return


def _check_task(reward: Callable[..., Any]) -> None:
    """Raise UserError if the second parameter of f(completion, task) cannot mean a task."""
    names = _positional(reward)
    if len(names) < 2:
        return
    annotation = inspect.signature(reward).parameters[names[1]].annotation
    kind = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    named = "task" not in names[1].lower() and _NO_TASK.search(names[1].lower())
    if named or kind.partition("[")[0].rpartition(".")[2] in _PLAIN_TYPES:
        raise UserError(
            f"reward {callable_name(reward)}({', '.join(names)}): the second argument of a reward"
            f" is its task, but the parameter {names[1]!r} names something else. Write"
            f" f(completion, task) and read task.answer or task.columns[...] in it, or use {FORMS}"
        )


def takes_groups(form: Form) -> bool:
    """True if a reward of this form scores whole groups: lists in, a list out."""
    return form in ("members", "trl", "verl_batch")


def callable_name(reward: Callable[..., Any]) -> str:
    """Name under which a reward is logged."""
    while isinstance(reward, partial):
        reward = reward.func
    return getattr(reward, "__name__", type(reward).__name__)  # type: ignore[no-any-return]


def runs_async(reward: Callable[..., Any]) -> bool:
    """True for an async function, also as a partial, a bound method or the call of an object."""
    if inspect.iscoroutinefunction(reward):
        return True
    return callable(reward) and inspect.iscoroutinefunction(type(reward).__call__)
