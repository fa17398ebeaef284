"""Reward model's score and truth by step, of a finished run of the recipe `rlhf`.

    python benchmarks/over_optimisation.py RUN     # docs/curves/rlhf_score.svg, rlhf_truth.svg

RUN is the folder that `sixfold train rlhf` has written. The score is the mean of a step's samples,
in standard deviations of the reward model's held-out scores. The truth is the share of held-out
tasks that the verifier accepts; RL does not learn from it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from recipes import write_picture
from sixfold.report.numbers import percent
from sixfold.report.svg import Line, line_chart

STAGES = {"ppo": "with a KL penalty", "free": "without"}
SCORE, TRUTH = "reward/part/reward_model", "heldout/accuracy"


def curve(stage: Path, metric: str) -> list[tuple[int, float]]:
    """(step, value) of every step of a stage that has the metric."""
    records = map(json.loads, (stage / "metrics.jsonl").read_text().splitlines())
    found = {r["step"]: r[metric] for r in records if metric in r}
    if metric == TRUTH:  # before the first step, on all held-out tasks
        found[0] = json.loads((stage / "summary.json").read_text())["heldout_after_sft"]
    return sorted(found.items())


def main(run: Path) -> None:
    for metric, name in ((SCORE, "rlhf_score"), (TRUTH, "rlhf_truth")):
        lines = [
            Line(text, curve(run / "stages" / stage, metric), colour=number, dots=metric == TRUTH)
            for number, (stage, text) in enumerate(STAGES.items())
        ]
        for line in lines:
            print(name, line.label, [(step, round(value, 3)) for step, value in line.points[::5]])
        write_picture(name, str(line_chart(lines, percent if metric == TRUTH else "{:.1f}".format)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
