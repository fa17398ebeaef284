"""Reward functions: how they are called, and how a name becomes a function.

`callables.form_of` tells the form of a function. Sixfold's form is `f(completion: str, task: Task)
-> float`, or `f(group: list[Member], task: Task) -> list` over whole groups (`group_form`). The
forms of TRL, verl and OpenRLHF are called as these frameworks call them (`frameworks`). Every form
may be sync or async, and may return numpy numbers, tensors, or a `Grade` for a completion.

Functions of the forms f(completion, task) and TRL's may also ask for the values of `Sampled` by
naming them as parameters. A TRL function gets a list of each.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from ..errors import UserError
from ..types import Task
from ..user_code import own_copy
from . import callables, frameworks, registry
from .grade import Grade, entries, graded_value, plain_value
from .group_form import Member, OtherRewards
from .named import Named
from .resource import Started
from .sampled import Sampled, extra_arguments
from .versions import version_of

NAMED = Named("reward", "function", registry.REWARDS)

RewardCallable = Callable[..., Any]


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its name. Calling the object scores one completion.

    Attributes:
        row: what its registration says about it.
        started: what it asks, which its environment starts and ends. None: nothing.
    """

    name: str
    function: RewardCallable
    row: registry.RewardRow = registry.NO_ROW
    started: Started | None = None

    @cached_property
    def form(self) -> callables.Form:
        return callables.form_of(self.function)

    @property
    def takes_groups(self) -> bool:
        """True for a function of whole groups: K completions of a task in, K rewards out."""
        return callables.takes_groups(self.form)

    @cached_property
    def runs_async(self) -> bool:
        return callables.runs_async(self.function)

    @property
    def repeats_itself(self) -> bool:
        """True for a reward of a model elsewhere. It repeats failed requests itself."""
        return self.row.needs in ("judge", "reward_model")

    @property
    def version(self) -> str:
        """Version of a reward whose outcomes may be reused (`cached`). "" for other rewards."""
        plain = self.form == "single" and not self.extra_arguments
        return version_of(self.function) if plain else ""

    @cached_property
    def extra_arguments(self) -> frozenset[str]:
        """Values that f(completion, task) names after its first two parameters."""
        return extra_arguments(self.function) if self.form == "single" else frozenset()

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
        others: Sequence[OtherRewards] = (),
    ) -> list[float | Grade | None]:
        """The rewards of completions of one task.

        Args:
            sampled: values that the function may ask for by parameter name.
            others: results of the other rewards, for f(group, task).

        Raises:
            ValueError: if a value is not finite, or if the number of values is wrong.
            TypeError: if a value is not a number. Errors of the function also propagate.
        """
        logged: dict[str, list[Any]] = {}
        with _hinted(self.form, task):
            results = [
                awaited(r) for r in self._results(completions, task, sampled, others, logged)
            ]
        return self._checked(results, completions, logged)

    async def scores_async(
        self,
        completions: Sequence[str],
        task: Task,
        sampled: Sampled,
        others: Sequence[OtherRewards] = (),
    ) -> list[float | Grade | None]:
        """As `scores`, for an async function. It runs in the caller's event loop."""
        logged: dict[str, list[Any]] = {}
        with _hinted(self.form, task):
            results = [await r for r in self._results(completions, task, sampled, others, logged)]
        return self._checked(results, completions, logged)

    def _results(
        self,
        completions: Sequence[str],
        task: Task,
        sampled: Sampled,
        others: Sequence[OtherRewards],
        logged: dict[str, list[Any]],
    ) -> Iterator[Any]:
        """Results of the calls: one per completion, or one in all for a function of groups.

        Each call gets its own copy of every argument: the function may change what it gets.
        """
        function, form = self.function, self.form
        if form == "members":
            known = others or [OtherRewards({}, None, None)] * len(completions)
            reasons = sampled.finish_reason
            triples = zip(completions, reasons, known, strict=True)
            group = [Member(t, r, *k) for t, r, k in triples]
            yield function(group=own_copy(group), task=own_copy(task))
        elif form == "trl":
            named = frameworks.trl_arguments(function, completions, task, sampled, logged)
            yield function(**own_copy(named))
        elif form == "verl_batch":
            values, named = frameworks.verl_batch_arguments(function, completions, task)
            yield function(*own_copy(values), **own_copy(named))
        elif form in callables.FOREIGN:
            for text in completions:
                values, named = (
                    frameworks.verl_arguments(function, text, task)
                    if form == "verl"
                    else frameworks.openrlhf_arguments(
                        function, text, task, sampled.rendered_prompt
                    )
                )
                yield function(*own_copy(values), **own_copy(named))
        else:
            names = self.extra_arguments
            for index, text in enumerate(completions):
                given = sampled.of(index) if names else {}  # lists of its own
                more = {name: value for name, value in given.items() if name in names}
                yield function(text, own_copy(task), **more)

    def _checked(
        self, results: list[Any], completions: Sequence[str], logged: Mapping[str, list[Any]]
    ) -> list[float | Grade | None]:
        if not self.takes_groups:
            convert = _CONVERTED.get(self.form)
            return [graded_value(convert(r) if convert else r) for r in results]
        values = entries(results[0])
        if len(values) != len(completions):
            raise ValueError(f"returned {len(values)} rewards for {len(completions)} completions")
        if self.form == "verl_batch":
            return [graded_value(frameworks.verl_value(value)) for value in values]
        found = [None if value is None else graded_value(value) for value in values]
        metrics = frameworks.logged_means(logged)
        if not metrics:
            return found
        return [
            value
            if value is None
            else replace(value, metrics={**value.metrics, **metrics})
            if isinstance(value, Grade)
            else Grade(value, None, metrics=metrics)
            for value in found
        ]


_CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "verl": frameworks.verl_value,
    "openrlhf": frameworks.openrlhf_value,
}


@contextmanager
def _hinted(form: str, task: Task) -> Iterator[None]:
    """Add a remedy to the error of a TRL function that expects the other form of prompts."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        hint = frameworks.form_hint(error, task) if form == "trl" else ""
        if not hint:
            raise
        raise TypeError(f"{error}{hint}") from error


def awaited(value: Any) -> Any:
    """`value`, or its result if it is awaitable.

    The awaitable runs in an event loop in a separate thread: the caller may be inside a running
    loop (a notebook). All calls share this loop, because clients that a reward keeps between calls
    stay bound to one loop.
    """
    if not inspect.isawaitable(value):
        return value
    future = asyncio.run_coroutine_threadsafe(_result(value), reward_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def reward_loop() -> asyncio.AbstractEventLoop:
    """The event loop in which the async rewards of this process run, in a thread of its own."""
    return _loop(os.getpid())


@lru_cache(maxsize=1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Event loop of `process`.

    A forked child does not inherit its parent's threads and needs its own.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async-rewards", daemon=True).start()
    return loop


async def _result(awaitable: Any) -> Any:
    return await awaitable


def load_reward(spec: str) -> RewardFunction:
    """Load the reward that `spec` names. This runs the module or file.

    Args:
        spec: a registered name, `path/to/file.py:function` or `package.module:function`.

    Raises:
        UserError: if the name, file, module or function does not exist, if the code fails to load,
            or if a judge gives the reward.
    """
    row = registry.reward_row(spec)
    if row.needs:
        raise needs_judge(spec)
    function = NAMED.load(spec)
    callables.check_callable(function)
    return RewardFunction(NAMED.name(spec), function, row)


def needs_judge(name: str) -> UserError:
    """Error for a reward of a judge without a judge."""
    return UserError(
        f"the reward '{name}' needs a judging model: set environment.judge.url and"
        " environment.judge.model in a recipe, or give Environment(..., judge=Judge(...))"
    )
