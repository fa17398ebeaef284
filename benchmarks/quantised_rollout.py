"""Distance of the sampler's log-probs after rounding its weights to int8 or fp8, on a model that a
run has trained.

    sixfold train demo && python benchmarks/quantised_rollout.py runs/demo [--tasks 64]

For each `sync.kind`: as many training tasks, the recipe's samples of each, drawn by the engine from
its weights and scored with the policy's by the trainer's code; `copy` shows what numerics alone do.
And how many held-out tasks the weights that sample solve greedily.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sixfold.batch import collate
from sixfold.checkpoint.model_source import model_folder
from sixfold.evaluation.evaluate import evaluate
from sixfold.recipe.toml import load_recipe
from sixfold.run.assemble import Assembly, assemble
from sixfold.trainer.logprobs import score_batch
from sixfold.types import Reward

MODES = ("copy", "int8", "fp8")


def drift(assembly: Assembly, tasks: int) -> str:
    """A row of the table."""
    groups = assembly.sample(assembly.rollout(), assembly.tasks.train[:tasks], seed=0)
    for trajectory in (t for g in groups for t in g.trajectories):
        trajectory.reward = Reward(0.0)
    batch = collate(groups).to(assembly.device)
    config = assembly.recipe.trainer
    logp = score_batch(
        assembly.policy.model,
        batch,
        assembly.scoring,
        config.max_tokens_per_microbatch,
        config.share_prefix,
    )
    gap = (logp - batch.old_logp)[batch.mask].double()
    k3, rho = (gap.exp() - 1 - gap).mean(), gap.exp()
    ess = rho.sum().square() / rho.square().sum() / len(rho)
    solved = evaluate(
        assembly.evaluator(),
        assembly.environment,
        assembly.tasks.heldout,
        assembly.recipe.run.seed,
        assembly.loop,
    ).interval.mean
    size = gap.abs()
    return (
        f"{len(gap):>8}{size.mean():>12.2e}{size.quantile(0.99):>12.2e}"
        f"{size.max():>12.2e}{k3:>12.2e}{ess:>10.4f}{solved:>10.1%}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description="Log-probs of rounded weights against the policy's."
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument(
        "--tasks", type=int, default=64, help="training tasks to sample (default 64)"
    )
    given = parser.parse_args()
    print(
        f"{'':6}{'tokens':>8}{'mean |d|':>12}{'99 % |d|':>12}"
        f"{'max |d|':>12}{'KL k3':>12}{'ESS':>10}{'held out':>10}"
    )
    for mode in MODES:
        recipe = load_recipe(str(given.run / "recipe.toml"), ["--sync.kind", mode])
        assembly = assemble(recipe, model_folder(str(given.run)))
        print(f"{mode:6}{drift(assembly, given.tasks)}", flush=True)
        assembly.close()


if __name__ == "__main__":
    main()
