"""Curriculum against a fixed pool: samples until a held-out accuracy, on sums of 2 to 4 numbers.

    python benchmarks/curriculum.py [--seeds 0,1,2,3,4] [--steps 80] [--target 0.65]

A small model learns such sums by SFT, once for all seeds, until it solves 30 % of the held-out
ones. From there, both arms train with GRPO on the same small pool, so that each task comes often
enough to be judged. The samples of SFT are not counted. A run that does not reach the target counts
with all its samples, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import sixfold
from sixfold.evaluation.statistics import mean_interval

PROMPTS, SAMPLES = 16, 8
SHARED: dict[str, Any] = {
    "run.threads": 1,
    "run.target_reward": 1.0,
    "data.arithmetic.min_terms": 2,
    "data.arithmetic.terms": 4,
    "data.arithmetic.digits": 1,
    "data.arithmetic.trace": "running",
    "data.limit": 448,
    "data.heldout": 128,
    "environment.rewards": ["arithmetic"],
    "environment.preflight": 0,
    "rollout.max_new_tokens": 40,
    "eval.every": 5,
    "eval.tasks": 0,
    "checkpoint.every": 0,
    "log.rollouts_every": 0,
}
BASE: dict[str, Any] = {
    "model.scratch.hidden_size": 64,
    "model.scratch.layers": 2,
    "model.scratch.heads": 4,
    "model.scratch.kv_heads": 4,
    "model.scratch.head_dim": 16,
    "model.scratch.intermediate_size": 192,
    "model.scratch.context": 64,
    "run.steps": 0,
    "sft.steps": 600,
    "sft.examples_per_step": 32,
    "sft.learning_rate": 2e-3,
    "sft.stop_at_accuracy": 0.3,
}
RL: dict[str, Any] = {
    "rollout.prompts_per_step": PROMPTS,
    "rollout.samples_per_prompt": SAMPLES,
    "algorithm.name": "grpo",
    "trainer.learning_rate": 4e-4,
    "trainer.schedule": "constant",
    "trainer.warmup_steps": 5,
    "trainer.max_tokens_per_microbatch": 4096,
}
ARMS: dict[str, dict[str, Any]] = {
    "fixed pool": {},
    "curriculum": {"data.curriculum.every": 5, "data.curriculum.retest": 30},
}


def run(folder: Path, name: str, settings: dict[str, Any]) -> Path:
    """Train, and return the folder of the run."""
    place = {"run.dir": str(folder), "run.name": name}
    return sixfold.train(settings={**SHARED, **place, **settings}, overwrite=True)


def evaluated(folder: Path) -> list[dict[str, float]]:
    """Metrics of the evaluated steps of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "heldout/accuracy" in line]


def samples_until(points: list[dict[str, float]], target: float) -> tuple[float, bool]:
    """Samples until the first evaluation at the target, and whether it was reached."""
    reached = [line for line in points if line["heldout/accuracy"] >= target]
    return (reached[0] if reached else points[-1])["step"] * PROMPTS * SAMPLES, bool(reached)


def interval(values: list[float]) -> str:
    """Mean with its 95 % interval."""
    return "{:.3g} [{:.3g}, {:.3g}]".format(*mean_interval(values))


def main() -> None:
    """Run all seeds of both arms, and print a line for each and the ratio."""
    parser = argparse.ArgumentParser(description="Curriculum against a fixed pool.")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="seeds, by comma")
    parser.add_argument("--steps", type=int, default=80, help="steps of RL")
    parser.add_argument("--target", type=float, default=0.65, help="held-out accuracy")
    given = parser.parse_args()
    ratios, last = [], {arm: list[float]() for arm in ARMS}
    with tempfile.TemporaryDirectory() as name:
        base = run(Path(name), "base", BASE)
        model = max((base / "checkpoints").iterdir()) / "model"
        print(f"{'seed':>4}  {'arm':<12} {'samples to target':>18}  {'last accuracy':>13}")
        for seed in map(int, given.seeds.split(",")):
            needed = {}
            for arm, own in ARMS.items():
                settings = {"model.path": str(model), "run.seed": seed, "run.steps": given.steps}
                done = run(Path(name), f"{arm.split()[0]}-{seed}", {**RL, **own, **settings})
                points = evaluated(done)
                needed[arm], reached = samples_until(points, given.target)
                last[arm].append(points[-1]["heldout/accuracy"])
                print(
                    f"{seed:>4}  {arm:<12} {'' if reached else '>':>4}{needed[arm]:>14.0f}"
                    f"  {last[arm][-1]:>13.1%}",
                    flush=True,
                )
            ratios.append(needed["curriculum"] / needed["fixed pool"])
    print(f"samples, curriculum / fixed pool: {interval(ratios)}")
    for arm, values in last.items():
        print(f"last accuracy, {arm}: {interval(values)}")
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"CPU seconds: {used.ru_utime + used.ru_stime:.0f}")


if __name__ == "__main__":
    main()
