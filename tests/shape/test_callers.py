"""No mechanism without a caller: a recipe, a command or the Python API reaches every definition in
`src/`, and something passes every option.

What only a test uses is found, because only the package itself is read.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable
from functools import cache

import pytest
import source
from definitions import Package
from options import Calls, options

from sixfold.cli import CORE
from sixfold_labs.catalogue import LABS

BENCHMARKS = "benchmarks/algorithms uses it"

UNREACHED = {
    "evaluation.statistics.mean_interval": BENCHMARKS,
}
"""Definition -> why it stays although no entry point reaches it."""

NEVER_PASSED = {
    "algorithm.method.Method": "a recipe sets the fields of a row by their names",
    "api.train": "the Python API",
    "cli.main.argv": "commands from Python",
    "engine.engine.Engine.__init__.continuous": "benchmarks/switches.py measures what it gains",
    "sixfold_environments.judge.judge.Judge.__init__.share": "its subclass RecipeJudge passes it",
    "sixfold_environments.maths.constants._logarithm.base": "called by a table, as sympy's is",
    "sixfold_environments.sandbox.job.Limits": "a reward sets the limits that its programs need",
    "sixfold_environments.sandbox.sandbox.Sandbox.__init__": "a reward chooses them",
    "model.attention.attention": "transformers calls it",
    "sixfold_curation.stage.decided.context": "the Python API: docs/curation.md",
    "commands.shared_task.SharedTask.__init__.reward": BENCHMARKS,
}
"""Parameter, or the function with all of its parameters -> why it stays although no call in the
package passes it.
"""

PROJECT = tomllib.loads((source.SRC.parent / "pyproject.toml").read_text())["project"]
REGISTERED = [spec for group in PROJECT["entry-points"].values() for spec in group.values()]
"""What the packages add to the core by name."""


def _entries(spec: str) -> set[tuple[str, str]]:
    module, _, name = spec.partition(":")
    used = {name} if name else {"run", "PURPOSE", "write", "read"}  # a module
    short = source.short_name(module)
    return {key for key in package().definitions if key[0] == short and key[1] in used}


@cache
def entries() -> set[tuple[str, str]]:
    return ENTRIES | {entry for spec in REGISTERED for entry in _entries(spec)}


ENTRIES = {
    *((f"commands.{verb}", "run") for verb in CORE),
    *((f"sixfold_labs.{module}", "LABS") for module in set(LABS.values())),
    ("cli", "main"),  # the command `sixfold`
    ("api", "train"),  # `sixfold.train`, imported on first use
    # `processes.child.Child` starts these by name
    ("environment.group_form", "win_rate"),  # the Python API: docs/rewards.md
    ("environment.versions", "cached"),  # the same
    ("sixfold_curation.stage", "decided"),  # the Python API: docs/curation.md
    ("sixfold_serving.record", "read_trajectories"),  # the Python API: docs/server.md
    ("sixfold_serving.agents.launcher", "serve"),
    ("sixfold_serving.agents.function_worker", "serve"),
    ("checks.worker", "serve"),
    ("sixfold_serving.judge_server", "serve"),
    ("sixfold_environments.sandbox.launcher", "serve"),
    ("reference.worker", "serve"),
    ("reward_model.worker", "serve"),
    ("run.sampler_worker", "serve"),
    ("sixfold_planning.measure_cases", "serve"),
    ("run.rank_agent", "serve"),
    ("backends.ray_head", "serve"),
    ("backends.vllm_worker", "serve"),
    ("sixfold_environments.sandbox.agent", "main"),  # the first program in a cell
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
    live = entries() | {key for key in package.definitions if key[1].startswith("__")}
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
    """Replaces the package by one module `commands.train` with a given text."""

    def replace(text: str) -> None:
        trees = (("commands.train", source.ROOT / "commands" / "train.py", ast.parse(text)),)
        for reader in ("definitions", "options"):
            monkeypatch.setattr(f"{reader}.modules", lambda: trees)
        monkeypatch.setattr("test_callers.entries", lambda: {("commands.train", "run")})

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
    assert unreached(Package()) == {f"commands.train.{name}" for name in dead}
    assert never_passed(Package()) == {"commands.train.Box.__init__.colour"}
