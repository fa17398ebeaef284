"""How far a stage has moved the model: the KL divergence to the model that it started from."""

from __future__ import annotations

import json
from pathlib import Path

from ..batch import collate
from ..controller.stream import step_seed
from ..data.task_set import drawn_tasks
from ..files.durable import write_json_atomic
from ..reference.teacher import load_teacher
from ..run.assemble import Assembly
from ..run.context import RunContext
from ..trainer.logprobs import score_batch, score_tables

FILE = "drift.json"
TASKS = 128
"""Held-out tasks whose completions are compared."""


def measure(start: str, context: RunContext, assembly: Assembly) -> None:
    """Write the KL divergence of a stage's model to the one that it started from.

    Args:
        start: folder of the model that the stage started from.
        context: the run of the stage.
        assembly: the policy, its tasks and its engine.
    """
    # With several ranks the policy is sharded, and its start may not fit on one of them.
    if assembly.ranks.size > 1 or not (assembly.tasks.heldout or assembly.tasks.train):
        return
    context.progress.phase("KL to the start")
    with context.interrupts.finishing():
        write_json_atomic(context.folder.path / FILE, {"kl": kl_divergence(assembly, start)})


def kl_divergence(assembly: Assembly, start: str) -> float:
    """KL(policy || start) in nats per token, on completions that the policy samples.

    It is the mean of exp(r) - r - 1 with r = log start - log policy, which is never negative
    (http://joschu.net/blog/kl-approx.html, k3).

    Args:
        assembly: the policy, its tasks and its engine.
        start: folder of the other model, with the same tokenizer.
    """
    recipe = assembly.recipe
    tasks = assembly.tasks.heldout or assembly.tasks.train
    tasks = drawn_tasks(tasks, min(TASKS, len(tasks)), recipe.run.seed)
    assembly.sync.refresh()
    groups = assembly.sample(assembly.rollout(1), tasks, step_seed(recipe.run.seed, 0))
    batch = collate(groups, scored=False).to(assembly.device)
    budget = recipe.trainer.max_tokens_per_microbatch, recipe.trainer.share_prefix
    policy, _ = score_tables(assembly.root(), batch, assembly.scoring, *budget)
    teacher = load_teacher(start, assembly.policy, assembly.longest)
    ratio = (score_batch(teacher, batch, assembly.scoring, *budget) - policy)[batch.mask]
    ratio = ratio.double()
    return float((ratio.exp() - ratio - 1).mean())


def read_drift(folder: Path) -> float | None:
    """The divergence of a stage's folder, or None if it was not measured."""
    path = folder / FILE
    return float(json.loads(path.read_bytes())["kl"]) if path.is_file() else None
