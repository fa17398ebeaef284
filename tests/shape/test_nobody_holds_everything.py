"""Nobody holds everything: a function takes the sections and the roles that it needs."""

from __future__ import annotations

import ast

from source import import_base, modules, walk

RECIPES = 60
"""Most functions that take the whole recipe."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def takes(node: Function, name: str) -> bool:
    """True if a parameter has this class as its type, or this class or None."""
    arguments = node.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    types = [ast.unparse(p.annotation).strip("'\"") for p in parameters if p.annotation]
    return bool({name, f"{name} | None", f"Optional[{name}]"} & set(types))


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in walk(tree) if isinstance(node, Function)]


def test_few_functions_take_the_whole_recipe() -> None:
    found = [
        f"{name}.{function.name}"
        for name, _, tree in modules()
        for function in functions(tree)
        if takes(function, "Recipe")
    ]
    assert len(found) <= RECIPES, found


def test_the_run_is_handed_to_nobody() -> None:
    """It passes a context on. No module imports it, not even for a type."""
    (tree,) = [tree for name, _, tree in modules() if name == "run.start"]
    assert "Training" in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    importers = [
        name
        for name, path, tree in modules()
        for node in walk(tree)
        if isinstance(node, ast.ImportFrom) and import_base(name, path, node) == "run.start"
        if "Training" in {alias.name for alias in node.names}
    ]
    assert importers == []
    assert [
        f"{name}.{function.name}"
        for name, _, tree in modules()
        for function in functions(tree)
        if name.startswith("run.") and takes(function, "Training")
    ] == []


def test_the_context_of_a_run_holds_no_settings_and_no_role() -> None:
    """Otherwise it would be the run under another name."""
    ((context,),) = [
        [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "RunContext"]
        for name, _, tree in modules()
        if name == "run.context"
    ]
    types = {
        ast.unparse(node.annotation) for node in context.body if isinstance(node, ast.AnnAssign)
    }
    assert len(types) >= 5
    assert not types & {"Recipe", "Assembly", "TrainableRoles", "Algorithm", "Method", "RlStage"}


def test_a_whole_recipe_is_seen_in_every_position() -> None:
    code = "def f(a, /, b: Recipe): ...\ndef g(*, c: 'Recipe | None'): ...\ndef h(d: Run): ...\n"
    of_recipe = {f.name for f in functions(ast.parse(code)) if takes(f, "Recipe")}
    assert of_recipe == {"f", "g"}
