"""No mechanism without a caller: a recipe, a command or the Python API reaches every definition in
`src/`, and something passes every option.

What only a test uses is found, because only the package itself is read.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache

import pytest
import source
from definitions import Package
from options import Calls, options

from sixfold.cli import VERBS
from sixfold.labs.catalogue import LABS

BENCHMARKS = "benchmarks/algorithms uses it"

UNREACHED = {
    "evaluation.statistics.mean_interval": BENCHMARKS,
}
"""Definition -> why it stays although no entry point reaches it."""

NEVER_PASSED = {
    "algorithm.method.Method": "a recipe sets the fields of a row by their names",
    "api.train": "the Python API",
    "environment.maths.constants._logarithm.base": "called through a table with sympy's arguments",
    "environment.sandbox.job.Limits": "a reward sets the limits that its programs need",
    "environment.sandbox.sandbox.Sandbox.__init__": "a reward chooses them by its settings",
    "model.attention.attention": "transformers calls it",
    "commands.shared_task.SharedTask.__init__.reward": BENCHMARKS,
}
"""Parameter, or the function with all of its parameters -> why it stays although no call in the
package passes it.
"""

ENTRIES = {
    *((f"cli.{verb}", "run") for verb in VERBS),
    *((f"labs.{module}", "LABS") for module in set(LABS.values())),
    ("cli", "main"),  # the command `sixfold`
    ("api", "train"),  # `sixfold.train`, imported on first use
    # `processes.child.Child` starts these by name
    ("environment.group_form", "win_rate"),  # the Python API: docs/environments.md
    ("environment.versions", "cached"),  # the same
    ("server.record", "read_trajectories"),  # the Python API: docs/server.md
    ("agents.launcher", "serve"),
    ("agents.function_worker", "serve"),
    ("environment.worker", "serve"),
    ("commands.judge_server", "serve"),
    ("environment.sandbox.launcher", "serve"),
    ("reference.worker", "serve"),
    ("rollout.vllm_worker", "serve"),
    ("environment.sandbox.agent", "main"),  # the first program in a cell
}


@cache
def package() -> Package:
    return Package()


def never_passed(package: Package) -> set[str]:
    """Parameters with a default that no call passes."""
    calls = Calls()
    return {option.full_name for option in options(package) if not calls.pass_(option)}


def unreached(package: Package) -> set[str]:
    """Definitions that no entry point reaches."""
    live = ENTRIES | {key for key in package.definitions if key[1].startswith("__")}
    todo = [(module, package.definitions[module, name].trees) for module, name in live]
    todo += [*package.top.items(), *package.programs.items()]
    attributes: set[str] = set()
    methods = {
        (key[0], f"{key[1]}.{name}"): (key, name, name in package.hooks(key))
        for key, definition, _ in package.classes()
        for name in definition.methods
    }
    while todo:
        while todo:
            module, trees = todo.pop()
            keys, names = package.mentions(module, trees)
            attributes |= names
            for key in keys - live:
                live.add(key)
                todo.append((key[0], package.definitions[key].trees))
        for key, (owner, name, hook) in methods.items():
            if key not in live and owner in live and (hook or name in attributes):
                live.add(key)
                todo.append((key[0], package.definitions[key].trees))
    return {".".join(key).lstrip(".") for key in set(package.definitions) - live}


@pytest.mark.slow
def test_an_entry_point_reaches_every_definition() -> None:
    found = unreached(package())
    assert sorted(found - set(UNREACHED)) == []
    assert sorted(set(UNREACHED) - found) == [], "these are reached: remove them from the list"


@pytest.mark.slow
def test_a_call_passes_every_option() -> None:
    found = never_passed(package())
    expected = {name: name.rpartition(".")[0] for name in found}
    unexpected = {n for n, function in expected.items() if not {n, function} & set(NEVER_PASSED)}
    assert sorted(unexpected) == []
    used = found | set(expected.values())
    assert sorted(set(NEVER_PASSED) - used) == [], "these are passed: remove them from the list"


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces the package by one module `cli.train` with a given text."""

    def replace(text: str) -> None:
        trees = (("cli.train", source.ROOT / "cli" / "train.py", ast.parse(text)),)
        for reader in ("definitions", "options"):
            monkeypatch.setattr(f"{reader}.modules", lambda: trees)
        monkeypatch.setattr("test_callers.ENTRIES", {("cli.train", "run")})

    return replace


EXAMPLE = """
LIMIT = 3
UNUSED = 4

class Box:
    def __init__(self, size=LIMIT, colour="red"):
        self.size = size
    @property
    def half(self):
        return self.size / 2
    def third(self):
        return self.third() / 3

def helper(n, deep=False, *, wide=False):
    return n

def alone():
    return alone() + helper(1, deep=True)

def run(arguments):
    return helper(Box(4).half, wide=True)
"""


def test_unused_definitions_and_options_are_found(
    sources: Callable[[str], None],
) -> None:
    """A function that is mentioned only by itself counts as unused."""
    sources(EXAMPLE)
    dead = {"UNUSED", "Box.third", "alone"}
    assert unreached(Package()) == {f"cli.train.{name}" for name in dead}
    assert never_passed(Package()) == {"cli.train.Box.__init__.colour"}
