"""Training on a GPU: tokens per second, share of the matmul rate and peak memory of whole updates.

    python benchmarks/gpu/train.py [--shapes 0.5B,1.5B] [--checkpointing none,selective,full] \\
        [--json FILE]
    python benchmarks/gpu/train.py --device cpu --tiny     # a test of the script

An update is a forward pass, a backward pass, clipping and an AdamW step on given prompts and
completions, by `Trainer.train_step`. The model has random weights. If TRL is installed in this
environment, its `GRPOTrainer` makes the same updates on the same tokens.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tiny_qwen.py

import torch
from shapes import SHAPES, make_model
from timing import Clock, Limits, measure_limits
from training_job import Job, make_job

from run import markdown
from sixfold.algorithm.composed import Composed
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, collate
from sixfold.model.device import prepare_device
from sixfold.recipe.schema import TrainerConfig
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import PROMPT, SAMPLED, Group, Reward, Task, Trajectory, Turn

MODES = ("none", "selective", "full")
WARM = 2
TINY = {"shapes": ["tiny"], "prompts": 2, "samples": 2, "prompt": 8, "completion": 12, "steps": 1}


def make_batch(job: Job, vocabulary: int, algorithm: Composed, device: torch.device) -> Batch:
    """The job's samples with advantages and weights, on the device."""
    logp = -math.log(vocabulary)  # about what a random model gives
    groups = []
    for i, (prompt, texts, rewards) in enumerate(
        zip(job.prompts, job.completions, job.rewards, strict=True)
    ):
        trajectories = [
            Trajectory(
                str(i),
                k,
                [*prompt, *text],
                PROMPT * len(prompt) + SAMPLED * len(text),
                [0.0] * len(prompt) + [logp] * len(text),
                [-1] * len(prompt) + [0] * len(text),
                turns=(Turn(len(prompt), len(prompt) + len(text)),),
                reward=Reward(reward),
            )
            for k, (text, reward) in enumerate(zip(texts, rewards, strict=True))
        ]
        groups.append(Group(Task(str(i), ""), trajectories))
    return algorithm.prepare(collate(groups).to(device))


def sixfold_updates(name: str, job: Job, clock: Clock) -> Callable[[], object]:
    """Make a function that makes one update with Sixfold's trainer."""
    model = make_model(name, clock.device, torch.float32)
    config = TrainerConfig(
        learning_rate=1e-6,
        max_tokens_per_microbatch=job.microbatch,
        activation_checkpointing=job.checkpointing,  # type: ignore[arg-type]
    )
    algorithm = Composed(ZOO["grpo"], horizon=job.longest)
    scoring = Scoring(chunk=512, autocast=torch.bfloat16 if job.bfloat16 else None)
    trainer = Trainer(PolicyRoot(model), config, scoring, total_steps=10**6)
    batch = make_batch(job, SHAPES[name].vocabulary, algorithm, clock.device)

    def update() -> None:
        metrics = trainer.train_step(batch, algorithm.compute_loss)
        assert metrics["train/updates"] == 1.0, trainer.skip_reason

    return update


def trl_updates(name: str, job: Job, clock: Clock) -> Callable[[], object]:
    """Make a function that makes one update with TRL's trainer."""
    from train_trl import trl_update

    return trl_update(name, job, clock.device)


SIDES = {"sixfold": sixfold_updates, "trl": trl_updates}


def measure(side: str, name: str, job: Job, clock: Clock, limits: Limits) -> dict[str, Any]:
    """Measure the median time of an update and peak memory. `oom` is True if memory ran out."""
    row: dict[str, Any] = {"side": side, "shape": name, "checkpointing": job.checkpointing}
    try:
        seconds, peak = _timed(SIDES[side](name, job, clock), job.steps, clock)
    except torch.OutOfMemoryError:
        return row | {"step_s": 0.0, "tok_s": 0.0, "matmul_share": 0.0, "peak_gb": 0.0, "oom": True}
    finally:
        gc.collect()
        if clock.on_gpu:
            torch.cuda.empty_cache()
    return row | {
        "step_s": seconds,
        "tok_s": job.sampled / seconds,
        "matmul_share": job.needed_flops(SHAPES[name]) / seconds / limits.matmul,
        "peak_gb": peak / 1e9,
        "oom": False,
    }


def _timed(update: Callable[[], object], steps: int, clock: Clock) -> tuple[float, int]:
    """Median seconds of an update, after WARM updates that are not timed, and peak bytes.

    The peak is 0 on a CPU.
    """
    for _ in range(WARM):
        update()
    if clock.on_gpu:
        torch.cuda.reset_peak_memory_stats(clock.device)
    seconds = []
    for _ in range(steps):
        start = clock.synchronize()
        update()
        seconds.append(clock.synchronize() - start)
    peak = torch.cuda.max_memory_allocated(clock.device) if clock.on_gpu else 0
    return statistics.median(seconds), peak


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line and check the names in it."""
    parser = argparse.ArgumentParser(
        description="Training on a GPU.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="where to run")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and job, for a test")
    parser.add_argument(
        "--shapes", default="0.5B,1.5B", help=f"comma-separated, from {', '.join(SHAPES)}"
    )
    parser.add_argument("--checkpointing", default=",".join(MODES), help="comma-separated modes")
    parser.add_argument("--prompts", type=int, default=4, help="prompts per update")
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens per prompt")
    parser.add_argument("--completion", type=int, default=512, help="mean tokens per completion")
    parser.add_argument("--microbatch", type=int, default=16384, help="tokens per micro-batch")
    parser.add_argument("--steps", type=int, default=8, help="updates that are timed")
    parser.add_argument("--json", default="", help="write the rows to this file")
    options = parser.parse_args(arguments)
    options.shapes = options.shapes.split(",")
    options.checkpointing = options.checkpointing.split(",")
    if options.tiny:
        vars(options).update(TINY)
    for names, known in ((options.shapes, SHAPES), (options.checkpointing, MODES)):
        if unknown := set(names) - set(known):
            parser.error(f"unknown {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu --tiny shows whether the benchmark runs")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure all updates and print the table."""
    options = parse(arguments)
    clock = Clock(torch.device(options.device))
    prepare_device(options.device, "bfloat16")
    limits = measure_limits(clock, torch.bfloat16 if clock.on_gpu else torch.float32)
    device = torch.cuda.get_device_name() if clock.on_gpu else platform.processor() or "CPU"
    print(f"{device}, torch {torch.__version__}: {limits.matmul / 1e12:.2f} TFLOP/s")
    sides = ["sixfold"] + ["trl"] * (importlib.util.find_spec("trl") is not None)
    rows = []
    for name in options.shapes:
        for mode in options.checkpointing:
            job = make_job(
                SHAPES[name].vocabulary,
                options.prompts,
                options.samples,
                options.prompt,
                options.completion,
                microbatch=options.microbatch,
                checkpointing=mode,
                steps=options.steps,
                bfloat16=clock.on_gpu,
            )
            # TRL has no selective checkpointing.
            rows += [
                measure(side, name, job, clock, limits)
                for side in sides
                if side == "sixfold" or mode != "selective"
            ]
    print(f"\n{markdown(rows)}")
    if "trl" not in sides:
        print("\nTRL is not installed: pip install trl")
    if options.json:
        about = {"device": device, "torch": torch.__version__, "matmul": limits.matmul}
        Path(options.json).write_text(json.dumps(about | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
