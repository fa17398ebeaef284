"""`sixfold eval`: a checkpoint on the recipe's held-out tasks, alone or against another on the same tasks and the same noise."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..assembly import build_world
from ..config import Recipe, SyncConfig
from ..errors import UserError
from ..hub_names import not_a_hub_id
from ..trainer.checkpoint import newest_checkpoint, verified_model
from .evaluate import Evaluation, evaluate
from .statistics import paired_test


def model_folder(path: str) -> str:
    """Where the model of a run, a checkpoint or a plain model folder is; anything else is taken for a hub id."""
    folder = Path(path)
    if (folder / "recipe.toml").is_file():
        checkpoint, warnings = newest_checkpoint(folder / "checkpoints")
        for warning in warnings:
            print(warning, file=sys.stderr)
        if checkpoint is None:
            raise UserError(f"{folder} has no intact checkpoint to load a model from")
        return str(checkpoint / "model")
    if (folder / "manifest.json").is_file():
        return str(verified_model(folder))
    if not folder.exists() and (reason := not_a_hub_id(path)):
        raise UserError(f"no checkpoint, run or model at '{path}': {reason}")
    return path


def evaluate_command(recipe: Recipe, checkpoint: str, against: str | None) -> int:
    """Print mean reward, pass@k and 95 % intervals; with `against`, the paired difference. Gives the exit code."""
    if against and recipe.eval.temperature == 0 and recipe.eval.samples > 1:
        raise UserError("eval.samples > 1 with eval.temperature = 0 draws the same completion every time: set a temperature")
    paths = [checkpoint, *([against] if against else [])]
    results = [_evaluate(recipe, model_folder(path)) for path in paths]
    ks = sorted({1, recipe.eval.samples} | {k for k in (2, 4, 8, 16) if k <= recipe.eval.samples})
    table = Table("", "mean reward", "95 % interval", *(f"pass@{k}" for k in ks), "checks failed", title=f"{len(results[0].groups)} held-out tasks")
    for path, result in zip(paths, results, strict=True):
        mean, low, high = result.interval
        table.add_row(path, f"{mean:.3f}", f"{low:.3f} to {high:.3f}", *(f"{result.pass_at(k):.3f}" for k in ks), str(result.errors))
    console = Console()
    console.print(table)
    if against:
        values = [[sum(v) / len(v) for v in r.values] for r in results]
        test = paired_test(values[0], values[1])
        d = test.difference
        console.print(
            f"{paths[0]} minus {paths[1]}: {d.mean:+.3f} ({d.low:+.3f} to {d.high:+.3f}), better on {test.wins} tasks, worse on {test.losses}, "
            f"p = {test.p_value:.2g} ({test.test})"
        )
    return 0


def _evaluate(recipe: Recipe, model: str) -> Evaluation:
    world = build_world(recipe.model_copy(update={"sync": SyncConfig()}), model)  # nothing is trained: the model itself samples, not a rounded copy
    try:
        if not world.tasks.heldout:
            raise UserError("no held-out tasks: set data.heldout or data.heldout_split")
        return evaluate(world.evaluator(), world.environment, world.tasks.heldout, recipe.run.seed)
    finally:
        world.close()
