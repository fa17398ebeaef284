"""TRL's samples through Sixfold's trainer: the same base, every completion and reward as TRL drew
them, step after step.

    python learning_vs_trl_replay.py JOB.json    # needs TRL's output; prints {"step", "distance"}
    for every checkpoint, and keeps the weights

Two learners that sample for themselves part by chance; here nothing is left to it. Nor to the one
setting that TRL does not have: it divides by the n - 1 form of a group's deviation, Sixfold by the
n form, so that Sixfold's gradients are sqrt(K / (K - 1)) times as long. Adam does not see a
constant factor, but the limit on the gradient's norm does; the replay sets it that much higher,
where it cuts the same gradients as TRL's.

distance: between TRL's weights and these, as a share of the way that TRL's have come from the base,
|ours - TRL's| / |TRL's - base|, over all parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from learning_vs_trl import SAMPLES_PER_PROMPT, Job
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from sixfold.batch import Batch, collate
from sixfold.recipe.toml import load_recipe
from sixfold.run.assemble import Assembly, assemble
from sixfold.run.trainable_roles import build_roles
from sixfold.trainer.logprobs import score_batch
from sixfold.types import Group, Reward, Task, Trajectory


def groups_of(
    assembly: Assembly, tasks: Mapping[str, Task], step: Mapping[str, Any], version: int
) -> list[Group]:
    """One step of TRL's samples file as groups; `version` is that of the weights, which are the
    ones TRL sampled with.
    """
    groups = []
    for first in range(0, len(step["tasks"]), SAMPLES_PER_PROMPT):
        task = tasks[step["tasks"][first]]
        prompt = assembly.renderer.encode(task)
        trajectories = []
        for k in range(SAMPLES_PER_PROMPT):
            completion = step["completions"][first + k]
            trajectories.append(
                Trajectory.one_turn(
                    task.id,
                    k,
                    prompt,
                    completion,
                    [0.0] * len(completion),  # filled in by `scored`: TRL keeps none of its own
                    [version] * len(completion),
                    "stop",
                    reward=Reward(step["rewards"][first + k]),
                )
            )
        groups.append(Group(task, trajectories))
    return groups


def scored(assembly: Assembly, batch: Batch) -> Batch:
    """The batch with the log-probs of the weights as they are, so that every ratio is 1, as it is
    in TRL.
    """
    config = assembly.recipe.trainer
    return batch.with_(
        old_logp=score_batch(
            assembly.policy.model,
            batch,
            assembly.scoring,
            config.max_tokens_per_microbatch,
            config.share_prefix,
        )
    )


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Parameters by name."""
    return _parameters(AutoModelForCausalLM.from_pretrained(folder))


def distance(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> float:
    """|ours - theirs| / |theirs - base|, Euclidean, over all parameters."""

    def gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
        return (
            sum(float((a[name].double() - b[name].double()).square().sum()) for name in base) ** 0.5
        )

    return gap(ours, theirs) / gap(theirs, base)


def main(path: str) -> None:
    """Replay the job in the file at `path`."""
    job = Job.load(Path(path))
    torch.set_num_threads(1)
    clip = (SAMPLES_PER_PROMPT / (SAMPLES_PER_PROMPT - 1)) ** 0.5
    assembly = assemble(
        load_recipe("demo", [*job.flags(), "--sft.steps", "0", "--trainer.grad_clip", str(clip)]),
        str(job.base),
    )
    base, tasks = weights_of(job.base), {task.id: task for task in assembly.tasks.train}
    roles = build_roles(assembly)
    for number, line in enumerate(job.trl_samples.read_text().splitlines(), start=1):
        batch = scored(
            assembly, collate(groups_of(assembly, tasks, json.loads(line), roles.trainer.version))
        )
        roles.trainer.train_step(roles.algorithm.prepare(batch), roles.algorithm.compute_loss)
        if number in job.checkpoints:
            assembly.policy.save(job.weights("replay", number))
            found = distance(
                _parameters(assembly.policy.model), weights_of(job.weights("trl", number)), base
            )
            print(json.dumps({"step": number, "distance": found}), flush=True)
    assembly.close()


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    main(sys.argv[1])
