"""Evaluate the policy's own weights, regardless of which weights the sampler holds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from ..engine.engine import Engine
from ..evaluation.evaluate import Evaluation, evaluate
from ..types import Task
from .assemble import Assembly


def evaluate_policy(
    assembly: Assembly, tasks: Sequence[Task], version: int, *, probe: bool = False
) -> Evaluation:
    """Evaluate the policy's own weights, as a checkpoint at this moment would contain them.

    The sampler may hold older (`sync.every` > 1) or quantised (`sync.kind` int8, fp8) weights. It
    gets the policy's weights for the evaluation, and its own afterwards. So training samples do not
    depend on whether there was an evaluation. An int8 KV cache gives way to an exact one.

    Args:
        assembly: the run.
        tasks: tasks to evaluate on.
        version: version of the policy's weights.
        probe: sample once per task greedily, as in SFT, instead of using the [eval] settings.

    Raises:
        RuntimeError: if the tokens are not stamped with `version`.
    """
    engine = assembly.engine
    exact = engine.exact_cache() if isinstance(engine, Engine) else nullcontext()
    with assembly.sync.policy_weights(version), exact:
        rollout, seed = (
            (assembly.prober(), 0) if probe else (assembly.evaluator(), assembly.recipe.run.seed)
        )
        strict = None if probe else assembly.strict
        found = evaluate(rollout, assembly.environment, tasks, seed, assembly.loop, strict)
    if found.version != version:
        raise RuntimeError(
            f"the evaluation of version {version} sampled from version {found.version}"
        )
    return found
