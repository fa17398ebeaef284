"""Reward model's score and truth by step, of finished runs of the recipe `rlhf`.

    for seed in 0 1 2 3 4; do
        sixfold train rlhf --run.threads 1 --run.seed $seed --run.name rlhf-$seed
    done
    python benchmarks/over_optimisation.py runs/rlhf-?

A run of recipes/rlhf.toml with the stages of over_optimisation.toml beside this file has a row per
means against over-optimisation as well.

It prints a table with a row per run, and writes the curves of the first one into docs/curves:
rlhf_score.svg and rlhf_truth.svg. The score is the mean of a step's samples,
in standard deviations of the reward model's held-out scores. The truth is the share of held-out
tasks that the verifier accepts; RL does not learn from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes import write_picture
from sixfold.report.numbers import percent, points
from sixfold.report.svg import Line, line_chart
from sixfold.stages.drift import read_drift

STAGES = {"ppo": "with a KL penalty", "free": "without, three times the learning rate"}
MEANS = {
    "free": "none",
    "ppo": "a third of the learning rate, KL penalty, beta = 0.2, 60 steps",
    "penalised": "KL penalty, beta = 0.2",
    "reset": "the same, reference reset every 10 steps",
    "stopped": "stop after 2 evaluations without a new best truth",
    "ensemble": "3 reward models, mean - 1 deviation",
    "early": "10 steps",
    "refreshed": "10 steps, then a reward model of their samples",
}
SCORE, TRUTH = "reward/part/reward_model", "heldout/accuracy"


def curve(stage: Path, metric: str) -> list[tuple[int, float]]:
    """(step, value) of every step of a stage that has the metric."""
    records = map(json.loads, (stage / "metrics.jsonl").read_text().splitlines())
    found = {r["step"]: r[metric] for r in records if metric in r}
    if metric == TRUTH:  # before the first step, on all held-out tasks
        found[0] = json.loads((stage / "summary.json").read_text())["heldout_after_sft"]
    return sorted(found.items())


def row(run: Path) -> list[str]:
    """Held-out share of SFT and of both PPO runs, each with the best of its evaluations."""
    judge = [
        record["reward_model/heldout_accuracy"]
        for record in map(json.loads, (run / "stages/judge/metrics.jsonl").read_text().splitlines())
        if "reward_model/heldout_accuracy" in record
    ]
    cells = [run.name, percent(judge[-1])]
    for stage in STAGES:
        summary = json.loads((run / "stages" / stage / "summary.json").read_text())
        before, after = summary["heldout_after_sft"], summary["heldout_after"]
        if len(cells) == 2:
            cells.append(percent(before))
        step, best = max(curve(run / "stages" / stage, TRUTH), key=lambda point: point[1])
        cells += [f"{percent(after)} ({points(after - before)})", f"{percent(best)} at {step}"]
    return cells


def means(run: Path) -> list[list[str]]:
    """Of each: truth at the end, best evaluation, steps, last score, KL to the first model."""
    rows = []
    for stage, text in MEANS.items():
        folder = run / "stages" / stage
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        last = [line for line in lines if SCORE in line][-1]
        after = json.loads((folder / "summary.json").read_text())["heldout_after"]
        step, best = max(curve(folder, TRUTH), key=lambda point: point[1])
        found = percent(after), f"{percent(best)} at {step}", str(last["step"])
        rows.append([text, *found, f"{last[SCORE]:.2f}", f"{read_drift(folder):.3f}"])
    return rows


def main(runs: Sequence[Path]) -> None:
    for metric, name in ((SCORE, "rlhf_score"), (TRUTH, "rlhf_truth")):
        lines = [
            Line(text, curve(runs[0] / "stages" / stage, metric), colour=at, dots=metric == TRUTH)
            for at, (stage, text) in enumerate(STAGES.items())
        ]
        write_picture(name, str(line_chart(lines, percent if metric == TRUTH else "{:.1f}".format)))
    print("| run | pairs in order | SFT | with KL | its best | without | its best |")
    print("|---|---|---|---|---|---|---|")
    for run in runs:
        print(f"| {' | '.join(row(run))} |")
    for run in runs:
        if (run / "stages" / "refreshed").is_dir():
            print(f"\n{run.name}\n| means | truth at the end | its best | steps | score | KL |")
            print("|---|---|---|---|---|---|")
            print("\n".join(f"| {' | '.join(cells)} |" for cells in means(run)))


if __name__ == "__main__":
    main([Path(run) for run in sys.argv[1:]])
