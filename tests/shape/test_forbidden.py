"""Calls that are forbidden in the whole package, because they would run code that came with data or
with a model.
"""

from __future__ import annotations

import ast

import pytest
from source import modules

ALLOWED: dict[tuple[str, str], str] = {
    ("checks.process", "pickle"): (
        "a private pipe from the parent to its own worker: only the parent writes what the worker"
        " unpickles"
    ),
    ("checks.worker", "pickle"): "the other end of that pipe",
    ("backends.sampler_process", "pickle"): (
        "a private pipe to a process that runs the engine and no code of a user: its requests and"
        " replies are written by Sixfold alone"
    ),
    ("run.sampler_worker", "pickle"): "the other end of that pipe",
    ("backends.linked_sampler", "pickle"): (
        "as above, or a socket between the ranks of a machine, in a folder that only their user"
        " can open"
    ),
    ("backends.generator_server", "pickle"): "the other end of these",
    (
        "sixfold_serving.agents.function_runner",
        "pickle",
    ): "a private pipe, as above",
    ("sixfold_serving.agents.function_worker", "pickle"): "the other end of that pipe",
    **dict.fromkeys(
        (
            (f"sixfold_environments.code.{program}", word)
            for program in ("harness", "test_program")
            for word in ("compile", "exec")
        ),
        "a program that runs only inside the sandbox",
    ),
}
"""(module, what) -> why it is safe there."""

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "torch.load",
    "torch.save",
    "os.system",
    "os.popen",
    "yaml.load",
    "numpy.load",
    "np.load",
    "pandas.read_pickle",
}


def offences(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & MODULES
            found |= {f"{node.module}.{a.name}" for a in node.names} & ATTRIBUTES
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                found |= {node.func.id} & BUILTINS
            found |= {ast.unparse(node.func)} & ATTRIBUTES
            found |= {
                k.arg
                for k in node.keywords
                if k.arg in ("shell", "trust_remote_code") and not _is_false(k.value)
            }
    return found


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


@pytest.mark.slow
def test_nothing_forbidden_outside_the_list() -> None:
    found = {(name, what) for name, _, tree in modules() for what in offences(tree)}
    assert found - set(ALLOWED) == set()


@pytest.mark.slow
def test_list_of_exceptions_has_no_stale_entry() -> None:
    found = {(name, what) for name, _, tree in modules() for what in offences(tree)}
    assert set(ALLOWED) - found == set()


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import pickle", "pickle"),
        ("from marshal import loads", "marshal"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from torch import load", "torch.load"),
        ("eval('1')", "eval"),
        ("import os\nos.system('ls')", "os.system"),
        ("run('ls', shell=True)", "shell"),
        ("run('ls', shell=flag)", "shell"),
        ("AutoModel.from_pretrained('x', trust_remote_code=True)", "trust_remote_code"),
    ],
)
def test_the_lint_sees_it(code: str, what: str) -> None:
    assert offences(ast.parse(code)) == {what}


def test_the_lint_lets_pass_what_is_harmless() -> None:
    assert (
        offences(
            ast.parse(
                "model.eval()\nre.compile('x')\nrun(['ls'],"
                " shell=False)\nf(trust_remote_code=False)"
            )
        )
        == set()
    )
