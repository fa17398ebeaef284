"""One GRPO step on a model of a few thousand numbers, with every hand-over printed: the source of
every figure in docs/one-step.md.

    python docs/one_step.py

The calls are those of `sixfold.controller.loop.Controller.step`, in its order. A test holds the
page equal to what this prints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from sixfold.algorithm.composed import make_algorithm
from sixfold.batch import Batch, Metrics, collate
from sixfold.controller.stream import step_seed
from sixfold.data.task_set import TaskSet
from sixfold.environment.arithmetic import arithmetic_reward
from sixfold.recipe.algorithm_plan import resolve_algorithm
from sixfold.recipe.toml import parse_recipe
from sixfold.run.assemble import assemble
from sixfold.run.trainable_roles import build_roles
from sixfold.trainer.logprobs import score_batch
from sixfold.types import Group, Task

RECIPE = """
run.seed = 38
run.threads = 1

[model.scratch]
alphabet = "0123+="
hidden_size = 16
layers = 1
heads = 2
kv_heads = 1
head_dim = 8
intermediate_size = 32
context = 16

[rollout]
prompts_per_step = 2
samples_per_prompt = 4
max_new_tokens = 4

[algorithm]
name = "grpo"
beta = 0.04

[trainer]
learning_rate = 1e-2
"""
TASKS = [Task("sum-1", "1+2=", answer=3), Task("sum-2", "1+1=", answer=2)]

METRICS_SHOWN = (
    "train/tokens",
    "train/microbatches",
    "train/ratio_mean",
    "train/loss",
    "train/kl",
    "train/grad_norm",
    "train/entropy",
    "train/skipped",
    "mismatch/max_abs_logp",
)


def numbers(values: Sequence[float] | Tensor) -> str:
    """A row of figures, four decimals each."""
    return " ".join(f"{float(v):7.4f}" for v in values)


def print_tasks(groups: Sequence[Group]) -> None:
    """Print the input of the rollout."""
    for group in groups:
        print(f"Task id={group.task.id} prompt={group.task.prompt!r} answer={group.task.answer}")


def print_trajectories(groups: Sequence[Group], piece: Callable[[int], str]) -> None:
    """Print the output of the rollout: the four streams of one trajectory, then all completions."""
    print(f"{len(groups)} groups of {len(groups[0].trajectories)} trajectories")
    one = groups[0].trajectories[2]
    print(
        f"trajectory {one.sample} of {one.task_id}: prompt_length={one.prompt_length}"
        f" finish_reason={one.finish_reason} text={one.text!r}"
    )
    print("  piece    ", " ".join(f"{piece(t).strip('<|>')[:7]:>7}" for t in one.tokens))
    print("  tokens   ", " ".join(f"{t:7d}" for t in one.tokens))
    print("  mask     ", " ".join(f"{'T' if m else '-':>7}" for m in one.mask))
    print("  logp     ", numbers(one.logp))
    print("  version  ", " ".join(f"{v:7d}" for v in one.version))


def print_rewards(groups: Sequence[Group]) -> None:
    """Print the rewards."""
    for group in groups:
        for t in group.trajectories:
            assert t.reward is not None
            print(
                f"{t.task_id} sample {t.sample}: {t.sampled_length} tokens, {t.finish_reason:6}"
                f" text={t.text!r:6} reward={t.reward.value}"
            )


def print_batch(batch: Batch) -> None:
    """The columns that collate makes."""
    print(f"tokens, mask, old_logp, version, rewards: {list(batch.tokens.shape)}")
    print(f"lengths {batch.lengths.tolist()}")
    print(f"prompt_lengths {batch.prompt_lengths.tolist()}")
    print(f"group {batch.group.tolist()}")
    print(f"mask.sum(-1) {batch.mask.sum(-1).tolist()}")
    print(f"scores {batch.scores.tolist()}")
    print(f"old_logp[2] {numbers(batch.old_logp[2])}")


def print_reference(batch: Batch) -> None:
    """The column that the reference fills."""
    assert batch.ref_logp is not None
    print(f"ref_logp[2] {numbers(batch.ref_logp[2])}")
    print(
        "largest |ref_logp - old_logp| below 1e-5:"
        f" {bool((batch.ref_logp - batch.old_logp).abs().max() < 1e-5)}"
    )


def print_advantages(batch: Batch) -> None:
    """The two columns that the algorithm fills, a number a row: within a row they are constant on
    the sampled tokens.
    """
    assert batch.advantages is not None and batch.weights is not None
    print(f"advantages {numbers(batch.advantages.sum(-1) / batch.mask.sum(-1))}")
    print(f"weights    {weights_of(batch)}")
    print(f"weights.sum() {float(batch.weights.sum()):.4f}")


def weights_of(batch: Batch) -> str:
    """The weight of a sampled token in each row."""
    assert batch.weights is not None
    return numbers(batch.weights.amax(-1))


def print_metrics(metrics: Metrics) -> None:
    """Print the trainer's metrics of the step."""
    for key in METRICS_SHOWN:
        print(f"{key} {float(metrics[key]):.4f}")  # type: ignore[arg-type]


def print_after(batch: Batch, logp: Tensor, loss: float) -> None:
    """The same trajectories under the new weights."""
    change = (logp - batch.old_logp).sum(-1)
    print(f"change of each completion's log-prob {numbers(change)}")
    print(f"loss on the same batch {loss:.4f}")


def main() -> None:
    """Build the roles, run the six calls of a step, print what each hands to the next."""
    recipe = parse_recipe(RECIPE, "docs/one_step.py")
    assembly = assemble(recipe, reward=arithmetic_reward, tasks=TaskSet(list(TASKS), []))
    roles = build_roles(assembly)
    algorithm, reference, trainer = roles.algorithm, roles.scorers, roles.trainer
    rollout, sync = assembly.rollout(), assembly.sync

    groups = assembly.sample(rollout, TASKS, step_seed(recipe.run.seed, 1))
    print_tasks(groups)
    print_trajectories(groups, assembly.renderer.piece)
    assembly.environment.score(groups)
    print_rewards(groups)
    batch = collate(groups)
    print_batch(batch)
    batch = reference.score(batch)
    print_reference(batch)
    batch = algorithm.prepare(batch)
    print_advantages(batch)
    no_kl = make_algorithm(
        replace(resolve_algorithm(recipe.algorithm), beta=0.0), recipe.rollout.max_new_tokens
    )
    print(f"weights with beta = 0 {weights_of(no_kl.prepare(batch))}")
    metrics = trainer.train_step(batch, algorithm.compute_loss)
    print_metrics(metrics)
    before = assembly.engine.version
    sync.sync(trainer.version)
    print(f"engine.version {before} -> {assembly.engine.version}, weights shared with the trainer")
    logp = score_batch(
        assembly.policy.model,
        batch,
        assembly.scoring,
        recipe.trainer.max_tokens_per_microbatch,
        recipe.trainer.share_prefix,
    )
    print_after(batch, logp, float(algorithm.compute_loss(batch, logp).loss))
    assembly.close()


if __name__ == "__main__":
    main()
