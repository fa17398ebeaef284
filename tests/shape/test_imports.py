"""Import rules between packages. To change a rule is to change the design."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from source import PACKAGES, imports, modules, whole_name

from sixfold.cli import CORE


@cache
def all_imports() -> dict[str, set[str]]:
    """Module -> what it imports, ours with a leading dot. Not when tests are collected."""
    return {name: imports(name, path, tree) for name, path, tree in modules()}


@cache
def our_imports() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports."""
    return {
        name: {i[1:] for i in found if i.startswith(".") and i != "."}
        for name, found in all_imports().items()
    }


@cache
def algorithms() -> set[str]:
    """The files of named algorithms: those that hold a row."""
    return {
        name
        for name, _, tree in modules()
        if any(
            isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Method"
            for node in tree.body
        )
    }


ALLOWED = {
    "types": {"errors", "reward", "streams"},
    "user_code": {"types"},
    "streams": set(),
    "reward": set(),
    "errors": set(),
    "version": set(),
    "plugins": {"errors"},
    "json_schema": set(),
    "http_client": {"errors"},
    "files": {"errors"},
    "seeds": set(),
    "steps": {"environment", "errors", "user_code"},
    "step_scorer": {"types"},
    "staleness": set(),
    "event_loop": set(),
    "timeline": set(),
    "batch": {"types"},
    "checkpointable": {"errors"},
    "ranks": {"errors"},
    "recipe": {
        *("algorithm", "environment", "errors", "plugins", "preference", "sizing", "staleness"),
        "steps",
    },
    "preference": {"batch"},
    "sizing": {"errors", "recipe"},
    "kernels": set(),
    "processes": {"errors"},
    "model": {"errors", "kernels", "recipe", "sizing"},
    "engine": {"kernels", "model", "seeds", "types"},
    "algorithm": {"batch", "types"},
    "environment": {"errors", "json_schema", "plugins", "ranks", "types", "user_code"},
    "checks": {
        *("environment", "errors", "event_loop", "processes", "steps", "types", "user_code"),
    },
    "data": {"environment", "errors", "files", "plugins", "recipe", "seeds", "types", "user_code"},
    "trainer": {
        *("batch", "checkpointable", "errors", "kernels", "model", "ranks", "recipe", "seeds"),
        "types",
    },
    "reference": {
        *("batch", "checkpointable", "errors", "files", "model", "processes", "ranks", "recipe"),
        *("trainer", "types"),
    },
    "reward_model": {
        *("batch", "checkpointable", "environment", "errors", "evaluation", "http_client", "model"),
        *("preference", "processes", "ranks", "recipe", "renderer", "step_scorer", "steps"),
        *("trainer", "types"),
    },
    "critic": {"batch", "checkpointable", "errors", "model", "ranks", "recipe", "trainer"},
    "sync": {"checkpointable", "engine", "kernels", "rollout"},
    "renderer": {"errors", "json_schema", "model", "types"},
    "rollout": {
        *("engine", "environment", "errors", "json_schema", "model", "processes", "recipe"),
        *("renderer", "seeds", "timeline", "types", "user_code"),
    },
    "backends": {
        *("engine", "errors", "http_client", "processes", "recipe", "renderer", "rollout"),
        *("seeds", "types"),
    },
    "evaluation": {
        "checks",
        "environment",
        "errors",
        "event_loop",
        "files",
        "report",
        "rollout",
        "types",
    },
    "report": {"errors", "files", "plugins", "recipe", "timeline", "types"},
    "cli": {"errors", "plugins", "recipe", "report", "version"},
    "pages": {"errors", "files", "report"},
    "checkpoint": {
        *("checkpointable", "engine", "errors", "files", "model", "processes", "ranks", "recipe"),
        *("trainer", "version"),
    },
    "controller": {
        *("algorithm", "batch", "environment", "errors", "event_loop", "reference", "rollout"),
        *("seeds", "staleness", "sync", "trainer", "types"),
    },
}
"""Package or leaf module of the core -> the modules of the core that it may import besides itself.
A package of `TOP` may import any package below it. Nothing of the core imports another package.
"""

OTHERS: dict[str, set[str]] = {
    "sixfold_curation": {"sixfold_environments"},
    "sixfold_environments": set(),
    "sixfold_interop": set(),
    "sixfold_labs": {"sixfold_planning", "sixfold_search"},
    "sixfold_planning": set(),
    "sixfold_search": {"sixfold_environments"},
    "sixfold_serving": {"sixfold_search"},
}
"""Package beside the core -> the packages beside the core that it may import."""

TOP = ("run", "stages", "commands", "api", "__main__")
"""Packages from low to high. `run` makes training runs, `stages` lists of them, and `commands` has
the commands.
"""

CONTRACTS = {
    ("sizing", "recipe"): {
        *("recipe.algorithm_plan", "recipe.preference_plan", "recipe.schema"),
    },
    ("engine", "model"): {"model.base"},
    ("renderer", "model"): {"model.chat_template", "model.turn_end"},
    ("backends", "engine"): {"engine.weight_stages"},
    ("rollout", "model"): {"model.base", "model.chat_template", "model.turn_end"},
    ("rollout", "environment"): {"environment.base", "environment.episode"},
}
"""(importer, package) -> the only modules of the package that it may import.

A chat template belongs to the tokenizer, which is loaded and saved with the model. The renderer
renders with it, but needs nothing else of `model`. The driver plays episodes and scores them,
through the contracts of `environment` alone.
"""


VLLMS = {"safetensors", "torch", "vllm"}


def _room(name: str) -> str:
    return name.split(".")[0]


def test_the_resolver_sees_relative_absolute_and_late_imports() -> None:
    assert {"batch", "types", "algorithm.base"} <= our_imports()["controller.loop"]
    assert "types" in our_imports()["environment.base"]
    assert "run.start" in our_imports()["commands.train"]
    assert "commands.shared_task" in our_imports()["commands.algorithms"]
    assert "torch" in all_imports()["trainer.trainer"]


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_package_imports_only_allowed_packages(room: str) -> None:
    mine = [name for name in our_imports() if _room(name) == room]
    assert mine
    wrong = {name: sorted(i for i in our_imports()[name] if not _may(room, i)) for name in mine}
    assert not {name: found for name, found in wrong.items() if found}


def test_packages_beside_the_core_import_it_and_what_the_list_says() -> None:
    assert sorted(OTHERS) == [name for name in PACKAGES if name != "sixfold"]
    wrong = {
        (name, imported)
        for name, found in our_imports().items()
        for imported in found
        if _room(imported) in OTHERS
        and _room(imported) not in {_room(name), *OTHERS.get(_room(name), ())}
    }
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    """Annotations apart."""
    graph = {name: _at_run_time(name, path, tree) for name, path, tree in modules()}
    assert not circles(graph)


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other, directly or not (Tarjan's components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name] & graph.keys():
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(sorted(members))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def _at_run_time(name: str, path: Path, tree: ast.Module) -> set[str]:
    body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    plain = ast.Module(body, [])
    return {i[1:] for i in imports(name, path, plain) if i.startswith(".")} - {name}


def _may(room: str, imported: str) -> bool:
    other = _room(imported)
    return other == room or (
        other in ALLOWED[room] and imported in CONTRACTS.get((room, other), {imported})
    )


@pytest.mark.parametrize(
    ("name", "others"), [("processes.program", set()), ("backends.vllm_worker", VLLMS)]
)
def test_programs_of_another_interpreter_import_nothing_from_sixfold(
    name: str, others: set[str]
) -> None:
    """Except for type annotations."""
    ((path, tree),) = [(path, tree) for module, path, tree in modules() if module == name]
    plain = ast.Module([node for node in tree.body if not isinstance(node, ast.If)], [])
    found = {i.split(".")[0] for i in imports(name, path, plain)}
    assert found - set(sys.stdlib_module_names) == others


def test_every_package_has_a_rule() -> None:
    assert {_room(name) for name in our_imports()} - {""} == {*ALLOWED, *OTHERS, *TOP}


@pytest.mark.parametrize(
    "room", ["trainer", "rollout", "controller", "sync", "reference", "critic"]
)
def test_no_role_knows_a_concrete_algorithm(room: str) -> None:
    for name in (n for n in our_imports() if _room(n) == room):
        concrete = {"algorithm.zoo", "algorithm.composed", "algorithm.parts"} | algorithms()
        assert not our_imports()[name] & concrete, name


def test_controller_imports_only_role_contracts() -> None:
    """It imports only the Protocol of each role, so fakes can replace all six roles."""
    for name in (n for n in our_imports() if _room(n) == "controller"):
        players = {
            i
            for i in our_imports()[name]
            if "." in i and not i.endswith(".base") and _room(i) != "controller"
        }
        assert not players, name


def test_every_row_of_the_zoo_has_a_file_of_its_own_name_or_of_its_predecessors() -> None:
    """The rule above covers these files."""
    from sixfold.algorithm.zoo import ZOO

    assert {f"algorithm.{name}" for name in ZOO} - algorithms() == {
        "algorithm.gspo_token",
        "algorithm.reinforce_pp_baseline",
    }
    assert {f"algorithm.{name}" for name in ZOO} >= algorithms()


@pytest.mark.slow
def test_only_the_renderer_tokenizes_and_decodes() -> None:
    """Other code asks it, so that training and the server convert text in the same way."""
    using = {name for name, _, tree in modules() if any(map(_uses_a_tokenizer, ast.walk(tree)))}
    assert {n for n in using if not n.startswith("renderer.")} == {"model.chat_template"}
    assert "renderer.renderer" in using


def _uses_a_tokenizer(node: ast.AST) -> bool:
    """True for `tokenizer(...)`, `x.tokenizer.decode(...)` and the like."""
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func).split(".")
    return called[-1].lstrip("_") == "tokenizer" or (
        called[-1] in ("decode", "encode", "batch_decode", "apply_chat_template")
        and called[-2:-1] in (["tokenizer"], ["_tokenizer"])
    )


def test_lower_packages_do_not_import_controller_run_commands_or_api() -> None:
    for name, found in our_imports().items():
        if _room(name) not in ("controller", "stages", *OTHERS, *TOP, ""):
            assert not {i for i in found if _room(i) in ("controller", *TOP)}, name
    for above, room in ((TOP[at + 1 :], room) for at, room in enumerate(TOP[:3])):
        for name in (n for n in our_imports() if _room(n) == room):
            assert not {i for i in our_imports()[name] if _room(i) in above}, name


NEEDS_ENVIRONMENT = {"recipe.explain"}


def leaves() -> list[str]:
    of_recipes = (name for name in our_imports() if _room(name) in ("recipe", "sizing"))
    fixed = ("types", "errors", "seeds", "algorithm.method", "algorithm.zoo")
    return [*fixed, *sorted(name for name in of_recipes if name not in NEEDS_ENVIRONMENT)]


TORCHLESS = ("sixfold_environments", "sixfold_interop", "sixfold_planning")
RUN_MODELS = {
    "sixfold_environments.audit.model",
    "sixfold_environments.audit.of_recipe",
    "sixfold_environments.audit.process",
    "sixfold_environments.judge.sampled_drafts",
    "sixfold_planning.measure",
    "sixfold_planning.measure_cases",
}
"""Modules of these packages that load a model."""

NO_TORCH = ("checks", "cli", "data", "environment", "files", "pages", "processes", "report")


def without_torch() -> list[str]:
    rooms = (*NO_TORCH, *TORCHLESS)
    found = (name for name in our_imports() if _room(name) in rooms and name not in RUN_MODELS)
    commands = (f"commands.{verb}" for verb in CORE)
    return [*leaves(), "recipe.explain", "evaluation.statistics", *commands, *found]


@pytest.mark.slow
def test_packages_that_parse_check_or_report_do_not_import_torch() -> None:
    """One new interpreter imports all of them. A failure names the first module that imports
    torch.
    """
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    if 'torch' in sys.modules: sys.exit(name)\n"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(whole_name, without_torch())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"torch is imported by {done.stderr.strip()}"


def test_leaf_modules_never_import_torch() -> None:
    for name in leaves():
        heavy = {i for i in all_imports()[name] if i.split(".")[0] in ("torch", "transformers")}
        assert not heavy, name
