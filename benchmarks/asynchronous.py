"""Steps per minute and held-out accuracy of a run ahead of its trainer, by the bound of staleness.

    python benchmarks/asynchronous.py [--bounds 0,1,2,4] [--seeds 5] [--corrections truncated]

The demo's sums, with a verifier that takes `--check` seconds (`slow_checks.py`). Every seed has one
SFT of the demo, and all its runs start from that model: each bound as it is, and each bound above 0
with each of `--corrections`. Runs follow one another, each in a process of its own with one CPU
thread for the trainer and one for the sampler. Steps per minute are those after the first WARM_UP.
The table has means over the seeds, and the 95 % interval of held-out accuracy over all their tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from sixfold.evaluation.statistics import wilson_interval

HERE = Path(__file__).resolve().parent
WARM_UP = 4
COMMON = {
    "environment.rewards": f"['{HERE / 'slow_checks.py'}:slow_sum']",
    "data.heldout": "400",
    "eval.every": "0",
    "rollout.prompts_per_step": "16",
    "run.threads": "1",
    "run.target_reward": "0",
    "log.rollouts_every": "0",
}


@dataclass
class Row:
    """One run."""

    bound: int
    correction: str
    steps_a_minute: float
    solved: float
    tasks: int
    age: float
    mixed: float


def sixfold(folder: Path, words: list[str], settings: dict[str, str]) -> None:
    flags = [part for key, value in settings.items() for part in (f"--{key}", value)]
    subprocess.run(
        [sys.executable, "-m", "sixfold", *words, *flags, "--run.dir", str(folder)],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run(folder: Path, seed: int, bound: int, correction: str, options: argparse.Namespace) -> Row:
    """One run, and its figures."""
    name = f"{seed}-{bound}-{correction or 'plain'}"
    settings = COMMON | {
        "run.name": name,
        "run.seed": str(seed),
        "run.steps": str(options.steps),
        "model.path": str(folder / f"base-{seed}"),
        "sft.steps": "0",
        "placement.kind": "processes",
        "rollout.staleness": str(bound),
        **({"algorithm.correction": correction} if correction else {}),
    }
    sixfold(folder, ["train", "demo"], settings)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
    timed = [line["time/total_s"] for line in lines[WARM_UP:]]
    summary = json.loads((folder / name / "summary.json").read_text())
    return Row(
        bound,
        correction,
        60 / fmean(timed),
        summary["heldout_after"],
        summary["heldout_tasks"],
        fmean(line.get("async/age_mean", 0.0) for line in lines),
        fmean(line.get("async/mixed_frac", 0.0) for line in lines),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--bounds", default="0,1,2,4")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--check", type=float, default=2.0, help="seconds of a check")
    parser.add_argument("--corrections", default="truncated", help="algorithm.correction, by comma")
    options = parser.parse_args()
    os.environ["SLOW_CHECK_S"] = str(options.check)
    bounds = [int(bound) for bound in options.bounds.split(",")]
    corrections = ["", *filter(None, options.corrections.split(","))]
    kinds = [(b, c) for b in bounds for c in (corrections if b else [""])]
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for seed in range(options.seeds):
            base = COMMON | {"run.name": f"base-{seed}", "run.seed": str(seed)}
            sixfold(folder, ["sft", "demo"], base | {"environment.rewards": "['arithmetic']"})
            for bound, correction in kinds:
                found.append(run(folder, seed, bound, correction, options))
                print(f"seed {seed}: {found[-1]}", file=sys.stderr, flush=True)
    print("| bound | correction | steps a minute | ratio | held-out | age | in flight |")
    print("|---|---|---|---|---|---|---|")
    first = fmean(row.steps_a_minute for row in found if row.bound == bounds[0])
    for bound, correction in kinds:
        rows = [row for row in found if (row.bound, row.correction) == (bound, correction)]
        tasks = sum(row.tasks for row in rows)
        solved = sum(round(row.solved * row.tasks) for row in rows)
        share, low, high = wilson_interval(solved, tasks)
        speed = fmean(row.steps_a_minute for row in rows)
        print(
            f"| {bound} | {correction or 'none'} | {speed:.1f} | {speed / first:.2f} |"
            f" {share:.1%} ({low:.1%} to {high:.1%}) |"
            f" {fmean(row.age for row in rows):.2f} | {fmean(row.mixed for row in rows):.0%} |"
        )


class _Raw(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    main()
