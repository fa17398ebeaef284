"""Reward functions: their two forms, and how a name becomes a function.

Sixfold's form is `f(completion: str, task: Task) -> float`. TRL's form is `f(prompts, completions,
**columns) -> list[float | None]`. It is recognised by a parameter named `completions` and called as
TRL calls it, with one group of K completions at a time. Both may be sync or async, and may return
numpy numbers or tensors.

Both may also ask for the fields of `Sampled` by naming them as parameters. A TRL function gets a
list of each.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UserError, nearest
from ..types import Task
from . import callables
from .sampled import Sampled, asked_of
from .values import awaited, entries, number

BUILT_IN = {
    "arithmetic": "sixfold.environment.arithmetic:arithmetic_reward",
    "math": "sixfold.environment.math_answers:math_reward",
    "reasoning_gym": "sixfold.environment.gym:gym_reward",
    "reasoning_gym_solved": "sixfold.environment.gym:gym_solved",
}

MAX_REWARD = 1e15
"""Largest absolute reward.

Training computes in float32, where the square of a reward above 1e19 is infinite: the group would
look as if all its rewards were equal.
"""

RewardCallable = Callable[..., Any]


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its name. Calling the object scores one completion."""

    name: str
    function: RewardCallable

    @cached_property
    def takes_groups(self) -> bool:
        """True for a TRL function: K completions of a task in, K rewards out."""
        return callables.takes_groups(self.function)

    @cached_property
    def asks(self) -> frozenset[str]:
        """Fields of `Sampled` that Sixfold-form functions name after their first two parameters."""
        return asked_of(self.function)

    def __call__(self, completion: str, task: Task) -> float | None:
        """The reward of one completion. None if a TRL function says that it does not apply."""
        return self.scores([completion], task, Sampled(["stop"], [[]], [], task.prompt_text))[0]

    def scores(
        self, completions: Sequence[str], task: Task, sampled: Sampled
    ) -> list[float | None]:
        """The rewards of completions of one task.

        Args:
            completions: texts to score.
            task: their task.
            sampled: values that the function may ask for by parameter name.

        Raises:
            ValueError: if a value is not finite, or if the number of values is wrong.
            TypeError: if a value is not a number. Errors of the function also propagate.
        """
        if not self.takes_groups:
            given = [
                {name: value for name, value in sampled.of(i).items() if name in self.asks}
                for i in range(len(completions))
            ]
            return [
                checked_value(awaited(self.function(text, task, **more)))
                for text, more in zip(completions, given, strict=True)
            ]
        arguments = trl_arguments(self.function, completions, task, sampled)
        values = entries(awaited(self.function(**arguments)))
        if len(values) != len(completions):
            raise ValueError(f"returned {len(values)} rewards for {len(completions)} completions")
        return [None if value is None else checked_value(value) for value in values]


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
        UserError: if the name, file, module or function does not exist, or if the code fails to
            load.
    """
    check_spec(spec)
    source, _, function_name = BUILT_IN.get(spec, spec).rpartition(":")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source, spec)
    members: Mapping[str, Any] = vars(module)
    function = members.get(function_name)
    if not callable(function):
        hint = nearest(
            function_name, [name for name, member in members.items() if callable(member)]
        )
        raise UserError(f"reward {spec!r}: {source} has no function {function_name!r}.{hint}")
    callables.check_callable(function)
    return RewardFunction(spec if spec in BUILT_IN else function_name, function)


def check_spec(spec: str) -> None:
    """Check a spec without running any code.

    Raises:
        UserError: for an unknown name, a malformed spec or a missing file.
    """
    source, colon, function_name = spec.rpartition(":")
    if not colon and spec not in BUILT_IN:
        forms = f"{', '.join(BUILT_IN)}, path/to/file.py:function or module:function"
        raise UserError(f"unknown reward {spec!r}. Use {forms}.{nearest(spec, list(BUILT_IN))}")
    if colon and not (source and function_name.isidentifier()):
        raise UserError(
            f"reward {spec!r} is malformed. Use path/to/file.py:function or module:function"
        )
    if source.endswith(".py") and not Path(source).is_file():
        raise UserError(f"reward {spec!r}: file not found: {source} (looked in {Path.cwd()})")


def trl_arguments(
    function: RewardCallable, completions: Sequence[str], task: Task, sampled: Sampled
) -> dict[str, Any]:
    """Arguments for a TRL function, as TRL 1.16 passes them.

    Every column is a list with one entry per completion. A chat prompt gives completions as message
    lists, a text prompt gives strings. trainer_state, log_extra and log_metric belong to TRL's
    trainer and are not passed.

    Args:
        function: the reward. Only what it takes by name or by `**kwargs` is passed.
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


def _load_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UserError(
            f"reward {spec!r}: cannot import {name}: {type(error).__name__}: {error}"
        ) from error


def _load_file(path: Path) -> ModuleType:
    name = f"sixfold_reward_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import modules beside it
    sys.modules[name] = module  # dataclasses in the file look up their module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"reward file {path}: {type(error).__name__}: {error}") from error
    return module
