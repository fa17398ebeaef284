"""Who may import whom. The rules are the house's walls: breaking one is a change of design, not of code."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from source import imports, modules

IMPORTS = {name: imports(name, path, tree) for name, path, tree in modules()}
OURS = {name: {i[1:] for i in found if i.startswith(".") and i != "."} for name, found in IMPORTS.items()}

COMPOSERS = {
    *("run", "assembly", "outside", "parity_probe", "run_state", "sft_stage", "learners"),
    *("evaluation.command", "rollout.generate", "server.command", "algorithm.shared_task"),
}
"""Where rooms are put together: they may import any of them. `algorithm.shared_task` is the loop that an algorithm's file runs alone on."""

ALGORITHMS = {
    name for name, _, tree in modules() if any(isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Method" for node in tree.body)
}
"""The files of named algorithms: those that hold a row."""

CONCRETE = ALGORITHMS | {"algorithm.zoo", "algorithm.composed", "algorithm.parts"}

ALLOWED = {
    "types": {"errors"},
    "config": set(),
    "errors": set(),
    "hub_names": {"errors"},
    "batch": {"types"},
    "engine": {"types"},
    "chat": {"errors"},
    "model": {"chat", "config", "errors", "hub_names"},
    "algorithm": {"batch", "types"},
    "environment": {"types", "errors"},
    "durable": {"errors"},
    "trainer": {"batch", "config", "durable", "errors", "model", "types"},
    "reference": {"batch", "config", "errors", "model", "trainer", "types"},
    "critic": {"batch", "config", "errors", "model", "trainer"},
    "sync": {"engine", "rollout"},
    "rollout": {"chat", "engine", "errors", "types"},
    "server": {"chat", "engine", "errors", "rollout", "types"},
    "controller": {"algorithm", "batch", "environment", "reference", "rollout", "sync", "trainer", "types"},
}
"""Room or leaf module -> what of ours it may import besides itself."""


def _room(name: str) -> str:
    return name.split(".")[0]


def test_the_resolver_sees_relative_absolute_and_late_imports() -> None:
    assert {"batch", "types", "algorithm.base"} <= OURS["controller.loop"]
    assert "types" in OURS["environment.base"]
    assert "run" in OURS["cli.train"]
    assert "algorithm.shared_task" not in OURS["algorithm.grpo"]
    assert "torch" in IMPORTS["trainer.trainer"]


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    mine = [name for name in OURS if _room(name) == room and name not in COMPOSERS]
    assert mine
    wrong = {name: sorted(i for i in OURS[name] if _room(i) not in ALLOWED[room] | {room}) for name in mine}
    assert not {name: found for name, found in wrong.items() if found}


@pytest.mark.parametrize("room", ["trainer", "rollout", "controller", "sync", "reference", "critic"])
def test_no_role_knows_a_concrete_algorithm(room: str) -> None:
    for name in (n for n in OURS if _room(n) == room and n not in COMPOSERS):
        assert not OURS[name] & CONCRETE, name


def test_the_controller_knows_roles_not_players() -> None:
    """Of every role only its Protocol, so that six fakes will do."""
    for name in (n for n in OURS if _room(n) == "controller"):
        players = {i for i in OURS[name] if "." in i and not i.endswith(".base") and _room(i) != "controller"}
        assert not players, name


def test_every_row_of_the_zoo_has_a_file_of_its_own_name_or_of_its_predecessors() -> None:
    """And the rule above sees it."""
    from sixfold.algorithm.zoo import ZOO

    assert {f"algorithm.{name}" for name in ZOO} - ALGORITHMS == {"algorithm.gspo_token", "algorithm.reinforce_pp_baseline"}
    assert {f"algorithm.{name}" for name in ZOO} >= ALGORITHMS


def test_nobody_imports_the_controller_or_the_command_line() -> None:
    for name, found in OURS.items():
        if _room(name) not in ("controller", "cli", "__main__") and name not in COMPOSERS:
            assert not {i for i in found if _room(i) in ("controller", "cli")}, name


LEAVES = ["types", "config", "errors", "hub_names", "algorithm.method", "algorithm.zoo", "plan", "plan_algorithm", "recipe_io"]

WITHOUT_TORCH = [*LEAVES, "plan_text", "memory_plan", "memory_text", "model_size", "run_folder", "evaluation.statistics"] + [
    name for name in OURS if _room(name) in ("cli", "data", "environment", "report")
]


def test_what_only_parses_checks_or_reports_imports_no_torch() -> None:
    """All of them in one fresh interpreter; a failure names the first module that brings torch in."""
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module('sixfold.' + name)\n"
    code += "    if 'torch' in sys.modules: sys.exit(name)\n"
    done = subprocess.run([sys.executable, "-c", code, *WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"torch came in with sixfold.{done.stderr.strip()}"


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_name_no_torch_even_late(name: str) -> None:
    assert not {i for i in IMPORTS[name] if i.split(".")[0] in ("torch", "transformers")}
