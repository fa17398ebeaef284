"""Evaluate the policy of a run: its own weights, whatever the sampler holds at the moment."""

from __future__ import annotations

from collections.abc import Sequence

from ..evaluation.evaluate import Evaluation
from ..types import Task
from .assemble import World


def evaluate_policy(world: World, tasks: Sequence[Task], version: int, *, probe: bool = False) -> Evaluation:
    """Evaluate the policy's own weights, as a checkpoint of this moment would hold them.

    The sampler may hold older weights (`sync.every` > 1) or rounded ones (`sync.mode` int8, fp8). It
    gets the policy's for as long as the evaluation lasts, then its own back, so what training samples
    next does not depend on whether there was an evaluation.

    Args:
        world: the run.
        tasks: what to evaluate on.
        version: number of the policy's weights.
        probe: one greedy sample per task, as the warm-up is measured, instead of the [eval] settings.

    Raises:
        RuntimeError: if the tokens are not stamped with `version`.
    """
    with world.sync.policy_weights(version):
        rollout, seed = (world.prober(), 0) if probe else (world.evaluator(), world.recipe.run.seed)
        groups = rollout.generate(tasks, seed)
    found = Evaluation(groups)
    if found.version != version:
        raise RuntimeError(f"the evaluation of version {version} sampled from version {found.version}")
    world.environment.score(groups)
    return found
