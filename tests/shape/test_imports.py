"""Import rules between packages. To change a rule is to change the design."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from source import imports, modules

IMPORTS = {name: imports(name, path, tree) for name, path, tree in modules()}
OURS = {
    name: {i[1:] for i in found if i.startswith(".") and i != "."}
    for name, found in IMPORTS.items()
}

ALGORITHMS = {
    name
    for name, _, tree in modules()
    if any(
        isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Method"
        for node in tree.body
    )
}
"""The files of named algorithms: those that hold a row."""

CONCRETE = ALGORITHMS | {"algorithm.zoo", "algorithm.composed", "algorithm.parts"}

ALLOWED = {
    "types": {"errors", "reward", "streams"},
    "streams": set(),
    "reward": set(),
    "errors": set(),
    "http_request": set(),
    "files": {"errors"},
    "seeds": set(),
    "event_loop": set(),
    "batch": {"types"},
    "checkpointable": {"errors"},
    "ranks": {"errors"},
    "planning": {"errors"},
    "recipe": {"algorithm", "environment", "errors"},
    "kernels": set(),
    "processes": {"errors"},
    "model": {"errors", "kernels", "recipe"},
    "engine": {"kernels", "model", "seeds", "types"},
    "algorithm": {"batch", "types"},
    "interop": {"algorithm", "environment", "errors", "types"},
    "environment": {"errors", "http_request", "processes", "types"},
    "data": {"environment", "errors", "interop", "recipe", "seeds", "types"},
    "trainer": {
        *("batch", "checkpointable", "errors", "kernels", "model", "ranks", "recipe", "seeds"),
        "types",
    },
    "reference": {
        *("batch", "checkpointable", "errors", "model", "processes", "ranks", "recipe", "trainer"),
        "types",
    },
    "critic": {"batch", "checkpointable", "errors", "model", "ranks", "recipe", "trainer"},
    "sync": {"checkpointable", "engine", "kernels", "rollout"},
    "rollout": {
        *("engine", "environment", "errors", "http_request", "model", "processes", "recipe"),
        *("seeds", "types"),
    },
    "server": {"engine", "errors", "rollout", "types"},
    "agents": {
        *("environment", "errors", "processes", "recipe", "rollout", "server", "types"),
    },
    "evaluation": {"environment", "errors", "event_loop", "files", "report", "rollout", "types"},
    "report": {"errors", "files", "planning", "recipe", "types"},
    "labs": {
        *("algorithm", "batch", "controller", "environment", "errors", "event_loop", "files"),
        *("model", "planning", "report", "rollout", "types"),
    },
    "checkpoint": {
        *("checkpointable", "engine", "errors", "files", "model", "processes", "ranks", "recipe"),
        "trainer",
    },
    "controller": {
        "algorithm",
        "batch",
        "environment",
        "event_loop",
        "reference",
        "rollout",
        "seeds",
        "sync",
        "trainer",
        "types",
    },
}
"""Package or leaf module -> the modules of Sixfold that it may import besides itself. A package of
`TOP` may import any package below it.
"""

TOP = ("run", "commands", "api", "cli", "__main__")
"""Packages from low to high. `run` makes training runs; `commands` has the other commands."""

CONTRACTS = {
    ("engine", "model"): {"model.base"},
    ("rollout", "model"): {"model.base", "model.chat_template", "model.turn_end"},
    ("rollout", "environment"): {"environment.base", "environment.episode"},
}
"""(importer, package) -> the only modules of the package that it may import.

A chat template belongs to the tokenizer, which is loaded and saved with the model. The renderer in
`rollout` renders with it, but needs nothing else of `model`. Its driver plays episodes and scores
them, through the contracts of `environment` alone.
"""


VLLMS = {"safetensors", "vllm"}


def _room(name: str) -> str:
    return name.split(".")[0]


def test_the_resolver_sees_relative_absolute_and_late_imports() -> None:
    assert {"batch", "types", "algorithm.base"} <= OURS["controller.loop"]
    assert "types" in OURS["environment.base"]
    assert "run.start" in OURS["cli.train"]
    assert "commands.shared_task" not in OURS["algorithm.grpo"]
    assert "torch" in IMPORTS["trainer.trainer"]


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_package_imports_only_allowed_packages(room: str) -> None:
    mine = [name for name in OURS if _room(name) == room]
    assert mine
    wrong = {name: sorted(i for i in OURS[name] if not _may(room, i)) for name in mine}
    assert not {name: found for name, found in wrong.items() if found}


def _may(room: str, imported: str) -> bool:
    other = _room(imported)
    return other == room or (
        other in ALLOWED[room] and imported in CONTRACTS.get((room, other), {imported})
    )


@pytest.mark.parametrize(
    ("name", "others"), [("processes.program", set()), ("rollout.vllm_worker", VLLMS)]
)
def test_programs_of_another_interpreter_import_nothing_from_sixfold(
    name: str, others: set[str]
) -> None:
    """Except for type annotations."""
    ((path, tree),) = [(path, tree) for module, path, tree in modules() if module == name]
    tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    found = {i.split(".")[0] for i in imports(name, path, tree)}
    assert found - set(sys.stdlib_module_names) == others


def test_every_package_has_a_rule() -> None:
    assert {_room(name) for name in OURS} - {"", "sixfold"} == {*ALLOWED, *TOP}


@pytest.mark.parametrize(
    "room", ["trainer", "rollout", "controller", "sync", "reference", "critic"]
)
def test_no_role_knows_a_concrete_algorithm(room: str) -> None:
    for name in (n for n in OURS if _room(n) == room):
        assert not OURS[name] & CONCRETE, name


def test_controller_imports_only_role_contracts() -> None:
    """It imports only the Protocol of each role, so fakes can replace all six roles."""
    for name in (n for n in OURS if _room(n) == "controller"):
        players = {
            i
            for i in OURS[name]
            if "." in i and not i.endswith(".base") and _room(i) != "controller"
        }
        assert not players, name


def test_every_row_of_the_zoo_has_a_file_of_its_own_name_or_of_its_predecessors() -> None:
    """The rule above covers these files."""
    from sixfold.algorithm.zoo import ZOO

    assert {f"algorithm.{name}" for name in ZOO} - ALGORITHMS == {
        "algorithm.gspo_token",
        "algorithm.reinforce_pp_baseline",
    }
    assert {f"algorithm.{name}" for name in ZOO} >= ALGORITHMS


@pytest.mark.slow
def test_only_the_renderer_tokenizes_and_decodes() -> None:
    """Other code asks it, so that training and the server convert text in the same way."""
    using = {name for name, _, tree in modules() if any(map(_uses_a_tokenizer, ast.walk(tree)))}
    assert {n for n in using if not n.startswith("rollout.renderer.")} == {"model.chat_template"}
    assert "rollout.renderer.renderer" in using


def _uses_a_tokenizer(node: ast.AST) -> bool:
    """True for `tokenizer(...)`, `x.tokenizer.decode(...)` and the like."""
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func).split(".")
    return called[-1].lstrip("_") == "tokenizer" or (
        called[-1] in ("decode", "encode", "batch_decode", "apply_chat_template")
        and called[-2:-1] in (["tokenizer"], ["_tokenizer"])
    )


def test_lower_packages_do_not_import_controller_run_commands_api_or_cli() -> None:
    for name, found in OURS.items():
        # A lab steps through the real controller; ALLOWED bounds what else it may import.
        if _room(name) not in ("controller", "labs", *TOP, ""):
            assert not {i for i in found if _room(i) in ("controller", *TOP)}, name
    for above, room in zip((TOP[1:], TOP[2:]), ("run", "commands"), strict=True):
        for name in (n for n in OURS if _room(n) == room):
            assert not {i for i in OURS[name] if _room(i) in above}, name


NEEDS_ENVIRONMENT = {"recipe.explain"}
LEAVES = [
    *("types", "errors", "seeds", "algorithm.method", "algorithm.zoo"),
    *sorted(name for name in OURS if _room(name) == "recipe" and name not in NEEDS_ENVIRONMENT),
]

WITHOUT_TORCH = [
    *LEAVES,
    "recipe.explain",
    "evaluation.statistics",
] + [
    name
    for name in OURS
    if _room(name)
    in ("cli", "data", "environment", "files", "interop", "planning", "processes", "report")
]


@pytest.mark.slow
def test_packages_that_parse_check_or_report_do_not_import_torch() -> None:
    """One new interpreter imports all of them. A failure names the first module that imports
    torch.
    """
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module('sixfold.' +"
        " name)\n"
    )
    code += "    if 'torch' in sys.modules: sys.exit(name)\n"
    done = subprocess.run(
        [sys.executable, "-c", code, *WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"torch is imported by sixfold.{done.stderr.strip()}"


@pytest.mark.parametrize("name", LEAVES)
def test_leaf_modules_never_import_torch(name: str) -> None:
    assert not {i for i in IMPORTS[name] if i.split(".")[0] in ("torch", "transformers")}
