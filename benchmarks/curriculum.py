"""Curriculum against a fixed pool: samples until a held-out accuracy, on sums of 2 to 6 numbers.

    python benchmarks/curriculum.py [--seeds 0,1,2,3,4] [--steps 150] [--target 0.6]

Both arms have the model, the tasks, the warm-up and the noise of the recipe `demo` with a wide
range of difficulty: after SFT, the shortest sums are nearly always solved and the longest nearly
never. Samples of the warm-up are the same and are not counted. A run that does not reach the target
counts with all its samples, and the table says so.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import fmean, stdev

from sixfold.commands import train

TASK = {
    "data.arithmetic.min_terms": 2,
    "data.arithmetic.terms": 6,
    "data.arithmetic.digits": 1,
    "data.arithmetic.trace": "running",
    "data.limit": 2048,
    "data.heldout": 256,
    "rollout.max_new_tokens": 48,
    "rollout.prompts_per_step": 16,
    "sft.stop_at_accuracy": 0.3,
    "eval.every": 10,
    "eval.tasks": 0,
    "checkpoint.every": 0,
    "log.rollouts_every": 0,
    "run.target_reward": 1.0,
}
ARMS = {
    "fixed pool": {},
    "curriculum": {"data.curriculum.every": 10, "data.curriculum.retest": 60},
}
QUANTILES = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""97.5 % quantile of Student's t for so many seeds."""


def run(folder: Path, arm: str, seed: int, steps: int) -> list[dict[str, float]]:
    """Metrics of the evaluated steps of one run."""
    name = f"{arm.replace(' ', '-')}-{seed}"
    settings = {
        **TASK,
        **ARMS[arm],
        "run.dir": folder,
        "run.name": name,
        "run.seed": seed,
        "run.steps": steps,
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        code = train.run(["demo", *flags])
    if code:
        raise SystemExit(f"{name} failed:\n{said.getvalue()[-4000:]}")
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "heldout/accuracy" in line]


def samples_until(evaluated: list[dict[str, float]], target: float) -> tuple[float, bool]:
    """Samples until the first evaluation at the target, and whether it was reached."""
    per_step = TASK["rollout.prompts_per_step"] * 8  # type: ignore[operator]
    reached = [line for line in evaluated if line["heldout/accuracy"] >= target]
    return (reached[0] if reached else evaluated[-1])["step"] * per_step, bool(reached)


def interval(values: list[float]) -> str:
    if len(values) not in QUANTILES:
        return f"{fmean(values):.3g}"
    half = QUANTILES[len(values)] * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):.3g} ({fmean(values) - half:.3g} to {fmean(values) + half:.3g})"


def main() -> None:
    """Run all seeds of both arms, and print a line for each and the ratio."""
    parser = argparse.ArgumentParser(description="Curriculum against a fixed pool.")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="seeds, by comma")
    parser.add_argument("--steps", type=int, default=150, help="steps of RL")
    parser.add_argument("--target", type=float, default=0.6, help="held-out accuracy")
    given = parser.parse_args()
    ratios, final = [], {arm: list[float]() for arm in ARMS}
    print(f"{'seed':>4}  {'arm':<12} {'samples to target':>18}  {'last accuracy':>13}")
    with tempfile.TemporaryDirectory() as folder:
        for seed in map(int, given.seeds.split(",")):
            needed = {}
            for arm in ARMS:
                evaluated = run(Path(folder), arm, seed, given.steps)
                needed[arm], reached = samples_until(evaluated, given.target)
                final[arm].append(evaluated[-1]["heldout/accuracy"])
                print(
                    f"{seed:>4}  {arm:<12} {'' if reached else '>':>4}{needed[arm]:>14.0f}"
                    f"  {final[arm][-1]:>13.1%}",
                    flush=True,
                )
            ratios.append(needed["curriculum"] / needed["fixed pool"])
    print(f"samples, curriculum / fixed pool: {interval(ratios)}")
    for arm, values in final.items():
        print(f"last accuracy, {arm}: {interval(values)}")
    print(f"CPU seconds: {time.process_time():.0f}")


if __name__ == "__main__":
    main()
