"""Planned and measured memory of one training step: a scaled-down copy of the gsm8k recipe, on the
CPU.

    python benchmarks/memory.py

The model has the shape of Qwen2.5-0.5B at an eighth of its width and a quarter of its layers.
PyTorch's profiler records every allocation of the second step, when AdamW has its moments; the peak
is the largest sum of what is alive. It does not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import random

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM

from sixfold.algorithm.composed import make_algorithm
from sixfold.batch import Batch, collate
from sixfold.kernels.norms import fuse_norms
from sixfold.model.attention import NAME, register
from sixfold.recipe.algorithm_plan import resolve_algorithm
from sixfold.recipe.schema import Recipe
from sixfold.recipe.toml import load_recipe
from sixfold.sizing.held import held_parts, holdings
from sixfold.sizing.model_size import ModelSize, model_size
from sixfold.sizing.work import work_parts
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Reward, Task, Trajectory

SIZES = dict(
    vocab_size=4096,
    hidden_size=112,
    intermediate_size=608,
    num_hidden_layers=6,
    num_attention_heads=7,
    num_key_value_heads=1,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
PROMPT, NEW, SAMPLES, TOKENS = 96, 96, 8, 864


def main() -> None:
    """Measure every precision with every kind of checkpointing, or those that are asked for."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument(
        "--precision", choices=["bfloat16", "float32"], help="one alone (default: both)"
    )
    arguments.add_argument(
        "--checkpointing",
        choices=["none", "selective", "full"],
        help="one alone (default: all three)",
    )
    given = arguments.parse_args()
    torch.set_num_threads(1)
    for precision in [given.precision] if given.precision else ["bfloat16", "float32"]:
        for checkpointing in (
            [given.checkpointing] if given.checkpointing else ["selective", "full", "none"]
        ):
            print(f"--- {precision}, checkpointing {checkpointing}")
            measure(precision, checkpointing)


def measure(precision: str, checkpointing: str) -> None:
    """Train two steps; measure the second."""
    flags = [
        f"--rollout.max_new_tokens={NEW}",
        f"--rollout.samples_per_prompt={SAMPLES}",
        f"--trainer.max_tokens_per_microbatch={TOKENS}",
        f"--data.max_prompt_tokens={PROMPT}",
        "--trainer.logprob_chunk=64",
        f"--run.precision={precision}",
        f"--trainer.activation_checkpointing={checkpointing}",
        "--run.device=cpu",
    ]
    recipe = load_recipe("gsm8k", flags)
    register()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, attn_implementation=NAME)).eval()
    fuse_norms(model)
    method = make_algorithm(resolve_algorithm(recipe.algorithm), NEW)
    scoring = Scoring(
        1.0, recipe.trainer.logprob_chunk, torch.bfloat16 if precision == "bfloat16" else None
    )
    trainer = Trainer(PolicyRoot(model), recipe.trainer, scoring, 10)
    batch = method.prepare(rows())
    trainer.train_step(batch, method.compute_loss)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        trainer.train_step(batch, method.compute_loss)
    live = peak = 0
    allocations = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(allocations, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    size = model_size(model.config.to_dict())
    assert size is not None
    report(recipe, size, model, trainer, peak)


def report(
    recipe: Recipe, size: ModelSize, model: Qwen2ForCausalLM, trainer: Trainer, peak: int
) -> None:
    """Print plan, measured bytes and their ratio, for what is held, for one micro-batch, and in
    all.

    Args:
        recipe: the scaled-down one.
        size: of the model, from its settings.
        model: after a step.
        trainer: of the model.
        peak: most bytes alive in a step beyond those before it; gradients are among them.
    """
    weights = sum(p.nbytes for p in model.parameters())
    moments = sum(
        s[key].nbytes for s in trainer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    )
    numbers = holdings(recipe, size)
    assert numbers is not None
    held = {p.name: p.size for p in held_parts(recipe, numbers)}
    work = [p for p in work_parts(recipe, size, numbers, PROMPT, None) if p.trains]
    rows = [
        ("weights", held["weights"], weights),
        ("gradients", held["gradients"], weights),  # one float32 number for each weight
        ("AdamW moments", held["AdamW moments"], moments),
        ("one micro-batch", sum(p.size for p in work), peak - weights),
    ]
    rows.append(("peak", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    for name, planned, measured in rows:
        print(
            f"{name:<18}{planned / 1e6:>9.2f} MB planned{measured / 1e6:>9.2f} MB"
            f" measured{planned / measured:>7.2f}"
        )
    print("of the micro-batch:", ", ".join(f"{p.name} {p.size / 1e6:.2f} MB" for p in work))


def rows() -> Batch:
    """Four prompts with their samples, all of full length, scored at random."""
    chance = random.Random(1)

    def draw(count: int) -> list[int]:
        return [chance.randrange(SIZES["vocab_size"]) for _ in range(count)]

    groups = []
    for g in range(4):
        prompt = draw(PROMPT)
        samples = [
            Trajectory.one_turn(
                f"task-{g}",
                k,
                prompt,
                draw(NEW),
                [-8.0] * NEW,
                [0] * NEW,
                "stop",
                reward=Reward(float(k % 2)),
            )
            for k in range(SAMPLES)
        ]
        groups.append(Group(Task(f"task-{g}", "?"), samples))
    return collate(groups)


if __name__ == "__main__":
    main()
